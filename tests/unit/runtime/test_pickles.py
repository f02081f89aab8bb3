"""Tensors on their way to ranks come as they are, in few bytes."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

from autopar.runtime.pickles import dumps

ROWS = torch.arange(12.0).reshape(3, 4)
TENSORS = {
    "no dims": torch.tensor(2.5, dtype=torch.bfloat16),
    "booleans": torch.tensor([True, False]),
    "complex": torch.randn(2, 3, dtype=torch.complex64),
    "conjugate": torch.randn(3, dtype=torch.complex128).conj(),
    "turned": ROWS.T,
    "some rows": ROWS[1:],
    "nothing": torch.empty(0, 3),
    "parameter": torch.nn.Parameter(ROWS),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_as_they_are(name: str) -> None:
    tensor = TENSORS[name]
    first, second = pickle.loads(dumps({"tensors": [tensor, tensor]}))["tensors"]
    assert first is second and type(first) is type(tensor) and first.requires_grad == tensor.requires_grad
    assert first.dtype == tensor.dtype and first.stride() == tensor.stride() and torch.equal(first, tensor)


def test_of_a_view_its_own_elements_are_sent_and_can_be_changed() -> None:
    """A pickle of torch's has all of the memory."""
    sent = dumps(torch.zeros(1000, 8)[:2])
    assert len(sent) < 2 * 8 * 4 + 200
    came: Tensor = pickle.loads(sent)
    came.add_(1).untyped_storage().resize_(128)
    assert came.sum() == 16


def test_attributes_come_too() -> None:
    marked = torch.zeros(2)
    marked.mark = "here"  # type: ignore[attr-defined]
    assert pickle.loads(dumps(marked)).mark == "here"
