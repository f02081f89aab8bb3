"""Every operator with a row that multiplies what it sums over has FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autopar._torch import pytree
from autopar.rules import RULES
from autopar.rules.language import parse
from autopar.rules.oracle import call_of
from passes.annotate_flops import FLOPS
from tests.unit.rules.samples import Case, fill
from tests.unit.rules.table import SAMPLES

PICKS = (torch.ops.aten.nll_loss_nd.default,)
"""Of all that they sum over, each row takes one: the value and the weight of its class."""


def shared(target: Any, one: Case) -> list[tuple[int, int]]:
    """Pairs of operands that have a factor which the results lack."""
    args, kwargs = fill((list(one.args), dict(one.kwargs)))
    spec = parse(RULES[target].text(call_of(target, args, kwargs)))
    outs = factors(spec.outs)
    ins = [factors([operand]) - outs for operand in spec.ins]
    return [(first, second) for second in range(len(ins)) for first in range(second) if ins[first] & ins[second]]


def factors(operands: Sequence[Any]) -> set[str]:
    return {factor for operand in operands for dim in operand if dim is not None for factor in dim.factors}


def bilinear(function: Callable[..., Tensor], operands: list[Tensor], pair: tuple[int, int]) -> bool:
    """Whether `function` is linear in each of two operands, up to what it adds, and multiplies them."""
    def at(first: float, second: float) -> Tensor:
        factors = dict(zip(pair, (first, second), strict=True))
        return function([operand * factors.get(place, 1) for place, operand in enumerate(operands)])

    def line(one: Tensor, two: Tensor, three: Tensor) -> bool:
        return torch.allclose(three - two, two - one, rtol=1e-6, atol=1e-9)

    straight = line(at(0, 1), at(0.5, 1), at(1, 1)) and line(at(1, 0), at(1, 0.5), at(1, 1))
    return straight and not torch.allclose(at(1, 1) + at(0, 0), at(1, 0) + at(0, 1))


def called(target: Any, one: Case) -> tuple[Callable[[list[Tensor]], Tensor], list[Tensor]]:
    """The first result of a call, as a function of its floating operands; and these."""
    leaves, spec = pytree.tree_flatten(fill((list(one.args), dict(one.kwargs))))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(operands: list[Tensor]) -> Tensor:
        given = list(leaves)
        for place, operand in zip(places, operands, strict=True):
            given[place] = operand
        args, kwargs = pytree.tree_unflatten(given, spec)
        return next(leaf for leaf in pytree.tree_leaves(target(*args, **kwargs)) if isinstance(leaf, Tensor))

    return run, [leaves[place].detach() for place in places]


def multiplies(target: Any, one: Case) -> bool:
    torch.manual_seed(0)
    run, operands = called(target, one)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run(operands)
    pairs = [pair for pair in shared(target, one) if all(operands[place].is_floating_point() for place in pair)]
    return counter.get_total_flops() > 0 or any(bilinear(run, operands, pair) for pair in pairs)


@pytest.mark.parametrize("target", list(RULES), ids=lambda op: str(op).removeprefix("aten.").split(" at ")[0])
def test_products_have_flops(target):
    assert target in FLOPS or target in PICKS or not any(multiplies(target, one) for one in SAMPLES[target])


def test_products_are_found():
    aten = torch.ops.aten
    assert all(any(multiplies(target, one) for one in SAMPLES[target]) for target in (aten.addmv.default, aten.dot.default, aten.conv_transpose3d.input, aten.addmm.default))
    assert not any(multiplies(aten.mse_loss.default, one) for one in SAMPLES[aten.mse_loss.default])
