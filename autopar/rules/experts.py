"""Layers of experts: by tokens, by experts, by both at once, or by the width of each expert.

    tokens              the plain operator on shards; every rank needs all experts (data parallel)
    width               each rank has a slice of every expert (tensor parallel): a partial sum
    own_experts         tokens are whole; each rank computes the rows of its own experts: a partial sum
    expert_dispatch     tokens and experts are cut by one axis: tokens go to the ranks of their experts and results come
                        back (GShard, https://arxiv.org/abs/2006.16668), once to a rank that has several of them

Where a token goes is data. Prices and counts take routing to be balanced: any k experts are as likely
(`autopar.routing`). Where each rank has one expert, tokens are neither sent twice nor left out, and the sum over all
ranks of what is really sent is exactly that.
"""

from __future__ import annotations

import ast
import math
from functools import cache, partial
from typing import Any

import torch

from autopar.routing import parts_of_run, parts_of_token, rows_sent
from autopar.rules.language import Call, Together
from autopar.rules.rule import Rule
from autopar.rules.site import InnerCollective, Inside, Site
from passes import ops

HIDDEN, CHOSEN, GATES, UP, DOWN, BIAS = range(6)
NUMBER_BYTES = 8


def experts(call: Call) -> str:
    """One factor per dim of the tokens; the first layer has one or two columns for each row of the second: two halves,
    or pairs side by side."""
    lead, columns = _tokens(call), "(f g!)" if call.args[ops.INNER].startswith("pairs") else "(g! f)"
    bias = f", e {columns}" if len(call.ins) > BIAS else ""
    return f"{lead} i!, {lead} k!, {lead} k!, e@own_experts i! {columns}, e f o{bias} -> {lead} o"


def second_layer(call: Call) -> float:
    """The share of the second of both products."""
    first, second = (math.prod(call.ins[layer].sizes[1:]) for layer in (UP, DOWN))
    return second / (first + second)


def _tokens(call: Call) -> str:
    return " ".join(f"t{d}" for d in range(len(call.ins[HIDDEN].shape) - 1))


def dispatched(call: Call, ways: int) -> Together:
    """Each dim of the tokens together with the experts."""
    return [((factor, "e"), "expert_dispatch") for factor in _tokens(call).split()]


def rows(site: Site) -> float:
    """Rows that one rank computes: those of its tokens, or its experts' share of them where the tokens are not cut."""
    tensor = site.operands[CHOSEN]
    found = site.local(CHOSEN, *range(len(tensor.shape)))
    for option, size in zip(site.options, site.sizes, strict=True):
        found /= size if option.run == "own_experts" else 1
    return found


def sent(site: Site) -> float:
    """Rows that leave a rank along the axis: a token goes once to a coordinate, from the major axis to the minor
    ones."""
    return _held_and_sent(site, site.ways)[1]


def _held_and_sent(site: Site, parts: int) -> tuple[float, float]:
    """Tokens with experts along the axis that a rank has before anything is sent there, and the rows that leave it
    where each goes once to each of so many equal parts of the axis."""
    along = [axis for axis, option in enumerate(site.options) if option.run == "expert_dispatch"]
    own = math.prod(size for option, size in zip(site.options, site.sizes, strict=True) if option.run == "own_experts")
    tokens = site.local(CHOSEN, *range(len(site.operands[CHOSEN].shape) - 1))
    at = along.index(site.axis)
    sizes = [1, *(site.sizes[axis] for axis in along[:at]), parts]
    held, *further = rows_sent(
        tokens, site.operands[UP].sizes[0], _chosen(site), sizes, own, parts_of_run if site.in_a_row else parts_of_token
    )
    return (held, *further)[at], further[at]


def _chosen(site: Site) -> int:
    """To how many experts a token goes."""
    return site.operands[CHOSEN].sizes[-1]


def reached(site: Site, parts: int) -> float:
    """To how many of so many equal parts of the axis a token goes that has experts there."""
    held, leave = _held_and_sent(site, parts)
    return leave / held


def apart(site: Site) -> float:
    """How many times as many rows would leave a rank if one went to each expert."""
    return rows(site) / sent(site)


def there_bytes(site: Site) -> float:
    """All rows of the ranks of the axis (each sends its own, of which (n - 1) / n leave it): tokens, the numbers of
    their experts and the gates."""
    return (
        sent(site) * (_width_bytes(site) + _chosen(site) * (NUMBER_BYTES + site.operands[GATES].itemsize)) * site.ways
    )


def gradients_bytes(site: Site) -> float:
    """The gradients of tokens and gates, as they came."""
    tokens, gates = (
        site.operands[HIDDEN].grad * _width_bytes(site),
        site.operands[GATES].grad * _chosen(site) * site.operands[GATES].itemsize,
    )
    return sent(site) * (tokens + gates) * site.ways


def _width_bytes(site: Site) -> float:
    return site.operands[HIDDEN].sizes[-1] * site.operands[HIDDEN].itemsize


def returned_bytes(site: Site) -> float:
    """Results, which are as wide as this rank's part of `down`."""
    return sent(site) * site.local(DOWN, 2) * site.operands[HIDDEN].itemsize * site.ways


def counts_bytes(site: Site) -> float:
    """Each rank tells each other how many rows there are."""
    return float(site.ways**2 * NUMBER_BYTES)


def parts(site: Site) -> dict[int, float]:
    """Axes that cut the width of experts, whose ranks have all tokens: where each sends its part of them, rows are
    gathered for all, k for each token that is gathered anyway."""
    chosen = _chosen(site)
    return {
        axis: rows(site) * _width_bytes(site) * (chosen - 1) / chosen
        for axis, option in enumerate(site.options)
        if axis != site.axis and option.split and option.ins[HIDDEN].value == "R" and not option.run
    }


def kept_bytes(site: Site) -> float:
    """What the backward needs beside the weights, per row: the row, what is kept between both layers, the result for
    the gate's gradient, three indices (with a bias four) and the gate."""
    between = site.local(DOWN, 1) * kept_between(_inner(site), site.operands[HIDDEN].itemsize)
    width = site.operands[HIDDEN].sizes[-1] + site.local(DOWN, 2)
    indices = 3 + (len(site.operands) > BIAS)
    return rows(site) * (
        width * site.operands[HIDDEN].itemsize + between + indices * NUMBER_BYTES + site.operands[GATES].itemsize
    )


def moved_bytes(site: Site) -> float:
    """What the forward reads and writes beside the operands and the output, per row: the row three times (gathered,
    then read), the first result written and read, what is between, the second result written, scaled, put in order and
    summed up."""
    first = site.local(UP, 2) * (2 + 3 * (len(site.operands) > BIAS))
    width = (
        3 * site.operands[HIDDEN].sizes[-1]
        + first
        + moved_between(_inner(site)) * site.local(DOWN, 1)
        + 6 * site.local(DOWN, 2)
    )
    return rows(site) * width * site.operands[HIDDEN].itemsize


def _inner(site: Site) -> str:
    assert site.call is not None, "what is between two layers is an argument of the call"
    return str(site.call.args[ops.INNER])


@cache
def kept_between(inner: str, itemsize: int) -> float:
    """Bytes that autograd keeps between both layers for each column that the second one reads, that one too: asked of
    autograd itself."""
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    columns, found = 8, dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:1] == (1,):  # not the weights of the second layer
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    source = torch.ones(1, columns if inner.startswith("lambda") else 2 * columns, dtype=dtype, requires_grad=True)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = ops.inner_of(inner)(source * 1)
        result @ torch.ones(columns, 1, dtype=dtype, requires_grad=True)
    return sum(found.values()) / columns


@cache
def moved_between(inner: str) -> int:
    """Columns that pointwise kernels between both layers read and write for each that the second one reads."""
    kernels = [node for node in ast.walk(ast.parse(inner, mode="eval")) if isinstance(node, (ast.BinOp, ast.Call))]
    found = [[node.left, node.right] if isinstance(node, ast.BinOp) else _operands(node) for node in kernels]
    return sum(1 + sum(not isinstance(operand, ast.Constant) for operand in operands) for operands in found if operands)


def _operands(call: ast.Call) -> list[ast.expr]:
    """Tensors and numbers that a call is given; none for `halves` and `pairs`, which only look."""
    given = [operand for operand in call.args if not isinstance(operand, (ast.Lambda, ast.UnaryOp))]
    cast = isinstance(call.func, ast.Attribute) and call.func.attr == "to"
    return [call.func.value] if cast and isinstance(call.func, ast.Attribute) else given


def if_any_learns(site: Site) -> int:
    """Once where tokens or gates have a gradient, which then goes back as they came."""
    return int(site.operands[HIDDEN].grad or site.operands[GATES].grad)


_ROWS = partial(InnerCollective, "all_to_all", parts=parts, apart=apart, reached=reached)
FORWARD = (InnerCollective("all_to_all", counts_bytes), _ROWS(there_bytes), _ROWS(returned_bytes, last=True))
BACKWARD = (_ROWS(returned_bytes), _ROWS(gradients_bytes, if_any_learns, last=True))

RULES: dict[Any, Rule] = {ops.experts: Rule(experts, together=dispatched, partly={"o": second_layer})}

INSIDE: dict[Any, Inside] = {ops.experts: Inside(kept_bytes, moved_bytes)}
