"""Which results blocks keep that are run again in a pipeline: other results than those of a level, where that makes the
step faster. Called by joint.pricing and joint.own_layouts.

A level (problem.remat.LEVELS) fixes what such blocks keep, and memory decides how many blocks are run again. Which
results are worth their bytes depends on their layouts and on the memory that is left. So under the choices of a place,
corners of the trade-off of seconds against bytes (problem.remat_frontier) are laid out: a few all along it, then those
next to the fastest of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from autopar.errors import InfeasibleError
from autopar.joint.shape_problems import Chosen
from autopar.joint.staging import Found
from autopar.planner import Planner
from autopar.problem.frontier_descent import descend
from autopar.problem.remat import Levels
from autopar.problem.remat_choices import choices
from autopar.problem.remat_frontier import Choices, Point


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
        """A variant that is faster than those next to it, run after run of blocks, by the step that `laid` gives each;
        None where nothing fits."""
        best: Found | None = None
        for scope in self._choices:
            kept = dict(best.chosen.kept or self.nothing) if best is not None else dict(self.nothing)

            def step_s(corner: Point, scope: str = scope, kept: Levels = kept) -> float:
                nonlocal best
                try:
                    found = laid(self.keeping({**kept, scope: corner.kept}))
                except InfeasibleError:
                    return math.inf
                best = found if best is None or found.step_s < best.step_s else best
                return found.step_s

            descend(self._ends[scope], self._amid[scope], step_s)
        return best

    def ways(self, scope: str, kept: Levels) -> Iterator[Chosen]:
        """The variants for every corner of one run, the fewest bytes first, in which all other runs keep `kept`."""
        return (self.keeping({**kept, scope: corner.kept}) for corner in self._choices[scope].corners)

    @cached_property
    def _choices(self) -> dict[str, Choices]:
        """By scope of a run, what its blocks may keep."""
        models, choice = self.chosen.models, self.chosen.solution.choice
        return {scope: choices(models.micro, models.forward, choice, scope) for scope in self.nothing}

    @cached_property
    def _ends(self) -> dict[str, list[Point]]:
        """By scope, the first and the last corner."""
        return {scope: among.ends for scope, among in self._choices.items()}

    @cached_property
    def _amid(self) -> dict[str, Callable[[Point, Point], Point | None]]:
        """By scope, a corner between two, each found once for all timetables."""
        return {scope: cache(among.amid) for scope, among in self._choices.items()}
