"""The measure of difference that a verification goes by."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from autopar.verify import compare
from autopar.verify.compare import difference, scale

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_infinities_of_one_sign_are_alike_and_no_scale(dtype: torch.dtype) -> None:
    """Logits that are masked: the difference of two of them is not a number, and all was wrong."""
    wanted = torch.tensor([[-INF, 3.0, INF], [0.5, -INF, -4.0]], dtype=dtype)
    assert scale(wanted) == 4.0 and difference(wanted.clone(), wanted) == 0.0
    off = wanted.clone()
    off[1, 0] += 2
    assert difference(off, wanted) == 0.5
    for at, value in (((0, 0), INF), ((0, 0), -1e30), ((0, 2), -INF), ((0, 1), INF), ((0, 1), NAN), ((0, 0), NAN)):
        other = wanted.clone()
        other[at] = value
        assert difference(other, wanted) > 1e20 and difference(wanted, other) > 1e20, (at, value)


@pytest.mark.parametrize(
    "wanted",
    [torch.full((3,), INF), torch.full((3,), NAN), torch.zeros(0), torch.tensor(-INF)],
    ids=["infinite", "nan", "empty", "number"],
)
def test_what_has_no_finite_value_has_a_scale(wanted: Tensor) -> None:
    assert scale(wanted) == 1.0 and difference(wanted.clone(), wanted) == (INF if wanted.isnan().any() else 0.0)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (2, 3, 4)])
@pytest.mark.parametrize("chunk", [1, 4, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex128])
def test_every_element_counts(
    shape: tuple[int, ...], chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much is compared at a time."""
    monkeypatch.setattr(compare, "CHUNK", chunk)
    wanted = torch.zeros(shape, dtype=dtype)
    for at in range(wanted.numel()):
        got = wanted.clone()
        got.view(-1)[at] = 1
        assert difference(got, wanted) == difference(wanted, got) == 1.0 and difference(got, got.clone()) == 0.0


def test_other_shapes_kinds_and_none_are_infinitely_far() -> None:
    wanted = torch.ones(2, 3)
    assert {
        difference(got, wanted) for got in (None, wanted.T, wanted[:1], wanted[None], wanted.to(torch.complex64))
    } == {INF}
