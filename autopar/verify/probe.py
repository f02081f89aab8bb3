"""Finds the first node that goes wrong, on ranks, from an emitted file with probes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.bundle import Bundle
from autopar.codegen.edges import Pair
from autopar.layout import NO_GRAD, Layout, show
from autopar.runtime import Block, ShardedModule, reshard
from autopar.verify.compare import difference


class _Probes:
    """Collects, in forward order, every value put together and, once the backward ran, every gradient."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.calls: dict[str, int] = {}
        self.values: list[tuple[str, int, Tensor]] = []
        self.gradients: dict[tuple[str, int], Tensor] = {}

    def __call__(self, _: Any, name: str, value: Tensor, pair: str, shape: tuple[int, ...]) -> Tensor:
        number = self.calls.get(name, 0)
        self.calls[name] = number + 1
        lies = Pair.of(pair)
        self.values.append((name, number, self._whole(value.detach(), lies.value, shape)))
        if value.requires_grad and NO_GRAD not in lies.grad:
            value = value.view_as(value)  # a node of its own: the hook sees the gradient of all readers together
            value.register_hook(lambda grad: self._keep(name, number, grad, lies.grad, shape))
        return value

    def _whole(self, value: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
        whole = show(("R",) * len(layout))
        return reshard(value, f"{show(layout)} -> {whole}", grad=None, shape=shape, mesh=self.mesh).clone()

    def _keep(self, name: str, number: int, grad: Tensor, layout: Layout, shape: tuple[int, ...]) -> None:
        self.gradients[name, number] = self._whole(grad.detach(), layout, shape)


def first_difference(source: str, case: dict[str, Any], path: str, tolerance: float) -> str:
    """One rank: run with probes and name the first node whose value differs, or the last whose gradient does."""
    module = Bundle(case["plan"], source, case["constants"]).build(case["weights"])
    probes = _Probes(module.MESH)
    ShardedModule.probe = Block.probe = lambda *args: probes(*args)  # type: ignore[attr-defined]  # of this process only
    type(module).STRUCTURE = None
    outputs = module(*module.shard_batch(**case["batch"]))
    if case["plan"].mode == "train":
        outputs["loss"].backward()
    wanted = torch.load(path, weights_only=True)
    for name, number, value in probes.values:
        if difference(value, wanted[name][number][0]) > tolerance:
            return f"{name} (value{_instance(number, wanted[name])})"
    for name, number, _ in reversed(probes.values):
        grad, right = probes.gradients.get((name, number)), wanted[name][number][1]
        if grad is not None and right is not None and difference(grad, right) > tolerance:
            return f"{name} (gradient{_instance(number, wanted[name])})"
    return "no operator: a parameter's gradient is reduced wrongly after its last use"


def _instance(number: int, items: list[Any]) -> str:
    return f", block {number}" if len(items) > 1 else ""
