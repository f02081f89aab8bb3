"""Backwards that are taken apart: weights that are used more than once, against a backward in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.runtime.split_backward import Group, add_gradients, disjoint

USES: dict[str, Callable[[Tensor, Sequence[Tensor]], Tensor]] = {
    "once each": lambda x, w: F.linear(F.linear(x, w[0]), w[1]),
    "in a row": lambda x, w: F.linear(F.linear(x, w[0]), w[0]),
    "around another": lambda x, w: F.linear(F.linear(F.linear(x, w[0]), w[1]), w[0]),
    "beside another": lambda x, w: F.layer_norm(x, (4,), w[2], w[3]) @ w[1] + w[3],
    "a single number": lambda x, w: (x * w[4]) @ w[0] + w[4],
    "added twice": lambda x, w: x + w[2] + w[3] + (x + w[3]),
}


def _groups(out: Tensor, x: Tensor, weights: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, list[Group]]:
    """The gradient of `x`, and one group for each weight: the worst that torch may make of them."""

    def node(leaf: Tensor) -> object:
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]

    readers: dict[object, list[object]] = {}
    todo, seen = [out.grad_fn], {out.grad_fn}
    while todo:
        here = todo.pop()
        for there, _ in here.next_functions:
            if there is not None:
                readers.setdefault(there, []).append(here)
                if there not in seen:
                    seen.add(there)
                    todo.append(there)

    def above(start: object, stop: set[object]) -> tuple[set[object], list[object]]:
        found, met, left = {start}, {}, [start]
        while left:
            for reader in readers.get(left.pop(), []):
                if reader in stop:
                    met[reader] = None
                elif reader not in found:
                    found.add(reader)
                    left.append(reader)
        return found, list(met)

    from_input, _ = above(node(x), set())
    groups: list[Group] = [
        {"params": {node(w)}, "intermediates": above(node(w), from_input)[1]} for w in weights if node(w) in readers
    ]
    for group in groups:
        group["grads"] = [None] * len(group["intermediates"])
        for i, at in enumerate(group["intermediates"]):
            at.register_prehook(lambda grads, group=group, i=i: group["grads"].__setitem__(i, grads))
    (grad,) = torch.autograd.grad(out, x, upstream, retain_graph=True)
    return grad, groups


@pytest.mark.parametrize("name", USES)
def test_gradients_are_those_of_one_backward(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 4), (4, 4), (4,), (4,), ())
    ]
    wanted = torch.autograd.grad(USES[name](x, weights).square().sum(), [x, *weights], allow_unused=True)
    out = USES[name](x, weights)
    grad, groups = _groups(out, x, weights, 2 * out.detach())
    assert torch.allclose(grad, wanted[0])
    apart = disjoint(groups)
    nodes = [at for group in apart for at in group["intermediates"]]
    assert len(nodes) == len(set(nodes)) and sum(len(group["params"]) for group in apart) == len(groups)
    for group in apart:
        add_gradients(group, [x])
    for weight, right in zip(weights, wanted[1:], strict=True):
        assert (weight.grad is None) == (right is None) and (right is None or torch.allclose(weight.grad, right))


def test_groups_where_nothing_came_by_have_nothing_to_add() -> None:
    w = torch.ones(2, requires_grad=True)
    at = (w * 2).grad_fn
    (group,) = disjoint([{"params": {at.next_functions[0][0]}, "intermediates": [at], "grads": [None]}])
    assert group["intermediates"] == []
    add_gradients(group, [])
    assert w.grad is None
