"""Weights in a backward that is taken apart, where one is used more than once in a stage.

torch (torch.distributed.pipelining._backward) puts weights into groups by their *intermediates*, the first nodes on the way from a weight that lie on the way
from an input too, notes the gradients that come by there when the inputs' part runs, and later goes from there to the weights, group by group. That goes wrong
for a weight with several intermediates:

    * its way from one of them leads through other weights' nodes to the next one. Those are freed when their own group was, or the other way round
    * it joins only one of the groups that its intermediates belong to, and stays in a group of its own if the set that holds them happens to name
      another one first: its gradient is found twice
    * before torch 2.13 what comes along between two intermediates is counted a second time

So groups that meet are made one, and those with several intermediates go first and node by node: each intermediate is asked for its gradients alone, and only those
of the weights' side are followed. What lies between two intermediates is not run a second time, nor are collectives in it. torch does the other groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from autopar._torch import as_received

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


@torch.no_grad()
def add_gradients(group: Group, inputs: Sequence[Tensor]) -> None:
    """Add to the `grad` of the leaves of one group what comes from its intermediates, of a stage with those `inputs`. The graph stays as it is."""
    inside = _leading_to(inputs)
    sums: dict[tuple[Any, int], Tensor] = {}
    for node, came in zip(group["intermediates"], group["grads"], strict=True):
        for edge, grad in zip(node.next_functions, _asked(node, came), strict=False):
            if grad is not None and edge[0] is not None and not inside(edge[0]):
                grad = as_received(grad, *edge)
                sums[edge] = grad if edge not in sums else sums[edge] + grad
    for (node, _), grad in [item for item in sums.items() if item[0][0] in group["params"]]:
        _add(node.variable, grad)
    below = {edge: grad for edge, grad in sums.items() if edge[0] not in group["params"]}
    leaves = list(group["params"])
    if below:
        found = torch.autograd.grad([GradientEdge(*edge) for edge in below], [GradientEdge(leaf, 0) for leaf in leaves], list(below.values()),
                                    retain_graph=True, allow_unused=True)
        for leaf, grad in zip(leaves, found, strict=True):
            _add(leaf.variable, grad)


def _add(weight: Tensor, grad: Tensor | None) -> None:
    if grad is not None:
        weight.grad = grad if weight.grad is None else weight.grad + grad


def _asked(node: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """What one node makes of the gradients of its outputs."""
    made = (node.apply if isinstance(node, torch.autograd.function.BackwardCFunction) else node)(*grads)
    return made if isinstance(made, tuple) else (made,)


def _leading_to(inputs: Sequence[Tensor]) -> Callable[[Any], bool]:
    """Whether a node of a graph has one of the leaves `inputs` below it."""
    ends = {id(x) for x in inputs}
    known: dict[Any, bool] = {}

    def leads(start: Any) -> bool:
        todo = [start]
        while todo:
            node = todo[-1]
            if node in known:
                todo.pop()
                continue
            below = [child for child, _ in node.next_functions if child is not None]
            if any(known.get(child) for child in below) or id(getattr(node, "variable", None)) in ends:
                known[node] = True
            elif left := [child for child in below if child not in known]:
                todo += left
            else:
                known[node] = False
        return known[start]

    return leads
