"""Views that are changed in place, written back into what they are views of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from passes import NORMALIZE
from tests.helpers.export import B, targets
from tests.unit.passes.test_small import Fn, data, normalized


def _filled(m: Fn, x: Tensor, y: None) -> Tensor:
    h = x @ m.w
    h.diagonal(0, 1, 2).fill_(2.0)
    return h * x


def _scaled(m: Fn, x: Tensor, y: None) -> Tensor:
    h = x @ m.w
    h.diagonal(1, -2, -1).mul_(x[..., 0, :5])
    return h.square()


def _of_another_view(m: Fn, x: Tensor, y: None) -> Tensor:
    h = x @ m.w
    h[:, 1:].diagonal(-1, 2, 1).add_(1.0)
    return h.transpose(1, 2)[:, 2:] * 2 + h.sum()


def _complex(m: Fn, x: Tensor, y: None) -> Tensor:
    h = torch.complex(x @ m.w, x)
    h.diagonal(1, 2, 1).mul_(h[:, 0, 1:] * 2)
    return torch.view_as_real(h)


@pytest.mark.parametrize("function", [_filled, _scaled, _of_another_view, _complex])
def test_a_diagonal_is_written_back(function: Callable[[Fn, Tensor, None], Tensor]) -> None:
    gm = normalized(function, data(4, 6, 6), dims={"x": {0: B}}, passes=NORMALIZE)
    assert targets(gm).count("aten.diagonal_scatter.default") == 1


def test_a_diagonal_that_is_filled_is_a_mask() -> None:
    def function(m: Fn, x: Tensor, y: None) -> Tensor:
        alike, tall = (x @ m.w) @ x.t(), x * 2
        alike.fill_diagonal_(-5.0)
        return alike.softmax(-1).sum() * tall.fill_diagonal_(7)

    gm = normalized(function, data(8, 6), passes=NORMALIZE)
    assert targets(gm).count("aten.masked_fill.Scalar") == 2


def _first_is_seen(m: Fn, x: Tensor, y: None) -> Tensor:
    """A mask as numbers is no view of the truth values."""
    there = x[..., 0] > 0
    mask = there.to(x.dtype)
    mask[:, 0] = 1
    return (x @ m.w) * mask.unsqueeze(-1) + there.sum()


def _as_it_is(m: Fn, x: Tensor, y: None) -> Tensor:
    """A cast that changes nothing is a view."""
    h = x @ m.w
    h.to(x.dtype).mul_(2)
    h.type_as(x)[:, 1] = 0.5
    return h


def _copied(m: Fn, x: Tensor, y: None) -> Tensor:
    h = x @ m.w
    g = h.to(x.dtype, copy=True)
    g[:, 0] = 3
    return h + g


@pytest.mark.parametrize("function", [_first_is_seen, _as_it_is, _copied])
def test_what_is_cast_is_a_copy_where_its_dtype_changes(function: Callable[[Fn, Tensor, None], Tensor]) -> None:
    normalized(function, data(4, 5, 6))
