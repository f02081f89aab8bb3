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
