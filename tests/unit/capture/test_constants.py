"""What no state dict holds has the same values whether the model was made for real or on the meta device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from autopar import frontend
from autopar.capture import capture
from autopar.capture.recompute import recompute, same
from tests.helpers.blocks import WIDTH, Stack, batch
from tests.helpers.tiny import TINY


class Kept(nn.Module):
    """Its constructor's arguments are attributes."""

    def __init__(self, dim, base=100.0):
        super().__init__()
        self.dim, self.base = dim, base
        self.weight = nn.Linear(dim, dim).weight
        self.register_buffer("table", base ** torch.arange(0.0, dim), persistent=False)

    def forward(self, h, *_):
        return h + h @ self.weight * self.table


class Huge(nn.Module):
    """Has more weights than any machine holds."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.weight = dim, nn.Parameter(torch.empty(1 << 45))
        self.register_buffer("table", torch.arange(0.0, dim), persistent=False)

    def reset_parameters(self):
        nn.init.normal_(self.weight)
        self.table.copy_(torch.arange(0.0, self.dim))


class ByReset(nn.Module):
    """Keeps no argument, but says how its tensors are made."""

    def __init__(self, scale):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.linear.reset_parameters()
        self.table.copy_(torch.arange(0.0, WIDTH) / WIDTH)

    def forward(self, h, *_):
        return h + self.linear(h) * self.table


class Closed(Kept):
    """A default that is not kept: 100 or not?"""

    def __init__(self, dim, secret=3.0):
        super().__init__(dim, secret)
        del self.base


class AtRandom(Kept):
    def __init__(self, dim, base=100.0):
        super().__init__(dim, base)
        self.table.uniform_()


class Disagrees(Kept):
    """Its own two ways give different values."""

    def reset_parameters(self):
        self.table.copy_(torch.zeros(self.dim))


class Divides(Closed):
    """Needs what it has only with weights."""

    def reset_parameters(self):
        self.table.fill_(1 / getattr(self, "calls", 0))


class Changed(Kept):
    """Is not what its arguments make."""

    def __init__(self, dim, base=100.0):
        super().__init__(dim, base)
        self.calls = 0


class PlainTensor(Kept):
    """A tensor that is no buffer."""

    def __init__(self, dim, base=100.0):
        super().__init__(dim, base)
        self.scale = torch.full((dim,), base) / 3

    def forward(self, h, *_):
        return super().forward(h) * self.scale


def model_of(make, layers, dtype, device):
    with torch.device(device):
        return Stack([make() for _ in range(layers)]).to(dtype)


@pytest.mark.parametrize("layers", [2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "make",
    [partial(Kept, WIDTH, 10.0), partial(ByReset, 2.0), partial(PlainTensor, WIDTH)],
    ids=["kept", "reset", "plain"],
)
def test_constants_of_a_model_on_meta_are_those_of_a_real_one(make, dtype, layers):
    x, y = (t.to(dtype) for t in batch())
    real, meta = (capture(model_of(make, layers, dtype, device), (x, y)) for device in ("cpu", "meta"))
    assert meta.graph_hash == real.graph_hash
    assert real.constants and list(meta.constants) == list(real.constants)
    assert len([name for name in real.constants if name.endswith("table")]) == layers
    assert all(same(value, real.constants[name]) for name, value in meta.constants.items())
    assert not meta.valueless and not any("no values" in note for note in meta.notes)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (partial(Closed, WIDTH), "Closed does not keep the argument secret"),
        (partial(Divides, WIDTH), "reset_parameters: division by zero"),
        (partial(AtRandom, WIDTH), "its constructor does not make it"),
        (partial(Disagrees, WIDTH), "reset_parameters and its constructor give different values"),
    ],
)
def test_what_cannot_be_recomputed_is_named(make, why):
    captured = capture(model_of(make, 1, torch.float32, "meta"), batch())
    assert captured.valueless == ("layers.0.table",) and "layers.0.table" not in captured.constants
    (note,) = captured.notes
    assert f"layers.0.table of {make.func.__name__} at layers.0 has no values" in note
    assert why in note and "real weights" in note


def test_a_module_that_has_changed_since_it_was_made_is_not_made_again():
    with torch.device("meta"):
        module = Changed(WIDTH)
    module.calls = 1
    found, why = recompute(module, ["table"])
    assert not found and "makes another module" in why["table"]


def test_weights_are_not_made():
    with torch.device("meta"):
        module = Huge(3)
    found, _ = recompute(module, ["table"])
    assert found["table"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "name",
    [
        "hf-bert",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("hf-llama", "hf-gpt2", "hf-t5", "hf-vit", "hf-neox")),
    ],
)
def test_hugging_face_models(name):
    real, meta = (frontend.load(TINY[name], batch=4, seq=16, device=device) for device in ("cpu", "meta"))
    a, b = (capture(one.model, one.args, one.kwargs) for one in (real, meta))
    assert list(a.constants) == list(b.constants) and (a.constants or name in ("hf-gpt2", "hf-t5", "hf-vit"))
    assert all(same(value, b.constants[key]) for key, value in a.constants.items())
    assert not b.valueless
