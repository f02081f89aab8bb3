"""Every operator with a row that multiplies what it sums over has FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autopar._torch import pytree
from autopar.rules import RULES
from autopar.rules.language import parse
from autopar.rules.oracle import call_of
from passes import facts, ops
from passes.annotate_flops import FLOPS, annotate_flops
from tests.unit.rules.samples import Case, fill, reseed
from tests.unit.rules.table import SAMPLES

PICKS = (torch.ops.aten.nll_loss_nd.default,)
"""Of all that they sum over, each row takes one: the value and the weight of its class."""

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


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
    reseed()
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
    assert all(
        any(multiplies(target, one) for one in SAMPLES[target])
        for target in (aten.addmv.default, aten.dot.default, aten.conv_transpose3d.input)
    )
    assert not any(multiplies(aten.mse_loss.default, one) for one in SAMPLES[aten.mse_loss.default])


def counts(target: Any, args: Sequence[Any], kwargs: Any) -> tuple[int, int]:
    """FLOPs of a call forward and backward, by the pass."""
    leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
    graph = fx.Graph()
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[place] = graph.placeholder(f"x{place}")
            leaves[place].meta |= {"val": leaf, "role": "param", "requires_grad": leaf.requires_grad}
    given, named = pytree.tree_unflatten(leaves, spec)
    call = graph.call_function(target, tuple(given), named)
    call.meta["val"] = target(*args, **kwargs)
    graph.output((call,))
    annotate_flops(fx.GraphModule(torch.nn.Module(), graph))
    return facts.flops(call), facts.backward_flops(call)


def torchs(target: Any, args: Sequence[Any], kwargs: Any) -> tuple[int, int]:
    """The same, by torch's own counter while the call runs. It counts no product with a vector."""
    with FlopCounterMode(display=False) as forward, sdpa_kernel(SDPBackend.MATH):
        out = next(leaf for leaf in pytree.tree_leaves(target(*args, **kwargs)) if isinstance(leaf, Tensor))
    with FlopCounterMode(display=False) as backward, sdpa_kernel(SDPBackend.MATH):
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def counted_alike(target: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether torch's counter says of a call what the pass should."""
    if target is torch.ops.aten.einsum.default:
        return args[0] != "bid,bjd->b"  # `einsums` sums what one operand has alone first
    return target is not ops.grouped_matmul or args[2][-1] == len(args[0])  # rows of no group


@pytest.mark.parametrize("target", FLOPS, ids=lambda op: str(op).removeprefix("aten.").split(" at ")[0])
def test_products_take_the_flops_that_torch_counts(target):
    reseed()
    for one in SAMPLES.get(target, ()):
        args, kwargs = fill((list(one.args), dict(one.kwargs)))
        (forward, backward), (wanted, back) = counts(target, args, kwargs), torchs(target, args, kwargs)
        if not wanted or not counted_alike(target, args, kwargs):
            continue
        if target is ATTENTION:  # half of it is hidden, and the scores are computed again
            assert (forward, 2 * backward) == (wanted // (1 + kwargs.get("is_causal", False)), 5 * forward), one
        elif "conv" in str(target) and args[6:7] not in ([], [1]):
            # torch counts the backward of a grouped convolution as if it had no groups
            assert (forward, backward) == (wanted, 2 * wanted), one
        else:
            assert (forward, backward) == (wanted, back), one


@pytest.mark.parametrize("exponent", range(-5, 10))
def test_powers_take_products_there_and_two_for_each_back(exponent):
    """The inverse, which the counter does not count, is one more."""
    matrix = torch.eye(3, dtype=torch.float64).mul(2).requires_grad_()
    wanted, back = torchs(torch.ops.aten.linalg_matrix_power.default, (matrix, exponent), {}) if exponent else (0, 0)
    inverse = 2 * 3**3 * (exponent < 0)
    assert counts(torch.ops.aten.linalg_matrix_power.default, (matrix, exponent), {}) == (
        wanted + inverse,
        2 * (wanted + inverse),
    )
    assert exponent < 0 or back == 2 * wanted


def weights(*sizes):
    return [torch.ones(size, requires_grad=True) for size in sizes]


@pytest.mark.parametrize(
    "name, operands, wanted",
    [
        ("dot", ((5,), (5,)), 2 * 5),
        ("vdot", ((5,), (5,)), 2 * 5),
        ("mv", ((3, 5), (5,)), 2 * 3 * 5),
        ("matmul", ((3, 5), (5,)), 2 * 3 * 5),
        ("matmul", ((5,), (5, 4)), 2 * 5 * 4),
        ("matmul", ((2, 3, 5), (5,)), 2 * 2 * 3 * 5),
        ("matmul", ((5,), (2, 5, 4)), 2 * 2 * 5 * 4),
        ("linear", ((3, 5), (5,)), 2 * 3 * 5),
        ("addmv", ((3,), (3, 5), (5,)), 2 * 3 * 5),
        ("cdist", ((3, 5), (4, 5)), 2 * 3 * 4 * 5),
    ],
)
def test_products_with_vectors_have_two_flops_for_each_pair_of_numbers(name, operands, wanted):
    """Which torch's counter leaves out. Back, as many for each factor that has a gradient."""
    target = getattr(torch.ops.aten, name).default
    for trained in (0, 1, 2):
        given = weights(*operands)
        for factor in given[len(given) - 2 :][trained:]:
            factor.requires_grad_(False)
        assert counts(target, given, {}) == (wanted, trained * wanted if any(x.requires_grad for x in given) else 0)


@pytest.mark.parametrize(
    "target, args, each",
    [
        # the operand's numbers, not the result's
        (torch.ops.aten.gelu.default, (), 8),
        (torch.ops.aten.softmax.int, (-1,), 5),
        (torch.ops.aten.sum.dim_IntList, ([1],), 1),
        (torch.ops.aten.relu.default, (), 1),
        (torch.ops.aten.exp.default, (), 1),
        (torch.ops.aten.transpose.int, (0, 1), 0),
    ],
    ids=str,
)
def test_work_per_element_grows_with_elements_and_has_no_backward_without_gradients(target, args, each):
    for size in (6, 12):
        (trained,) = weights((size, 4))
        assert counts(target, (trained, *args), {}) == (each * size * 4, each * size * 4)
        assert counts(target, (trained.detach(), *args), {}) == (each * size * 4, 0)
