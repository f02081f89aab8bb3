"""Plans of one stage and one microbatch: price every recipe, search every mesh, keep the best.

    read the graph -> options per axis size -> clusters -> for each mesh a Problem -> recipes and search -> Plan
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from autopar.bestfirst import CLOSE, GLANCE_S, Elsewhere, best_first, nowhere
from autopar.cluster import Cluster
from autopar.decided import rule_notes, tiling_notes
from autopar.errors import InfeasibleError, PlanError
from autopar.layout import divisible
from autopar.memory import predict
from autopar.plan import Alternative, Plan, Predicted
from autopar.planner import Candidate, Planner, bare_plan
from autopar.problem.graph import Program
from autopar.problem.largest import largest
from autopar.problem.remat import price
from autopar.problem.shares import ForwardPrices
from autopar.recipes import RECIPES, Recipe, roles
from autopar.recipes.free import space, spaces
from autopar.recipes.offload import OFFLOADS
from autopar.recipes.pipelines import PIPELINES
from autopar.request import Request
from autopar.search import SEARCHES, Search, checked, exhaustive, ilp
from autopar.text import gibibytes, near, seconds, times
from autopar.timer import Timer


def plan(gm: fx.GraphModule, hints: Mapping[str, int], request: Request, **about: Any) -> Plan:
    """Plan one captured graph. `about` fills the Plan's fields model, graph_hash, source and notes.

    Raises InfeasibleError when no plan fits device memory, PlanError for unknown recipes, searches or meshes.
    """
    return plan_with(Planner.of(gm, hints, request), **about)


def plan_with(planner: Planner, elsewhere: Elsewhere | None = None, timer: Timer | None = None, **about: Any) -> Plan:
    """As `plan`, of the graph that `planner` has read; what it has priced before is not priced again. Without a `timer` it has the time of the request."""
    elsewhere, timer = elsewhere or nowhere(), timer or Timer(planner.request.time_limit_s)
    request = planner.request
    _check_mesh(request)
    _check_search(planner)
    best: Candidate | None = None
    tried: list[Alternative] = []
    bounds: list[float] = []

    def known() -> float:
        return min(best.cost.time_s, elsewhere.seconds) if best is not None else math.inf

    def enough(level: str) -> bool:
        if best is not None and not _short_of_memory(planner, best):
            return True
        if planner.work(level).step_s(request.cluster.devices, 1, 1) >= known() * (1 - SIMPLER):
            return True  # nothing can be won there
        return best is not None and timer.skips()

    for level in _fitting(planner, planner.open_levels, tried, enough):
        known_s = known()
        found, said, more, bound = _at_one_level(planner, timer, known_s, elsewhere, about)
        tried += more if level == request.remat_level else [replace(one, name=f"{one.name}, {level} remat") for one in more]
        bounds.append(bound)
        if found is not None and (best is None or found.cost.time_s < best.cost.time_s * (1 - SIMPLER)):
            best, about = found, said
    if best is None:
        raise InfeasibleError(_shortfall(planner, tried), missing_bytes=min(planner.missing_bytes, default=None))
    if request.remat == "auto" and best.remat:  # bounds are of the levels; nothing is proven of all that could be kept
        fuller = planner.counted(best.keeping(ForwardPrices(best.mesh, request.cluster.device, request.settings)))
        best, bounds = fuller if fuller.peak <= request.limit_bytes else best, [0.0]
    made = finish(planner, best, min(bounds), tried, about)
    return replace(made, notes=timer.noted(made.notes))


def beating(planner: Planner, known_s: float, open_: Sequence[str], timer: Timer, **about: Any) -> Plan:
    """The fastest plan of the free search, with no more run again than it takes to fit, at one of the levels `open_`. Raises InfeasibleError
    where none that fits is faster than `known_s`."""
    for level in _fitting(planner, open_, []):
        short = len(planner.missing_bytes)
        found, bound_s = _search(planner, timer, None, known_s, nowhere())
        if found is not None and found.cost.time_s < known_s * (1 - CLOSE):
            return finish(planner, found, bound_s if level == "none" else 0.0, [], about)
        if len(planner.missing_bytes) == short:
            break  # not for want of memory
    raise InfeasibleError(f"no plan that fits is faster than {seconds(known_s)}")


def _fitting(planner: Planner, among: Sequence[str], tried: list[Alternative], enough: Callable[[str], bool] = lambda level: False) -> Iterator[str]:
    """Those of the levels `among` at which something may fit, until it is `enough` in front of one, with the blocks run again in all that `planner`
    prices; a line in `tried` for each of the others. A level that was asked for is always tried: its plans say what each of them lacks."""
    request = planner.request
    for level in among:
        if enough(level):
            return
        planner.remat = planner.levels(level)
        if len(planner.open_levels) > 1 and (over := planner.least_bytes() - request.limit_bytes) > 0:
            planner.missing_bytes.append(over)
            tried.append(Alternative(f"{level} remat", (request.cluster.devices,), None, None,
                                     f"cut evenly over all devices it is {gibibytes(over)} per device over the limit"))
            continue
        yield level


def _at_one_level(planner: Planner, timer: Timer, known_s: float, elsewhere: Elsewhere,
                  about: dict[str, Any]) -> tuple[Candidate | None, dict[str, Any], list[Alternative], float]:
    """The best plan with the blocks of `planner.remat` run again, the Plan's fields, what was tried, and a bound; `known_s` is the step that
    another level has."""
    best, tried = _recipes(planner, timer)
    if planner.request.recipe is not None:
        return best, about, tried, 0.0
    found, bound = _search(planner, timer, best, known_s, elsewhere)
    return (*_simplest(found, best, about), tried, bound)


def _short_of_memory(planner: Planner, best: Candidate) -> bool:
    """Whether more memory would make the best plan's mesh faster than prices tell apart, by its Problem."""
    problem = best.model.problem
    room_bytes = FULL * problem.memory_limit_bytes  # what lives for a moment may have left it less than the device has
    if not planner.missing_bytes and best.cost.memory_bytes < room_bytes:
        return False
    roomy = replace(problem, memory_limit_bytes=math.inf)
    there = roomy.price(ilp.glance(roomy, time_limit_s=GLANCE_S).choice)
    if there.memory_bytes < room_bytes:
        return False  # `best` may be slower by its Problem, but not for want of memory
    return there.time_s < problem.price(best.solution.choice).time_s * (1 - 2 * CLOSE)


def _check_mesh(request: Request) -> None:
    """Raises PlanError unless the mesh that was asked for has as many ranks as the cluster has devices."""
    if request.mesh is not None and math.prod(request.mesh) != request.cluster.devices:
        raise PlanError(f"mesh {times(request.mesh)} has {math.prod(request.mesh)} ranks, {request.cluster.label} has "
                        f"{request.cluster.devices} devices; wanted axes that multiply to {request.cluster.devices}")


def _check_search(planner: Planner) -> None:
    """Raises PlanError for an unknown search, and where there is too much for the exhaustive one, before anything is priced."""
    search = _search_of(planner.request)
    if search is exhaustive.search and planner.request.recipe is None:
        for sizes in _meshes(planner):
            exhaustive.combinations(planner.model(sizes, space(sizes), f"search on {times(sizes)}").problem)


def _search_of(request: Request) -> Search:
    """The strategy that was asked for. Raises PlanError where none has that name."""
    search = SEARCHES.get(request.search) if isinstance(request.search, str) else request.search
    if search is None:
        raise PlanError(f"unknown search {request.search!r}; known are {', '.join(SEARCHES)}{near(str(request.search), SEARCHES)}")
    return search if search in SEARCHES.values() else checked(search)


def _meshes(planner: Planner) -> list[tuple[int, ...]]:
    """The meshes that are searched."""
    return [planner.request.mesh] if planner.request.mesh is not None else spaces(planner.request.cluster, planner.cuts_samples)


FULL = 0.9  # of memory: what uses more may have been pushed there
RECIPE_S = 0.6  # seconds for one recipe on one mesh: what it leaves open is settled within microseconds of its step
SIMPLER = 0.005  # relative: below this a difference is inside the error of the prices, and a recipe is easier to live with


def _simplest(found: Candidate | None, recipe: Candidate | None, about: dict[str, Any]) -> tuple[Candidate | None, dict[str, Any]]:
    """The search's answer, or the best recipe where that is as fast within `SIMPLER`; then the notes say both times."""
    if found is None or recipe is None:
        return found or recipe, about
    searched_s, named_s = found.cost.time_s, recipe.cost.time_s
    if named_s > searched_s * (1 + SIMPLER):
        return found, about
    if searched_s < named_s:
        note = (f"{recipe.name} ({seconds(named_s)}) rather than what the search found ({seconds(searched_s)}): "
                f"prices do not tell {100 * (named_s / searched_s - 1):.2f} % apart")
        about = {**about, "notes": (*about.get("notes", ()), note)}
    return recipe, about


def meshes_for(recipe: Recipe, cluster: Cluster, fixed: tuple[int, ...] | None) -> list[tuple[int, ...]]:
    """The meshes on which a recipe is tried: as many axes as it has roles, or may have."""
    if fixed is not None:
        return [fixed] if recipe.roles_on(len(fixed)) else []
    meshes = cluster.meshes(max_axes=max(1, len(recipe.roles)))
    counts = [n for n in range(1, len(recipe.roles) + 1) if recipe.roles_on(n)]
    return [m for n in counts for m in [m for m in meshes if len(m) == n][:3]]


def undivided(program: Program, recipe: Recipe, sizes: tuple[int, ...]) -> str:
    """Why a recipe cannot split the batch on a mesh, where it is one that splits samples; empty where it can, or nothing has a batch."""
    ways = math.prod(size for role, size in zip(recipe.roles_on(len(sizes)), sizes, strict=True) if role in roles.BY_SAMPLE)
    batches = [op.call.outs[0].sizes[0] for op in program.ops.values() if op.role == "input" and 0 in op.batch[0]]
    if not batches or not all(size % ways for size in batches):
        return ""
    size = batches[0]
    return (f"recipe {recipe.name} splits the samples over {ways} ranks (mesh {times(sizes)}), and a batch of {size} does not divide by {ways}: "
            f"use a batch of {divisible(size, ways)}, another mesh or another recipe")


def refused_meshes(planner: Planner, recipe: Recipe) -> dict[tuple[int, ...], str]:
    """The meshes on which a recipe that was asked for is tried, each with why it cannot split the batch there, empty where it can.

    Raises PlanError where there are none, or where it can on none.
    """
    request = planner.request
    refused = {sizes: undivided(planner.program, recipe, sizes) for sizes in meshes_for(recipe, request.cluster, request.mesh)}
    if not refused:
        raise PlanError(f"recipe {recipe.name} needs a mesh of {len(recipe.roles)} {'axis' if len(recipe.roles) == 1 else 'axes'}{' or fewer' * recipe.fewer}, got {request.mesh}")
    if all(refused.values()):
        raise PlanError(next(iter(refused.values())))
    return refused


def _recipes(planner: Planner, timer: Timer) -> tuple[Candidate | None, list[Alternative]]:
    """Price the recipes (or only the one that was asked for); the best of them, and a line for each."""
    request = planner.request
    if request.recipe is not None and request.recipe not in RECIPES:
        known = (*RECIPES, *PIPELINES, *OFFLOADS)
        raise PlanError(f"unknown recipe {request.recipe!r}; known are {', '.join(known)}{near(str(request.recipe), known)}")
    asked = [RECIPES[request.recipe]] if request.recipe else [r for r in RECIPES.values() if r.fits(planner.program)]
    best: Candidate | None = None
    tried: list[Alternative] = []
    for recipe in asked:
        if lacking := recipe.lacking(planner.program):
            raise PlanError(lacking)
        meshes = meshes_for(recipe, request.cluster, request.mesh)
        refused = refused_meshes(planner, recipe) if request.recipe else {}
        for sizes in meshes:
            if refused.get(sizes):
                tried.append(Alternative(recipe.name, sizes, None, None, refused[sizes]))
                continue
            if (recipe.name, sizes) in planner.settled or (best is not None and timer.skips()):
                continue
            request.say(f"recipe {recipe.name} on {times(sizes)}")
            limit = RECIPE_S if request.recipe is None else max(1.0, timer.left_s)
            try:
                found = planner.candidate(sizes, recipe.roles_on(len(sizes)), recipe.name, partial(ilp.search, time_limit_s=limit))
            except InfeasibleError as error:
                tried.append(Alternative(recipe.name, sizes, None, None, str(error)))
                continue
            tried.append(Alternative(recipe.name, sizes, found.cost.time_s, found.peak))
            if found.peak < FULL * request.limit_bytes:
                planner.settled.add((recipe.name, sizes))
            if best is None or found.cost.time_s < best.cost.time_s:
                best = found
    return best, tried


def _search(planner: Planner, timer: Timer, best: Candidate | None, known_s: float,
            elsewhere: Elsewhere) -> tuple[Candidate | None, float]:
    """The free search over all meshes; the best answer and the least proven bound over the meshes that were searched."""
    request = planner.request
    search, meshes = _search_of(request), _meshes(planner)
    if search is ilp.search:
        return best_first(planner, meshes, timer, min(known_s, best.cost.time_s if best is not None else math.inf), elsewhere)
    found: Candidate | None = None
    bounds: list[float] = []
    for index, sizes in enumerate(meshes):
        left = timer.left_s
        request.say(f"search on {times(sizes)}")
        try:
            solve = partial(search, time_limit_s=max(left, 0.1) / (len(meshes) - index), seed=request.seed)
            here = planner.candidate(sizes, space(sizes), "search", solve)
        except InfeasibleError:
            continue
        bounds.append(here.solution.bound_s)
        found = here if found is None or here.cost.time_s < found.cost.time_s else found
    return found, min(bounds, default=0.0)


def _shortfall(planner: Planner, tried: Sequence[Alternative]) -> str:
    lines = [f"no plan fits {planner.request.cluster.describe()}:"]
    lines += [f"  {a.name} on {times(a.mesh)}: {a.why}" for a in tried]
    if planner.missing_bytes:
        lines.append(f"the plan of least memory is {gibibytes(min(planner.missing_bytes))} per device over the limit")
    lines.append("the five largest tensors: " + "; ".join(largest(planner.program)))
    lines.append("use more or larger devices, a smaller batch, or an optimizer with less state")
    return "\n".join(lines)


def finish(planner: Planner, best: Candidate, bound_s: float, tried: Sequence[Alternative], about: Mapping[str, Any]) -> Plan:
    """The Plan of one priced answer. `bound_s` is a proven bound on the step (0: none), `tried` what else was priced, `about` the
    Plan's fields model, graph_hash, source and notes."""
    cost = best.cost
    strategy = best.name if best.name != "search" else best.solution.strategy
    made = bare_plan(planner, best.mesh, best.model.decode(best.solution.choice), strategy, best.remat)
    notes = (*filter(None, [price(best.model, best.solution.choice)]), *tiling_notes(planner.program, made),
             *rule_notes(planner.program, planner.request.rules))
    about = {**about, "notes": (*about.get("notes", ()), *notes)}
    peak_bytes = predict(planner.program, made).peak_bytes if best.peak_bytes is None else best.peak_bytes
    predicted = Predicted(cost.time_s, peak_bytes, cost.compute_s, cost.exposed_s, cost.hidden_s, min(bound_s, cost.time_s))
    return replace(made, alternatives=tuple(tried), predicted=predicted, **about)
