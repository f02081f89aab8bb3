"""What models may hold beside tensors."""

from __future__ import annotations

import threading

import pytest
import torch

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.unit.capture.test_failures import Net


class Holds(Net):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def change(self, x):
        return self.held.tanh(x) if self.held is torch else x


def test_a_model_may_hold_modules_of_python():
    captured = capture(Holds(torch), (torch.zeros(8, 4), torch.zeros(8, 4)))
    assert "aten.tanh.default" in [str(node.target) for node in captured.gm.graph.nodes]


def test_what_has_no_copies_is_named():
    with pytest.raises(
        CaptureError, match=r"Holds cannot be copied: cannot pickle '_thread.lock' object\. .* outside of the model"
    ):
        capture(Holds(threading.Lock()), (torch.zeros(8, 4), torch.zeros(8, 4)))
