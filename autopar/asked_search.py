"""The meshes and the search strategy that a request asks for, for plans of one stage. Called by onestage."""

from __future__ import annotations

import math
from functools import partial

from autopar.candidate import Candidate
from autopar.errors import InfeasibleError, PlanError
from autopar.planner import Planner
from autopar.recipes.free import space, spaces
from autopar.request import Request
from autopar.search import OWN, SEARCHES, Search, checked, exhaustive, ilp
from autopar.text import near, times
from autopar.timer import Timer


def check_mesh(request: Request) -> None:
    """Raises PlanError unless the mesh that was asked for has as many ranks as the cluster has devices."""
    if request.mesh is not None and math.prod(request.mesh) != request.cluster.devices:
        raise PlanError(
            f"mesh {times(request.mesh)} has {math.prod(request.mesh)} ranks, {request.cluster.label} has "
            f"{request.cluster.devices} devices; wanted axes that multiply to {request.cluster.devices}"
        )


def check_search(planner: Planner) -> None:
    """Raises PlanError for an unknown search, and where there is too much for the exhaustive one, before anything is
    priced."""
    search = search_of(planner.request.search)
    if search is exhaustive.search and planner.request.recipe is None:
        for sizes in searched_meshes(planner):
            exhaustive.combinations(planner.model(sizes, space(sizes), f"search on {times(sizes)}").problem)


def search_of(asked: str | Search) -> Search:
    """The strategy that was asked for. Raises PlanError where none has that name."""
    search = SEARCHES.get(asked) if isinstance(asked, str) else asked
    if search is None:
        raise PlanError(f"unknown search {asked!r}; known are {', '.join(SEARCHES)}{near(str(asked), SEARCHES)}")
    return search if search in OWN else checked(search)


def searched_meshes(planner: Planner) -> list[tuple[int, ...]]:
    """The meshes that are searched."""
    return (
        [planner.request.mesh]
        if planner.request.mesh is not None
        else spaces(planner.request.cluster, planner.cuts_samples)
    )


def looks(request: Request) -> bool:
    """Whether the request is for the default search, which glances at all meshes before it solves any (bestfirst)."""
    return request.recipe is None and search_of(request.search) is ilp.search


def run_search(planner: Planner, timer: Timer) -> tuple[Candidate | None, float]:
    """A search that was asked for by name or function, on every mesh in turn: the best answer, and the lowest proven
    bound of all meshes."""
    request = planner.request
    search, meshes = search_of(request.search), searched_meshes(planner)
    found: Candidate | None = None
    bounds: list[float] = []
    for index, sizes in enumerate(meshes):
        left = timer.left_s
        request.say(f"search on {times(sizes)}")
        try:
            solve = partial(search, time_limit_s=max(left, 0.1) / (len(meshes) - index), seed=request.seed)
            here = planner.candidate(sizes, space(sizes), "search", solve)
        except InfeasibleError as error:
            bounds += error.proven
            continue
        bounds.append(here.solution.bound_s)
        found = here if found is None or here.cost.time_s < found.cost.time_s else found
    return found, min(bounds, default=0.0)
