"""State dicts that say something else than the tensors of a model: hooks that rename, cut or leave out."""

from __future__ import annotations

import pytest
import torch

from autopar.capture import capture, own_state
from autopar.frontend import load
from tests.helpers.fused import Fused
from tests.helpers.tiny import TINY


class Scaled(Fused):
    """With a buffer that is saved and one that is not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("made", torch.zeros(4), persistent=False)

    def forward(self, x):
        return super().forward(x * self.scale + self.made)


def test_weights_have_their_own_names_whatever_the_state_dict_says():
    model = Scaled()
    assert list(model.state_dict()) == ["scale", "first.weight", "second.weight"]
    assert (
        list(own_state(model)) == ["scale", "both.weight"]
        and own_state(model)["both.weight"].data_ptr() == model.both.weight.data_ptr()
    )
    captured = capture(model, (torch.randn(4, 4),))
    assert captured.order == ("scale", "both.weight") and list(captured.constants) == ["made"]
    assert any(
        "first.weight, second.weight of the state dict are no parameters of that name" in note
        for note in captured.notes
    )


@pytest.mark.parametrize("name", TINY)
def test_without_hooks_it_is_the_state_dict(name):
    model = load(TINY[name], batch=4, seq=8, device="cpu").model
    said = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    own = own_state(model)
    assert list(own) == list(said) and all(
        own[key].data_ptr() == said[key].data_ptr() and not own[key].requires_grad for key in own
    )
