"""Numbers of what a rank has of a sum, norm or maximum are refused; those of all ranks are those of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from tests.dist.test_refused import compiled, said
from tests.helpers.ranks import on_ranks

NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda g: g.norm(),
    "sum of squares": lambda g: g.pow(2).sum(),
    "greatest": lambda g: g.abs().max(),
    "mean": lambda g: g.mean(),
    "none is nan": lambda g: g.isnan().any(),
    "some are large": lambda g: (g.abs() > 0.1).any(),
    "all are small": lambda g: (g.abs() < 0.1).all(),
    "all are numbers": lambda g: torch.isfinite(g).all(),
}


def _numbers(recipe: str) -> list[str]:
    """One rank: the names of numbers that are refused of some gradient. Those of all ranks, and those that are not
    refused, are of the whole gradient."""
    made, batch = compiled(recipe)
    made.train_step(*batch)
    refused = []
    for parameter in made.parameters():
        grad = parameter.grad
        assert isinstance(grad, DTensor)
        whole = grad.full_tensor()
        for name, number in NUMBERS.items():
            wanted, got = number(whole).item(), number(grad)
            assert isinstance(got, DTensor)
            assert got.full_tensor().item() == pytest.approx(wanted, rel=1e-12), name
            if said(got.item):
                assert said(lambda got=got: float(got)) and said(lambda got=got: bool(got))
                refused.append(name)
            else:
                assert got.item() == pytest.approx(wanted, rel=1e-12), name
    aside = DTensor.from_local(torch.ones(()), torch.distributed.init_device_mesh("cpu", (1, 2)), [Partial()] * 2)
    assert aside.item() == 1  # of another mesh
    return refused


@pytest.mark.parametrize("recipe", ["zero3", "ddp"])
def test_numbers_of_parts_are_refused(recipe: str) -> None:
    """They were of this rank's part, in silence, and ranks took different branches."""
    for refused in on_ranks(2, _numbers, recipe):
        assert set(refused) == (set(NUMBERS) if recipe == "zero3" else set())
