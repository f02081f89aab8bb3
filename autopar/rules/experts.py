"""Layers of experts: by tokens, by experts, by both at once, or by the width of each expert.

    tokens              the plain operator on shards; every rank needs all experts (data parallel)
    width               each rank has a slice of every expert (tensor parallel): a partial sum
    own_experts         tokens are whole; each rank computes the rows of its own experts: a partial sum
    expert_dispatch     tokens and experts are cut by one axis: rows go to the ranks of their experts and results come back
                        (GShard, https://arxiv.org/abs/2006.16668)

Where a row goes is data. Prices and counts take routing to be balanced: of the k rows of each local token, every rank of the axis
gets the same share. Rows are neither made nor lost, so the sum over all ranks of what is really sent is exactly that.
"""

from __future__ import annotations

from typing import Any

from autopar.rules.language import Call, Together
from autopar.rules.rule import Rule
from autopar.rules.site import Inner, Inside, Site
from passes import ops

HIDDEN, CHOSEN, GATES, UP, DOWN = range(5)
COUNT_BYTES = 8


def experts(call: Call) -> str:
    """One factor per dim of the tokens; `up` has one or two layers side by side, as wide as `down` takes."""
    lead = _tokens(call)
    return f"{lead} i!, {lead} k!, {lead} k!, e@own_experts i! (g! f), e f o -> {lead} o"


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


def sent_bytes(site: Site) -> float:
    """All rows of the ranks of the axis: each sends its own, of which (n - 1) / n leave it."""
    return rows(site) * site.operands[HIDDEN].sizes[-1] * site.operands[HIDDEN].itemsize * site.sizes[site.axis]


def returned_bytes(site: Site) -> float:
    """The same for results, which are as wide as this rank's part of `down`."""
    return rows(site) * site.local(DOWN, 2) * site.operands[HIDDEN].itemsize * site.sizes[site.axis]


def counts_bytes(site: Site) -> float:
    """Each rank tells each other how many rows there are for each expert."""
    return float(site.sizes[site.axis] ** 2 * site.operands[UP].sizes[0] * COUNT_BYTES)


def kept_bytes(site: Site) -> float:
    """What the backward needs beside the weights, per row: the row, both layers' results (each activation keeps its operands and
    the product goes into the second matmul), the result for the gate's gradient, three indices and the gate."""
    width = site.operands[HIDDEN].sizes[-1] + 2 * site.local(UP, 2) + site.local(DOWN, 2)
    return rows(site) * (width * site.operands[HIDDEN].itemsize + 3 * COUNT_BYTES + site.operands[GATES].itemsize)


def moved_bytes(site: Site) -> float:
    """What the forward reads and writes beside the operands and the output, per row: the row three times (gathered, then read),
    the first result written and read, the gate, the product, the second result written, scaled, put in order and summed up."""
    inner = site.local(UP, 2)
    width = 3 * site.operands[HIDDEN].sizes[-1] + 2 * inner + 5 * site.local(DOWN, 1) + 6 * site.local(DOWN, 2)
    return rows(site) * width * site.operands[HIDDEN].itemsize


FORWARD = (Inner("all_to_all", counts_bytes), Inner("all_to_all", sent_bytes), Inner("all_to_all", returned_bytes, last=True))
BACKWARD = (Inner("all_to_all", returned_bytes), Inner("all_to_all", sent_bytes, last=True))

RULES: dict[Any, Rule] = {ops.experts: Rule(experts, together=dispatched)}

INSIDE: dict[Any, Inside] = {ops.experts: Inside(kept_bytes, moved_bytes)}
