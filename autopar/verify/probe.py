"""Finds the first node that goes wrong, on ranks, from an emitted file with probes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autopar.codegen.edges import LayoutPair
from autopar.layout import NO_GRAD, Layout, show
from autopar.runtime import reshard
from autopar.runtime.replay import running_again
from autopar.verify.compare import difference
from autopar.verify.step import Light


class _Probes:
    """Collects, in forward order, every value put together and, once the backward ran, every gradient."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.calls: dict[str, int] = {}
        self.values: list[tuple[str, int, Tensor]] = []
        self.gradients: dict[tuple[str, int], Tensor | None] = {}

    def __call__(self, _: Any, name: str, value: Tensor, pair: str, shape: tuple[int, ...]) -> Tensor:
        if running_again():
            return value
        number = self.calls.get(name, 0)
        self.calls[name] = number + 1
        lies = LayoutPair.of(pair)
        self.values.append((name, number, self._whole(value.detach(), lies.value, shape)))
        if NO_GRAD in lies.grad:
            return value
        self.gradients[name, number] = None
        if value.requires_grad:
            value = value.view_as(value)  # a node of its own: the hook sees the gradient of all readers together
            value.register_hook(lambda grad: self._keep(name, number, grad, lies.grad, shape))
        return value

    def _whole(self, value: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
        whole = show(("R",) * len(layout))
        return reshard(value, f"{show(layout)} -> {whole}", grad=None, shape=shape, mesh=self.mesh).clone()

    def _keep(self, name: str, number: int, grad: Tensor, layout: Layout, shape: tuple[int, ...]) -> None:
        self.gradients[name, number] = self._whole(grad.detach(), layout, shape)


def first_difference(source: str, light: Light, wanted: Mapping[str, list[Any]], tolerance: float) -> str:
    """One rank: run with probes and name the first node whose value differs, or the last whose gradient does; "" where none does.
    `wanted` has the value and the gradient of every node, one pair per instance of its block."""
    module = light.build(source)
    probes = _Probes(module.MESH)
    for kind in (type(module), *(block for block, _ in module.RUNS.values())):
        setattr(kind, "probe", lambda *args: probes(*args))  # noqa: B010 -- classes of this source only; no other has it
    outputs = module(*module.shard_batch(**light.batch))
    if light.plan.mode == "train":
        outputs["loss"].backward()
    for name, number, value in probes.values:
        if difference(value, wanted[name][number][0]) > tolerance:
            return f"{name} (value{_instance(number, wanted[name])})"
    for name, number, _ in reversed(probes.values):
        right = wanted[name][number][1]
        if (name, number) in probes.gradients and right is not None and _wrong(probes.gradients[name, number], right, tolerance):
            return f"{name} (gradient{_instance(number, wanted[name])})"
    return ""


def _wrong(grad: Tensor | None, right: Tensor, tolerance: float) -> bool:
    """Whether a gradient differs, or is missing where it is not zero."""
    return bool(right.any()) if grad is None else difference(grad, right) > tolerance


def _instance(number: int, items: list[Any]) -> str:
    return f", block {number}" if len(items) > 1 else ""
