"""Layers of experts (mixture of experts), split by tokens, by experts, by both on one axis, or by the width of each
expert.

    tokens              the operator itself on shards; every rank needs all experts (data parallel)
    width               each rank has a slice of every expert (tensor parallel): a partial sum
    own_experts         tokens are whole; each rank computes the rows of its own experts: a partial sum
    expert_dispatch     tokens and experts are cut by one axis: tokens go to the ranks of their experts and results come
                        back (GShard, https://arxiv.org/abs/2006.16668), once to a rank that has several of them

To which experts a token goes depends on data. Prices and counts are expected values for balanced routing, where all
sets of k experts are equally likely (`autopar.routing`). Where each rank has one expert, every token is sent once per
chosen expert, and the number of rows that all ranks send together is then exact.

A *row* is a token with one of its chosen experts."""

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
    """The rule of `passes.ops.experts`: one factor per dim of the tokens. The first layer has one or two columns for
    each row of the second layer; with two, they are two halves or neighbouring pairs."""
    lead, columns = _tokens(call), "(f g!)" if call.args[ops.INNER].startswith("pairs") else "(g! f)"
    bias = f", e {columns}" if len(call.ins) > BIAS else ""
    return f"{lead} i!, {lead} k!, {lead} k!, e@own_experts i! {columns}, e f o{bias} -> {lead} o"


def second_layer(call: Call) -> float:
    """The share of the second product in the FLOPs of both."""
    first, second = (math.prod(call.ins[layer].sizes[1:]) for layer in (UP, DOWN))
    return second / (first + second)


def _tokens(call: Call) -> str:
    """The words for the dims of the tokens."""
    return " ".join(f"t{d}" for d in range(len(call.ins[HIDDEN].shape) - 1))


def dispatched(call: Call, ways: int) -> Together:
    """The sets of factors for `expert_dispatch`: each dim of the tokens together with the experts."""
    return [((factor, "e"), "expert_dispatch") for factor in _tokens(call).split()]


def rows(site: Site) -> float:
    """Rows (a token with one expert) that one rank computes: those of its tokens; of these the share of its experts
    where `own_experts` cuts these."""
    tensor = site.operands[CHOSEN]
    found = site.local(CHOSEN, *range(len(tensor.shape)))
    for option, size in zip(site.options, site.sizes, strict=True):
        found /= size if option.run == "own_experts" else 1
    return found


def sent(site: Site) -> float:
    """Rows that a rank sends along the axis of the site. Several axes are done one after the other, the major one
    first, and a token goes at most once to each coordinate of an axis."""
    return _held_and_sent(site, site.ways)[1]


def _held_and_sent(site: Site, parts: int) -> tuple[float, float]:
    """Tokens that a rank has before it sends along the axis of the site, and how many rows it sends where the axis is
    divided into `parts` equal parts and each token goes at most once to each."""
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
    """The number of experts of a token."""
    return site.operands[CHOSEN].sizes[-1]


def reached(site: Site, parts: int) -> float:
    """To how many of `parts` equal parts of the axis a token goes, in the mean over tokens."""
    held, leave = _held_and_sent(site, parts)
    return leave / held


def apart(site: Site) -> float:
    """Rows sent if a token went to each of its experts by itself, over rows sent."""
    return rows(site) / sent(site)


def there_bytes(site: Site) -> float:
    """Bytes of the rows on their way to the experts, summed over the ranks of the axis: of each the token, and the
    numbers and gates of its experts. (An all-to-all sends (n - 1) / n of these.)"""
    return (
        sent(site) * (_width_bytes(site) + _chosen(site) * (NUMBER_BYTES + site.operands[GATES].itemsize)) * site.ways
    )


def gradients_bytes(site: Site) -> float:
    """Bytes of the gradients on their way back to the tokens, summed over the ranks: those of tokens and gates, where
    they have gradients."""
    tokens, gates = (
        site.operands[HIDDEN].grad * _width_bytes(site),
        site.operands[GATES].grad * _chosen(site) * site.operands[GATES].itemsize,
    )
    return sent(site) * (tokens + gates) * site.ways


def _width_bytes(site: Site) -> float:
    """Bytes of one token."""
    return site.operands[HIDDEN].sizes[-1] * site.operands[HIDDEN].itemsize


def returned_bytes(site: Site) -> float:
    """Bytes of results on their way back, summed over the ranks; a result is as wide as the rank's shard of `down`."""
    return sent(site) * site.local(DOWN, 2) * site.operands[HIDDEN].itemsize * site.ways


def counts_bytes(site: Site) -> float:
    """Bytes of the numbers of rows that each rank tells each other rank."""
    return float(site.ways**2 * NUMBER_BYTES)


def parts(site: Site) -> dict[int, float]:
    """By axis, for axes that cut the width of the experts and whose ranks all have the same tokens: the bytes that are
    gathered in addition where each of these ranks sends its part of the tokens. Rows are gathered for all k experts of
    a token, in place of the token alone."""
    chosen = _chosen(site)
    return {
        axis: rows(site) * _width_bytes(site) * (chosen - 1) / chosen
        for axis, option in enumerate(site.options)
        if axis != site.axis and option.split and option.ins[HIDDEN].value == "R" and not option.run
    }


def kept_bytes(site: Site) -> float:
    """Bytes that the backward keeps on a rank, weights apart. For each row: the row, what is kept between both layers,
    the result (for the gradient of the gate), three int64 indices (four with a bias) and the gate."""
    between = site.local(DOWN, 1) * kept_between(_inner(site), site.operands[HIDDEN].itemsize)
    width = site.operands[HIDDEN].sizes[-1] + site.local(DOWN, 2)
    indices = 3 + (len(site.operands) > BIAS)
    return rows(site) * (
        width * site.operands[HIDDEN].itemsize + between + indices * NUMBER_BYTES + site.operands[GATES].itemsize
    )


def moved_bytes(site: Site) -> float:
    """Bytes that the forward reads and writes on a rank beside operands and output. For each row: the row three times
    (written by the gather, then read and written), the result of the first layer written and read, the activation
    between, and six times the result of the second layer (written, scaled, put in order and summed up)."""
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
