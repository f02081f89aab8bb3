"""The split backward of zero-bubble schedules, for weights that a stage uses more than once.

torch (torch.distributed.pipelining._backward) puts weights into groups by their *intermediates*, the first nodes on the
way from a weight that lie on the way from an input too, records the gradients that arrive there while the backward for
the inputs runs, and later runs the backward from there to the weights, group by group. That is wrong for a weight with
several intermediates:

    * the path from one intermediate may lead through nodes of other weights to the next one, and these nodes are freed
      with their own group
    * the weight joins only one of the groups of its intermediates, and may stay in a group of its own as well (it
      depends on the order of a set): its gradient is counted twice
    * before torch 2.13, gradients that pass from one intermediate to another are counted twice

So groups that share an intermediate are merged (`disjoint`), and merged groups are run here, node by node
(`add_gradients`): each intermediate computes the gradients of its own inputs only, and only those on the side of the
weights are followed. Nothing between two intermediates runs twice, collectives included. torch runs the other groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from autopar._torch import as_received

Group = dict[str, Any]
"""As torch has them: nodes of leaves ("params"), their "intermediates", and for each of these the gradients of its
outputs ("grads")."""


def disjoint(groups: Sequence[Group]) -> list[Group]:
    """`groups`, as torch has them after the backward for the inputs, with those merged that share an intermediate.
    Intermediates that got no gradient are left out."""
    found: list[tuple[dict[Any, Any], dict[Any, None]]] = []
    for group in groups:
        came = {
            node: grads
            for node, grads in zip(group["intermediates"], group.get("grads") or (), strict=False)
            if grads is not None
        }
        weights = dict.fromkeys(group["params"])
        for other in [other for other in found if other[0].keys() & came.keys()]:
            found.remove(other)
            came, weights = other[0] | came, other[1] | weights
        found.append((came, weights))
    return [
        {"params": set(weights), "intermediates": list(came), "grads": list(came.values())} for came, weights in found
    ]


@torch.no_grad()
def add_gradients(group: Group, inputs: Sequence[Tensor]) -> None:
    """Add to the `grad` of the leaves of one group the gradients that reach them from its intermediates; `inputs` are
    those of the stage. The graph is kept."""
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
        found = torch.autograd.grad(
            [GradientEdge(*edge) for edge in below],
            [GradientEdge(leaf, 0) for leaf in leaves],
            list(below.values()),
            retain_graph=True,
            allow_unused=True,
        )
        for leaf, grad in zip(leaves, found, strict=True):
            _add(leaf.variable, grad)


def _add(weight: Tensor, grad: Tensor | None) -> None:
    if grad is not None:
        weight.grad = grad if weight.grad is None else weight.grad + grad


def _asked(node: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The gradients of the inputs of one node, from those of its outputs."""
    made = (node.apply if isinstance(node, torch.autograd.function.BackwardCFunction) else node)(*grads)
    return made if isinstance(made, tuple) else (made,)


def _leading_to(inputs: Sequence[Tensor]) -> Callable[[Any], bool]:
    """A function that says whether one of the leaves `inputs` can be reached from a node."""
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
