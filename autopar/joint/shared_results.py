"""Results that several SearchContexts share, grouped by what they depend on. Used by search_context."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from autopar.pipeline.microbatches import Microbatching
from autopar.pipeline.units import Unit, barred, homes, units
from autopar.planner import Planner
from autopar.problem.graph import Program, Ref


@dataclass(eq=False)
class ProgramResults:
    """Results that depend on the graph alone: the same for all memory limits, recipes, and offloading."""

    program: Program
    planners: dict[int, Planner]  # by number of microbatches
    shared: dict[int, Microbatching] = field(default_factory=dict)  # by number of microbatches
    crossing: dict[tuple[str, ...], list[tuple[Ref, ...]]] = field(default_factory=dict)  # by totals
    sharable: str | None = None

    @cached_property
    def units(self) -> list[Unit]:
        """The pieces that the model can be cut into."""
        return units(self.program)

    @cached_property
    def barred(self) -> tuple[int, ...]:
        """Where no stage can begin (pipeline.units.barred)."""
        return barred(self.program)

    @cached_property
    def trained(self) -> frozenset[str]:
        """The pieces with parameters that are trained."""
        home = homes(self.program, self.units)
        return frozenset(home.get(name, name) for name in self.program.trained)


@dataclass(eq=False)
class WeightTotals:
    """Totals over all parameters, which depend on what is offloaded, and not on memory limits, recipes, or how runs of
    blocks are divided."""

    held_bytes: dict[str, float] = field(default_factory=dict)  # by level of rematerialisation
    rest_bytes: float | None = None
    update_s: float | None = None
