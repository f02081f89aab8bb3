"""What blocks that are run again keep: more than nothing and other results than the heavy ones, where that makes a step faster.

A level says what all blocks keep that are run again, and memory how many are. Which results are worth their bytes depends on how they lie and on what else there is room for: of all
that can be kept under the choices of a place (problem.frontier) every corner of seconds against bytes is laid out, the one of least bytes first, until one does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.errors import InfeasibleError
from autopar.joint.laid import Found
from autopar.joint.models import Chosen
from autopar.planner import Planner
from autopar.problem.frontier import Point
from autopar.problem.keeping import choices
from autopar.problem.remat import Levels


def opens(found: Found, planner: Planner) -> bool:
    """Whether some blocks are run again, and what they keep is open."""
    return bool(found.plan.remat) and len(planner.open_levels) > 1


@dataclass(eq=False)
class Fuller:
    """The choices of `chosen` with anything kept of blocks that are run again; `nothing` says of which runs, and that they keep nothing."""

    chosen: Chosen
    nothing: Levels
    _made: dict[tuple[tuple[str, tuple[str, ...]], ...], Chosen] = field(default_factory=dict)

    @staticmethod
    def of(chosen: Chosen, planner: Planner) -> Fuller:
        """All that may be kept under these choices."""
        return Fuller(replace(chosen, kept=None), planner.levels("full"))

    def keeping(self, kept: Levels) -> Chosen:
        """With just that kept, made once."""
        key = tuple((scope, tuple(names)) for scope, names in kept.items())
        if key not in self._made:
            self._made[key] = replace(self.chosen, kept=kept)
        return self._made[key]

    def fastest(self, laid: Callable[[Chosen], Found]) -> Found | None:
        """The fastest of what `laid` makes of the corners, run by run; None where nothing fits."""
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
        """Every corner of one run, the least bytes first, with `kept` of all others."""
        return (self.keeping({**kept, scope: corner.kept}) for corner in self._corners[scope])

    @cached_property
    def _corners(self) -> dict[str, Sequence[Point]]:
        """Of each run what it may keep, the least bytes first."""
        models = self.chosen.models
        return {scope: choices(models.micro, models.forward, self.chosen.solution.choice, scope).corners for scope in self.nothing}
