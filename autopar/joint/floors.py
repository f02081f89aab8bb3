"""What is known of a shape before any Problem of it is solved: lower bounds of its step and of its memory. Called by
joint.pricing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.bestfirst import PRICE_TOLERANCE
from autopar.errors import InfeasibleError
from autopar.joint.offload_gain import least_s
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape
from autopar.joint.timetables import Kind
from autopar.joint.ways import Beaten
from autopar.pipeline.schedules import SCHEDULES
from autopar.problem.time_floor import least_wait
from autopar.text import gibibytes


@dataclass(frozen=True, eq=False)
class Floors:
    """Lower bounds of plans on shapes of one space, which runs them under timetables of `kinds`."""

    context: SearchContext
    kinds: Sequence[Kind]

    def step_s(self, shape: Shape, level: str) -> float:
        """A lower bound in seconds on plans of `shape` with all blocks run again at `level`: its share of the least
        work, and then the least update on hosts; or, where that is more, what one microbatch takes through all places;
        or that work and the least wait of a pipeline."""
        cluster, work = self.context.request.cluster, self.context.work(shape.places, level)
        sizes = cluster.devices, shape.places, shape.microbatches
        work_s, chain_s = work.step_s(*sizes), work.chain_s(*sizes) / cluster.device.alone
        wait = self._wait(shape) if all(SCHEDULES[kind.schedule].virtual == 1 for kind in self.kinds) else 1.0
        return max(work_s + self.context.late_s, chain_s, work_s * wait)

    def _wait(self, shape: Shape) -> float:
        """The least ratio of the length of a step to its work, where each place has one stage."""
        wait = min(least_wait(paces, shape.microbatches) for paces in self.context.paces(shape))
        return max(1.0, wait / self.context.request.cluster.device.alone)  # places are faster while others wait

    def eased(self, shape: Shape, level: str) -> float:
        """The least work with as few blocks run again as memory requires, as a share of that with all blocks run again
        at `level`; memory is counted as if everything were cut evenly."""
        none, limit_bytes = self.context.whole.open_levels[0], self.context.mean_bytes(shape.places)
        if level == none:
            return 1.0
        most, least = (self.context.held_bytes(shape, each) for each in (none, level))
        share = min(1.0, max(0.0, most - limit_bytes) / (most - least)) if most > least else 1.0
        all_s, none_s = (self.step_s(shape, each) for each in (level, none))
        return 1.0 - (1.0 - share) * (1.0 - none_s / all_s)

    def check_memory(self, shape: Shape, level: str) -> None:
        """Raises InfeasibleError where nothing at this level can fit."""
        held_bytes, limit_bytes = self.context.held_bytes(shape, level), self.context.mean_bytes(shape.places)
        if held_bytes > limit_bytes:
            raise InfeasibleError(
                f"cut evenly it holds {gibibytes(held_bytes)} per device, {gibibytes(limit_bytes)} are there"
            )

    def check_step(self, shape: Shape, level: str, cutoff_s: float, bounds: list[float]) -> None:
        """Raises Beaten where no plan at this level can be as fast as `cutoff_s`, with as many blocks run again as
        memory requires, or where offloading to the host gains too little (joint.offload_gain); the bound is appended to
        `bounds` then."""
        floor_s = self.step_s(shape, level) * self.eased(shape, level)
        if floor_s >= cutoff_s:
            bounds.append(floor_s)
            raise Beaten(floor_s, full=False)
        if (gained_s := least_s(self.context, shape, level)) >= cutoff_s * (1 - PRICE_TOLERANCE):
            bounds.append(gained_s)
            raise Beaten(gained_s, full=True)
