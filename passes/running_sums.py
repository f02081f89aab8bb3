"""Sums that outer code makes over what blocks give (losses of routers, skip connections):

    for block in blocks:
        h, aux = block(h); total = total + 0.1 * aux

Each addition belongs to its block: the blocks then carry the sum on as they carry `h`, and nothing else outside of them
reads `aux`, so that they fold (passes.fold_repeats)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import fx

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
        if node in place or node.kwargs or not all(isinstance(operand, fx.Node) for operand in node.args):
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


__all__ = ["running_sums"]
