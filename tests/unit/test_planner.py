"""Small decisions of the planner."""

from __future__ import annotations

from typing import Any, cast

import pytest

from autopar.cluster import Cluster
from autopar.onestage import SIMPLER, _simplest
from autopar.planner import Candidate
from autopar.problem.types import Cost, Solution
from autopar.recipes.free import spaces


def candidate(name: str, time_s: float) -> Candidate:
    nothing = cast("Any", None)
    return Candidate(name, nothing, nothing, Solution((), "ilp"), Cost(time_s, 0.0, time_s, 0.0, 0.0))


@pytest.mark.parametrize(("searched_s", "chosen", "notes"), [
    (1.0 - SIMPLER / 2, "ddp", 1),  # inside the error of the prices: the recipe, and both times are said
    (1.0 - 2 * SIMPLER, "search", 0),
    (1.0, "ddp", 0),
    (1.1, "ddp", 0),  # a search out of time may be behind a recipe
])
def test_a_recipe_is_preferred_where_prices_cannot_tell(searched_s: float, chosen: str, notes: int) -> None:
    found, about = _simplest(candidate("search", searched_s), candidate("ddp", 1.0), {"model": "m", "notes": ("other",)})
    assert found is not None and found.name == chosen
    assert len(about["notes"]) == 1 + notes
    assert not notes or ("1000 ms" in about["notes"][1] and "997.5 ms" in about["notes"][1])


def test_one_of_them_alone_is_the_answer() -> None:
    only = candidate("ddp", 1.0)
    assert _simplest(None, only, {})[0] is only and _simplest(only, None, {})[0] is only and _simplest(None, None, {})[0] is None


@pytest.mark.parametrize(("samples", "outermost"), [(64, 32), (16, 16), (24, 8), (1, 0)])
def test_the_outermost_of_three_axes_has_no_more_ranks_than_samples(samples: int, outermost: int) -> None:
    three = [m for m in spaces(Cluster.parse("h100:32x8"), lambda ways: samples % ways == 0) if len(m) == 3]
    assert {m[0] for m in three} == ({outermost} if outermost else set())
