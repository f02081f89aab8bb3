"""Descent on the choices of a pipeline, priced by the whole step: the model is cut into stages, timed, its memory
counted, and as many blocks are run again as memory requires. Called by joint.explore.

The Problem of a shape does not know what hides in which pass, nor that with slightly less memory fewer blocks have to
run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from autopar.errors import InfeasibleError
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_problems import Chosen, Mixed
from autopar.joint.staging import Found, lay
from autopar.pipeline.honing_state import HoningState
from autopar.problem.pass_tables import PassTables
from autopar.search.tangents import roamed

PRICED_MOVES = 8
"""Moves of each kind that are priced at most before the descent ends: few, since each price is that of a whole step."""


def honed(context: SearchContext, name: str, found: Found, late: Callable[[], bool]) -> Found:
    """`found`, or the result of descent from its choices where that is faster, laid out as it runs; ends early once
    `late`. Pipelines on several kinds of places, and those with layouts of their own for each place, are returned as
    they are."""
    chosen = found.chosen
    if type(chosen) is not Chosen or isinstance(chosen.models, Mixed) or chosen.models.micro.prices.overlap == 0.0:
        return found

    def laid(choice: tuple[int, ...], *, whole: bool) -> Found | None:
        made = replace(chosen, solution=replace(chosen.solution, choice=choice, optimal=False))
        try:
            return lay(context, name, found.shape, found.table, found.ground, made, whole=whole)
        except InfeasibleError:
            return None

    @cache
    def price_s(choice: tuple[int, ...]) -> float:
        here = laid(choice, whole=False)
        return math.inf if here is None else here.step_s

    choice, _ = roamed(_state(found), chosen.solution.choice, price_s, late, PRICED_MOVES)
    made = laid(choice, whole=True)
    return found if made is None or made.step_s >= found.step_s else made


def _state(found: Found) -> HoningState:
    """The State of the descent: the step as the shape's Problem weighs it, with overlap counted pass by pass."""
    chosen, table = found.chosen, found.table
    passing = PassTables(chosen.rerun(chosen.models), chosen.models.forward, sums_at_end=True)
    own_s = [node.cost_s / table.places for node in chosen.models.once.problem.nodes]
    runs = passing.model.links[0].program.runs if table.places > 1 else {}
    opening = {scope: min(1.0, table.stages / run.count) for scope, run in runs.items()}
    return HoningState(passing, chosen.solution.choice, chosen.model.problem, table.length, own_s, opening)
