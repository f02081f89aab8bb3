"""A step of several microbatches on several places, from two Problems with the same choices: what every microbatch
costs, and what a step costs once.

    micro   operators, reshards, gathered weights, gradients that add up; bytes kept for the backward
    once    sums of gradients of weights that rest whole, the optimizer; bytes that rest
    forward the part of `micro` that is the forward

Each is built for the whole model on the mesh of one place. A place has a `Share` of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cluster import Device, Mesh
from autopar.cost.memory import ParameterBytes
from autopar.layout import Layout
from autopar.problem.at_rest import Resting
from autopar.problem.build import Model
from autopar.problem.graph import Op
from autopar.problem.kernels import Kernels
from autopar.problem.layout_pairs import Between
from autopar.problem.pairs import LayoutPair
from autopar.problem.prices import MovedWeight, Prices
from autopar.problem.routes import RouteTable
from autopar.problem.settings import Settings
from autopar.problem.types import Net, Node, Problem
from autopar.rules.language import Option


class MicroPrices(Prices):
    """What one of `microbatches` costs, on average: the first one's gradients are added to none."""

    def __init__(
        self,
        mesh: Mesh,
        device: Device,
        settings: Settings,
        kernels: Kernels | None = None,
        microbatches: int = 1,
        *,
        bucket_bytes: float = 0.0,
    ) -> None:
        super().__init__(mesh, device, settings, kernels, bucket_bytes=bucket_bytes)
        self.adding = (microbatches - 1) / microbatches

    def _weight_back_s(self, here: Between, grad_bytes: float, leaf_bytes: float) -> np.ndarray:
        """As Prices._weight_back_s, without gathers and the sums of gradients that wait for the end of the step."""
        return self.routes.seconds(here.read, grad_bytes) + np.where(
            here.each, self.summed_s(here, grad_bytes, leaf_bytes), 0.0
        )

    def _sums_wait_s(self, here: Between, weight: MovedWeight, last: np.ndarray) -> np.ndarray:
        """Of sums after every microbatch; others happen once per step."""
        return np.where(here.each, super()._sums_wait_s(here, weight, last), 0.0)

    def rest_bytes(self, op: Op, options: Sequence[Option]) -> float:
        """0: bytes at rest belong to StepPrices."""
        return 0.0

    def update_s(self, op: Op, options: Sequence[Option]) -> float:
        """Seconds of adding gradients up; the optimizer's step belongs to StepPrices."""
        return self.adding * self.adding_s(op, options)


class ForwardPrices(Prices):
    """What the forward alone costs: its operators with their collectives, and the changes of layout on the way."""

    def __init__(self, mesh: Mesh, device: Device, settings: Settings, kernels: Kernels | None = None) -> None:
        super().__init__(mesh, device, replace(settings, mode="inference"), kernels)

    def moves_s(self, rows: Sequence[LayoutPair], columns: Sequence[LayoutPair], size_bytes: float) -> np.ndarray:
        """[rows, columns]: seconds of the reshard from each row to each column."""
        return self.routes.seconds(self.routes.between(rows, columns).forward, size_bytes)


class StepPrices(Prices):
    """What a step costs once, however many microbatches it has."""

    late = True

    def work_s(self, op: Op, options: tuple[Option, ...]) -> tuple[float, float]:
        """0: operators run in every microbatch."""
        return 0.0, 0.0

    def table_s(
        self,
        rows: Sequence[LayoutPair],
        columns: Sequence[LayoutPair],
        size_bytes: float,
        again: Sequence[bool] = (),
        *,
        weight: bool = False,
        grad_bytes: float | None = None,
    ) -> np.ndarray:
        """Seconds of the leaves at the begin of the step, as they slow down compute, and of the sums of gradients, with
        their local copies as they slow down the collectives that they overlap (pipeline.work.Did.leaves_s). Of sums
        beside compute only the collectives: their copies are part of its work."""
        if not weight:
            return np.zeros((len(rows), len(columns)))
        here, sums_bytes = self.routes.between(rows, columns), grad_bytes or size_bytes
        summed_s = self._overlapped_s(
            here.summed, sums_bytes, self.grad_bucket_bytes(size_bytes, sums_bytes), 0.0 if self.overlap > 0.0 else None
        )
        return self._leaves_s(here, size_bytes) + np.where(here.each, 0.0, summed_s)

    def shown(
        self,
        rows: Sequence[LayoutPair],
        columns: Sequence[LayoutPair],
        weight: MovedWeight,
        seconds: np.ndarray,
        times: np.ndarray,
    ) -> np.ndarray:
        """The share of the seconds that no compute overlaps: that of the leaves."""
        leaves_s = self._leaves_s(self.routes.between(rows, columns), weight.nbytes)
        able = np.isfinite(seconds) & (seconds > 0.0)
        return np.minimum(1.0, np.divide(leaves_s, seconds, out=np.zeros_like(seconds), where=able))

    def _leaves_s(self, here: Between, size_bytes: float) -> np.ndarray:
        """Seconds that the leaves add to the forward beside which they are gathered."""
        slows = self.contention if self.overlap > 0.0 else 1.0
        return slows * self._overlapped_s(here.leaf, size_bytes, self.bucket_bytes)

    def _overlapped_s(
        self, table: RouteTable, size_bytes: float, bucket_bytes: float, shown: float | None = None
    ) -> np.ndarray:
        """[...]: seconds of each route of whose copies the share `shown` counts (None: as they overlap other
        collectives)."""
        copies_s = self.routes.waited_s(table, size_bytes, bucket_bytes)
        share = min(1.0, self.contention) if shown is None else shown
        return self.routes.seconds(table, size_bytes, bucket_bytes) - (1.0 - share) * copies_s

    def _held(self, op: Op, lies: Resting) -> ParameterBytes:
        """With the whole gradient, which adds up over the microbatches unless it is scattered after each."""
        held = super()._held(op, lies)
        if lies.each or not lies.gathered:
            return held
        times = self._elements(op, lies.leaf) / max(1, self._elements(op, lies.rest))  # a weight may have no elements
        return replace(held, gradients=held.gradients * (1 + times))

    def extra_bytes(self, op: Op, options: tuple[Option, ...]) -> float:
        """0: what the backward keeps belongs to MicroPrices."""
        return 0.0

    def passing_bytes(self, op: Op, options: tuple[Option, ...]) -> float:
        """0: tiles exist only while a microbatch runs."""
        return 0.0

    def local_bytes(self, size_bytes: float, layout: Layout) -> float:
        """0: activations belong to MicroPrices."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """The weights with which the search adds up the Problem of one microbatch and that of what happens once per step,
    as an estimate of a whole step: of `micro` seconds, `once` seconds, bytes `kept` by a microbatch, and bytes at
    `rest`."""

    micro: float
    once: float
    kept: float
    rest: float


def combined(micro: Model, once: Model, share: Share, memory_limit_bytes: float) -> Model:
    """The Problem of a step: `micro` and `once`, which have the same choices, added up with the weights of `share`."""
    nodes = tuple(
        Node(
            a.name,
            a.labels,
            share.micro * a.cost_s + share.once * b.cost_s,
            held_bytes(a, share.kept) + share.rest * b.memory_bytes,
            share.micro * a.hide_s,
            a.group,
        )
        for a, b in zip(micro.problem.nodes, once.problem.nodes, strict=True)
    )
    nets = [
        Net(
            a.name,
            a.producer,
            a.row,
            a.uses,
            share.micro * a.cost_s,
            held_bytes(a, 1.0 if a.group >= 0 else share.kept),
            a.group,
            a.shown,
        )
        for a in micro.problem.nets
    ]
    nets += [
        Net(
            f"{b.name} at the end of the step",
            b.producer,
            b.row,
            b.uses,
            share.once * b.cost_s,
            np.zeros_like(b.memory_bytes),
            b.group,
            b.shown,
        )
        for b in once.problem.nets
        if b.cost_s.any()
    ]
    problem = Problem(
        nodes, tuple(nets), micro.problem.groups, memory_limit_bytes, micro.problem.name, _check=False
    )  # sums of what was checked
    return replace(micro, problem=problem)


def held_bytes(part: Node | Net, kept: float) -> np.ndarray:
    """Bytes of a node or net with `kept` microbatches in flight; bytes that exist only while a scope runs count
    once."""
    live = 0.0 if part.live_bytes is None else part.live_bytes
    return kept * (part.memory_bytes - live) + live
