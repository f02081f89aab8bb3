"""Which results blocks keep that are run again in a pipeline: other results than those of a level, where that makes the
step faster. Called by joint.pricing and joint.own_layouts.

A level (problem.remat.LEVELS) fixes what such blocks keep, and memory decides how many blocks are run again. Which
results are worth their bytes depends on their layouts and on the memory that is left. So under the choices of a place,
every corner of the trade-off of seconds against bytes (problem.remat_frontier) is laid out, the one of fewest bytes
first, until one does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.errors import InfeasibleError
from autopar.joint.shape_problems import Chosen
from autopar.joint.staging import Found
from autopar.planner import Planner
from autopar.problem.remat import Levels
from autopar.problem.remat_choices import choices
from autopar.problem.remat_frontier import Point


def opens(found: Found, planner: Planner) -> bool:
    """Whether a found pipeline runs some blocks again, and the request leaves open what they keep."""
    return bool(found.plan.remat) and len(planner.open_levels) > 1


@dataclass(eq=False)
class Fuller:
    """The variants of `chosen` that differ in which results blocks keep that are run again. `nothing` says for all runs
    that no result is kept."""

    chosen: Chosen
    nothing: Levels
    _made: dict[tuple[tuple[str, tuple[str, ...]], ...], Chosen] = field(default_factory=dict)

    @staticmethod
    def of(chosen: Chosen, planner: Planner) -> Fuller:
        """All that may be kept under these choices."""
        return Fuller(replace(chosen, kept=None), planner.levels("full"))

    def keeping(self, kept: Levels) -> Chosen:
        """The variant that keeps just `kept` (by scope); made once."""
        key = tuple((scope, tuple(names)) for scope, names in kept.items())
        if key not in self._made:
            self._made[key] = replace(self.chosen, kept=kept)
        return self._made[key]

    def fastest(self, laid: Callable[[Chosen], Found]) -> Found | None:
        """The fastest variant, run after run of blocks, by the step that `laid` gives each; None where nothing fits."""
        best, kept = None, dict(self.nothing)
        for scope in self._corners:
            for chosen in self.ways(scope, kept):
                try:
                    found = laid(chosen)
                except InfeasibleError:
                    break  # nor does what keeps more
                if best is None or found.step_s < best.step_s:
                    best = found
            if best is not None:
                kept = dict(best.chosen.kept or kept)
        return best

    def ways(self, scope: str, kept: Levels) -> Iterator[Chosen]:
        """The variants for every corner of one run, the fewest bytes first, in which all other runs keep `kept`."""
        return (self.keeping({**kept, scope: corner.kept}) for corner in self._corners[scope])

    @cached_property
    def _corners(self) -> dict[str, Sequence[Point]]:
        """By scope of a run, the corners of what its blocks may keep, the fewest bytes first."""
        models = self.chosen.models
        return {
            scope: choices(models.micro, models.forward, self.chosen.solution.choice, scope).corners
            for scope in self.nothing
        }
