"""Weights that are complex numbers, as Fourier neural operators have (https://arxiv.org/abs/2010.08895), and state that
is no tensor, on ranks against one device."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.frontend.loading import in_dtype
from autopar.verify import case_of, verify
from autopar.verify.compare import difference
from tests.helpers.ranks import living, on_ranks
from tests.helpers.verify import Subject, planned

CHANNELS, MODES = 4, 3


class Spectral(nn.Module):
    """The low modes of a signal, each times a matrix, written into zeros, and a residual; it keeps how often it was
    made in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CHANNELS, CHANNELS, MODES, dtype=torch.complex64) / CHANNELS)
        self.skip = nn.Conv1d(CHANNELS, CHANNELS, 1)

    def get_extra_state(self) -> object:
        """What torch puts beside the tensors of a state dict."""
        return {"made": 1}

    def set_extra_state(self, state: object) -> None:
        """And takes back."""

    def forward(self, x: Tensor) -> Tensor:
        """[b, c, n] -> [b, c, n]."""
        modes = torch.fft.rfft(x)
        out = torch.zeros(x.shape[0], CHANNELS, modes.shape[-1], dtype=torch.cfloat)
        out[:, :, :MODES] = torch.einsum("bim,iom->bom", modes[:, :, :MODES], self.weight)
        out[:, :, -1] = out[:, :, 0] * 0.5
        return torch.fft.irfft(out, n=x.shape[-1]) + self.skip(x).tanh()


class Operator(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Spectral(), Spectral())

    def forward(self, x: Tensor) -> Tensor:
        """[b, c, n] -> []."""
        return self.layers(x).square().mean()


@cache
def subject() -> tuple[Subject, Captured]:
    torch.manual_seed(0)
    model = Operator()
    captured = capture(model, (torch.randn(8, CHANNELS, 16),))
    return Subject("operator", "train", captured, model.state_dict()), captured


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, CHANNELS, 16, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize(
    ("sizes", "how"), [((2, 2), "random 0"), ((2, 2), "random 1"), ((2,), "zero3"), ((2,), "zero1")]
)
def test_equals_one_device(sizes: tuple[int, ...], how: str) -> None:
    who, captured = subject()
    made = planned(who, sizes, how)
    report = verify(case_of(captured, made, who.weights, batch()), ranks=living(made.ranks))
    assert report.ok, (report.first, report.worst)
    assert any(row.kind == "gradient" and row.name == "layers.0.weight" for row in report.rows)


def _loaded(source, rank_case, state):
    module = rank_case.build(source)
    result = module.load_state_dict({**module.full_state_dict(), **state})
    return result.missing_keys, result.unexpected_keys


def test_state_that_is_no_tensor_is_told_and_passed_over() -> None:
    who, captured = subject()
    assert any(
        "layers.0._extra_state, layers.1._extra_state of the state dict are no tensors" in note
        for note in captured.notes
    )
    case = case_of(captured, planned(who, (2,), "zero3"), who.weights, batch())
    extra = {name: value for name, value in who.weights.items() if not isinstance(value, Tensor)}
    assert len(extra) == 2 and on_ranks(2, _loaded, case.source(), case.rank_case, extra) == [([], [])] * 2


def test_models_keep_their_imaginary_parts_in_another_dtype() -> None:
    before = Operator()
    weight = before.layers[0].weight.detach().clone()
    after = in_dtype(before, torch.bfloat16)
    assert torch.equal(after.layers[0].weight, weight) and after.layers[0].skip.weight.dtype is torch.bfloat16


def test_differences_of_imaginary_parts_are_seen() -> None:
    wanted = torch.complex(torch.ones(3), torch.ones(3))
    assert (
        difference(wanted + 0.5j, wanted) == 0.5
        and difference(wanted, wanted) == 0.0
        and difference(wanted.real, wanted) == float("inf")
    )
