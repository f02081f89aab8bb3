"""What is done without gradients: its results have none, and what it only looks at keeps its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from passes import NORMALIZE
from tests.helpers.small_graphs import Fn, data, normalized

ITSELF: dict[str, Callable[[Tensor], Tensor]] = {
    "to its dtype": lambda h: h.to(torch.float64),
    "type_as": lambda h: h.type_as(h),
    "double": lambda h: h.double(),
    "contiguous": lambda h: h.contiguous(),
    "dropout": lambda h: F.dropout(h, 0.0),
    "twice": lambda h: h.double().contiguous(),
    "two dims": torch.atleast_2d,
    "real part": torch.real,
    "conjugate": torch.conj_physical,
    "resolved": torch.resolve_conj,
    "one dim of one": lambda h: h.flatten(0, 0),
}
OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "cast": lambda h: h.float(),
    "copy": lambda h: h.to(h.dtype, copy=True),
    "view": lambda h: h.view(-1, 6),
    "of columns": lambda h: h.t().contiguous().t(),
    "half": lambda h: h * 0.5,
}


@pytest.mark.parametrize("name", [*ITSELF, *OTHER])
def test_a_tensor_that_is_looked_at_without_gradients_keeps_its_own(name: str) -> None:
    """`logits.float()` of float32 logits gives `logits`: a region that counts right answers so took the gradient of all
    that comes behind it."""

    def function(m: Fn, x: Tensor, y: None) -> Tensor:
        h = x @ m.w
        with torch.no_grad():
            seen = {**ITSELF, **OTHER}[name](h)
            right = (seen.argmax(-1) == 1).sum()
        return h * right + h * seen

    normalized(function, data(4, 6), passes=NORMALIZE)


def test_functions_that_are_called_in_another_way_are_refused() -> None:
    """It was said that capture should have set the value of a node."""

    def function(m: Fn, x: Tensor, y: None) -> Tensor:
        return torch.cond(x.sum() > 0, lambda h: h @ m.w, lambda h: h * 2, (x,))

    with pytest.raises(ValueError, match=r"calls functions by cond, .* a branch on values with torch.where"):
        normalized(function, data(4, 6), passes=NORMALIZE)


def _into_a_part(m: Fn, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.seen[:3] += h.mean(0)[:3]
    return m.seen


def _into_a_turned_one(m: Fn, h: Tensor) -> Tensor:
    rows = torch.zeros_like(h)
    turned = rows.transpose(0, 1)
    with torch.no_grad():
        turned.copy_(h.transpose(0, 1)).mul_(0.5)
    return rows


def _into_all(m: Fn, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.seen.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return m.seen


def _into_what_is_detached(m: Fn, h: Tensor) -> Tensor:
    m.seen.detach()[1:].copy_(h.mean(0)[1:])
    return m.seen


def _read_as_detached(m: Fn, h: Tensor) -> Tensor:
    """Here the view has a gradient, and what it is a view of has none."""
    rows = torch.zeros_like(h)
    view = rows.detach()
    view.add_(h)
    return rows + view.square()


@pytest.mark.parametrize(
    "write", [_into_a_part, _into_a_turned_one, _into_all, _into_what_is_detached, _read_as_detached]
)
def test_what_is_written_without_gradients_has_none(write: Callable[[Fn, Tensor], Tensor]) -> None:
    def function(m: Fn, x: Tensor, y: None) -> Tensor:
        h = x @ m.w
        return h * write(m, h)

    normalized(function, data(4, 6), passes=NORMALIZE)
