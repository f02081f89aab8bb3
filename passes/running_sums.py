"""Sums that outer code makes over what blocks give (losses of routers, skip connections, `x = x + block(x)`):

    for block in blocks:
        h, aux = block(h); total = total + 0.1 * aux

Each addition belongs to its block: the blocks then carry the sum on as they carry `h`, and nothing else outside of them
reads `aux`, so that they fold (passes.fold_repeats). Sums that are made behind all blocks (`torch.stack(losses).sum()`,
`for aux in losses: loss = loss + aux`) are written in that order first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten


def running_sums(graph: fx.Graph, place: Mapping[fx.Node, int], latest: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """The block of each addition of such sums, and of the outer operators that only make what is added.

    `place` is the block of each node that is in one; `latest` the last block that a node depends on, -1 where it
    depends on none."""
    found = {node: latest[node] for chain in _chains(graph, place, latest) for node in _spanning(chain, latest)}
    for node in reversed(graph.nodes):
        outer = node.op == "call_function" and node not in place and node not in found and latest[node] >= 0
        if outer and node.users and all(found.get(user) == latest[node] for user in node.users):
            found[node] = latest[node]
    return found


def _chains(graph: fx.Graph, place: Mapping[fx.Node, int], latest: Mapping[fx.Node, int]) -> list[list[fx.Node]]:
    """Additions outside of blocks, each to the result of the one before it, of something that the same or a later block
    gave."""
    ending: dict[fx.Node, list[fx.Node]] = {}  # by the last addition
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if node in place or not _adds(node):
            continue
        before, term = sorted(node.args, key=lambda operand: (latest[operand], operand not in ending))
        if before in ending:
            ending[node] = [*ending.pop(before), node]
        elif latest[before] < latest[term]:
            ending[node] = [node]
    return list(ending.values())


def _spanning(chain: list[fx.Node], latest: Mapping[fx.Node, int]) -> list[fx.Node]:
    """The additions of a chain that take something of several blocks; of the last block no more than of the one before
    it, since what the outer code does after the blocks depends on the last one, too."""
    counts = Counter(latest[node] for node in chain)
    if len(counts) < 2:
        return []
    *_, before, last = counts.values()
    return chain[: len(chain) - max(0, last - before)]


def in_order_of_blocks(gm: fx.GraphModule, place: Mapping[fx.Node, int], latest: dict[fx.Node, int]) -> None:
    """Rewrites sums outside of blocks of what the blocks give, one after the other, as additions in the order of the
    blocks: sums of stacked values, and additions to something that later blocks gave, which is added last. What such a
    sum begins with is computed before the blocks that add to it. `latest` gets the new additions."""
    for node in edit.calls(gm, aten.sum.dim_IntList, aten.sum.default):
        if terms := _stacked(node, latest):
            with edit.before(node):
                edit.replace(node, _added(terms, latest, like=node))
    for node in reversed(list(edit.calls(gm, aten.add.Tensor))):  # the whole sum before its parts
        base, terms = _summed(node, place, latest)
        if node.users and _rising(terms, latest) and latest[base] > latest[terms[0]]:
            with edit.before(node):
                edit.replace(node, _added((base, _added(terms, latest, like=node)), latest, like=node))
    edit.drop_dead(gm)
    outer = {node for node in edit.calls(gm) if node not in place and latest[node] >= 0}
    for chain in _chains(gm.graph, place, latest):
        if _spanning(chain, latest):
            _move_up(min(chain[0].all_input_nodes, key=latest.__getitem__), outer)
    edit.finish(gm)


def _move_up(node: fx.Node, outer: set[fx.Node]) -> None:
    """Moves one of the operators `outer`, and those of them that it depends on, right behind what they read. Each
    depends on a block, so that none goes among the inputs of the graph; random draws stay where they are."""
    if node in outer and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        outer.remove(node)
        for operand in node.all_input_nodes:
            _move_up(operand, outer)
        max(node.all_input_nodes).append(node)


def _stacked(node: fx.Node, latest: Mapping[fx.Node, int]) -> Sequence[fx.Node]:
    """What `node` sums over the dim that it is stacked along; empty where it is no such sum over blocks."""
    stack = node.args[0]
    if not isinstance(stack, fx.Node) or stack.target is not aten.stack.default or len(stack.users) > 1:
        return ()
    given, rank = edit.args_of(stack), facts.rank(stack)
    summed = edit.args_of(node)
    alone = [dim % rank for dim in summed.get("dim") or range(rank)] == [given["dim"] % rank]
    plain = alone and not summed.get("keepdim") and summed["dtype"] is None
    return given["tensors"] if plain and _rising(given["tensors"], latest) else ()


def _summed(
    node: fx.Node, place: Mapping[fx.Node, int], latest: Mapping[fx.Node, int]
) -> tuple[fx.Node, Sequence[fx.Node]]:
    """`base + a + b + c`, which ends in `node`, as its base and as many terms as rise; partial sums are read by nobody
    else."""
    terms: list[fx.Node] = []
    at: Any = node
    while at not in place and _adds(at) and (at is node or len(at.users) == 1):
        if terms and latest[at.args[1]] >= latest[terms[-1]]:
            break
        terms.append(at.args[1])
        at = at.args[0]
    return at, terms[::-1]


def _adds(node: fx.Node) -> bool:
    plain = node.target is aten.add.Tensor and not node.kwargs
    return plain and all(isinstance(operand, fx.Node) for operand in node.args)


def _rising(terms: Sequence[fx.Node], latest: Mapping[fx.Node, int]) -> bool:
    """Whether each term is of a later block than the one before it, and there are several."""
    blocks = [latest[term] for term in terms]
    return len(blocks) > 1 and blocks[0] > -1 and blocks == sorted(set(blocks))


def _added(terms: Sequence[fx.Node], latest: dict[fx.Node, int], *, like: fx.Node) -> fx.Node:
    total = terms[0]
    for term in terms[1:]:
        operands = (total, term)
        total = edit.call(like, aten.add.Tensor, *operands)
        latest[total] = max(latest[operand] for operand in operands)
    return total


__all__ = ["in_order_of_blocks", "running_sums"]
