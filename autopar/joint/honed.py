"""The choices of places honed by what the whole step takes: cut into stages, timed and its memory counted, blocks run again as that wants it.

The Problem of a shape weighs seconds and bytes, and what hides in which pass it does not see; nor that a little less memory lets more blocks keep what they computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from autopar.errors import InfeasibleError
from autopar.joint.inner import Inner
from autopar.joint.laid import Found, lay
from autopar.joint.models import Chosen, Mixed
from autopar.pipeline.passed import Passed
from autopar.problem.passing import Passing
from autopar.search.tangents import roamed

TRIED = 8
"""So many moves of each kind are priced before it is given up that one is faster: a price is a whole step."""


def honed(inner: Inner, name: str, found: Found, late: Callable[[], bool]) -> Found:
    """`found`, laid out as it runs, or what descent by its price makes of its choices where that is faster; it ends early where it is `late`. Places of several kinds,
    and those that are laid out each in their own way, stay as they are."""
    chosen = found.chosen
    if type(chosen) is not Chosen or isinstance(chosen.models, Mixed) or chosen.models.micro.prices.overlap == 0.0:
        return found

    def laid(choice: tuple[int, ...], *, whole: bool) -> Found | None:
        made = replace(chosen, solution=replace(chosen.solution, choice=choice, optimal=False))
        try:
            return lay(inner, name, found.shape, found.table, found.ground, made, whole=whole)
        except InfeasibleError:
            return None

    @cache
    def price_s(choice: tuple[int, ...]) -> float:
        here = laid(choice, whole=False)
        return math.inf if here is None else here.step_s

    choice, _ = roamed(_state(found), chosen.solution.choice, price_s, late, TRIED)
    made = laid(choice, whole=True)
    return found if made is None or made.step_s >= found.step_s else made


def _state(found: Found) -> Passed:
    """A step as the Problem weighs it, but for what hides in which pass."""
    chosen, table = found.chosen, found.table
    passing = Passing(chosen.rerun(chosen.models), chosen.models.forward, late=True)
    own_s = [node.cost_s / table.places for node in chosen.models.once.problem.nodes]
    runs = passing.model.links[0].program.runs if table.places > 1 else {}
    opening = {scope: min(1.0, table.stages / run.count) for scope, run in runs.items()}
    return Passed(passing, chosen.solution.choice, chosen.model.problem, table.length, own_s, opening)
