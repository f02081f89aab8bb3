"""Operators that are left out where a block is run again: their backward must not need what running them would have made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from autopar._torch import pytree
from autopar.runtime import replay
from passes.kernel_extras import BESIDE, BY_GRADIENTS
from passes.saved import saved_positions
from tests.unit.passes.test_saved import SAMPLES
from tests.unit.rules.samples import fill
from tests.unit.rules.table import SAMPLES as PROVEN


def proven(one: Any) -> tuple[list[Any], dict[str, Any]]:
    return fill((list(one.args), dict(one.kwargs)))


def sampled(make: Callable[[], Any]) -> tuple[list[Any], dict[str, Any]]:
    return list(make()[1]), {}


CALLS = {**{target: [partial(proven, one) for one in calls] for target, calls in PROVEN.items()}, **{target: [partial(sampled, make)] for target, make in SAMPLES.items()}}
"""Of each operator, functions that give arguments."""


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def keeps_own(target: Any, operands: list[Tensor]) -> bool:
    """Whether an operator is run again for its backward, by the tables."""
    return target in BESIDE or target in BY_GRADIENTS or any(place >= len(operands) for place in saved_positions(target, [x.requires_grad for x in operands]))


def rubbish(size: Any, stride: Any, *, dtype: torch.dtype, device: torch.device, fresh: Any = torch.empty_strided) -> Tensor:
    """What uninitialised memory may hold."""
    made: Tensor = fresh(size, stride, dtype=dtype, device=device)
    return made.fill_(torch.nan if dtype.is_floating_point or dtype.is_complex else 1 if dtype == torch.bool else torch.iinfo(dtype).max)


@pytest.mark.parametrize("target", CALLS, ids=lambda target: str(target).split(" at 0x")[0])
def test_an_operator_that_is_left_out_has_its_gradients(target: Any) -> None:
    for arguments in CALLS[target]:
        torch.manual_seed(0)
        args, kwargs = arguments()
        operands, tape = tensors((args, kwargs)), replay.Tape()
        wanted = [x for x in operands if x.requires_grad]
        if keeps_own(target, operands) or not wanted:
            continue
        found = []
        for again in (False, True):
            with replay.recording(tape, again=again), mock.patch.object(torch, "empty_strided", rubbish) if again else nullcontext():
                made = [x for x in tensors(replay.skip(lambda args=args, kwargs=kwargs: target(*args, **kwargs))) if x.requires_grad]
            if made:
                found.append(torch.autograd.grad(made, wanted, [torch.ones_like(x) for x in made], allow_unused=True))
        for first, second in zip(*found, strict=True) if found else ():
            assert (first is None and second is None) or torch.equal(first, second)
