"""Weights in a backward that is taken apart, where one is used more than once in a stage.

torch (torch.distributed.pipelining._backward) puts weights into groups by their *intermediates*, the first nodes on the way from a weight that lie on the way
from an input too, notes the gradients that come by there when the inputs' part runs, and later goes from there to the weights, group by group. That goes wrong
for a weight with several intermediates:

    * its way from one of them leads through other weights' nodes to the next one. Those are freed when their own group was, or the other way round
    * it joins only one of the groups that its intermediates belong to, and stays in a group of its own if the set that holds them happens to name
      another one first: its gradient is found twice
    * before torch 2.13 what comes along between two intermediates is counted a second time

So groups that meet are made one, and those with several intermediates go first, on a graph that stays; torch does the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Group = dict[str, Any]
"""Nodes of leaves ("params"), their "intermediates", and for each of these the gradients that came by ("grads")."""


def disjoint(groups: Sequence[Group]) -> list[Group]:
    """`groups` as torch has them once the inputs' part of a backward ran, those that share an intermediate as one. Intermediates that no gradient
    came by are left out."""
    found: list[tuple[dict[Any, Any], dict[Any, None]]] = []
    for group in groups:
        came = {node: grads for node, grads in zip(group["intermediates"], group.get("grads") or (), strict=False) if grads is not None}
        weights = dict.fromkeys(group["params"])
        for other in [other for other in found if other[0].keys() & came.keys()]:
            found.remove(other)
            came, weights = other[0] | came, other[1] | weights
        found.append((came, weights))
    return [{"params": set(weights), "intermediates": list(came), "grads": list(came.values())} for came, weights in found]


def add_gradients(group: Group) -> None:
    """Add to the `grad` of the leaves of one group what comes from its intermediates, each of which passes on just what came by it. The graph
    stays as it is."""
    came = [(node, grads) for node, grads in zip(group["intermediates"], group["grads"], strict=True)]
    edges = [(GradientEdge(node, i), grad) for node, grads in came for i, grad in enumerate(grads) if grad is not None]
    leaves = list(group["params"])
    handles = [node.register_prehook(lambda _, grads=grads: grads) for node, grads in came]
    try:
        found = torch.autograd.grad([edge for edge, _ in edges], [GradientEdge(leaf, 0) for leaf in leaves], [grad for _, grad in edges], retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    for leaf, grad in zip(leaves, found, strict=True):
        weight: Tensor = leaf.variable
        weight.grad = grad if weight.grad is None else weight.grad + grad
