"""Named strategies of one stage: the meshes on which each is tried, priced there, and the best of them. Called by
onestage and will_it_fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from autopar.candidate import Candidate
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.layout import divisible
from autopar.partial_remat import filled
from autopar.plan import Alternative
from autopar.planner import Planner
from autopar.problem.graph import Program
from autopar.recipes import RECIPES, Recipe, roles
from autopar.recipes.names import check_name
from autopar.search import ilp
from autopar.text import times
from autopar.timer import Timer

FULL = 0.9  # share of the memory limit: a plan that uses more may be slower than it would be with more memory
# seconds at most to solve one recipe on one mesh; the choices that a recipe leaves open hardly change its step time
RECIPE_S = 0.6
FILLING = 0.25  # share of the time left in which recipes may run fewer blocks again


def meshes_for(recipe: Recipe, cluster: Cluster, fixed: tuple[int, ...] | None) -> list[tuple[int, ...]]:
    """The meshes on which a recipe is tried: `fixed` if the recipe can use it, else three for each number of axes that
    the recipe allows."""
    if fixed is not None:
        return [fixed] if recipe.roles_on(len(fixed)) else []
    meshes = cluster.meshes(max_axes=max(1, len(recipe.roles)))
    counts = [n for n in range(1, len(recipe.roles) + 1) if recipe.roles_on(n)]
    return [m for n in counts for m in [m for m in meshes if len(m) == n][:3]]


def undivided(program: Program, recipe: Recipe, sizes: tuple[int, ...]) -> str:
    """Why a recipe that splits samples cannot split the batch on a mesh; empty where it can, where it splits none, or
    no input has a batch."""
    ways = math.prod(
        size for role, size in zip(recipe.roles_on(len(sizes)), sizes, strict=True) if role in roles.BY_SAMPLE
    )
    batches = [op.call.outs[0].sizes[op.samples] for op in program.ops.values() if op.samples is not None]
    if not batches or not all(size % ways for size in batches):
        return ""
    size = batches[0]
    return (
        f"a batch of {size} does not divide by {ways}: recipe {recipe.name} splits the samples over {ways} ranks (mesh "
        f"{times(sizes)}); use a batch of {divisible(size, ways)}, another mesh or another recipe"
    )


def tried_meshes(planner: Planner, recipe: Recipe) -> dict[tuple[int, ...], str]:
    """The meshes on which a recipe is tried, each with why it cannot split the batch there, empty where it can."""
    meshes = meshes_for(recipe, planner.request.cluster, planner.request.mesh)
    return {sizes: undivided(planner.program, recipe, sizes) for sizes in meshes}


def refused_meshes(planner: Planner, recipe: Recipe) -> dict[tuple[int, ...], str]:
    """`tried_meshes` of a recipe that was asked for. Raises PlanError where there are none, or where it can split the
    batch on none."""
    request, refused = planner.request, tried_meshes(planner, recipe)
    if not refused:
        raise PlanError(
            f"recipe {recipe.name} needs a mesh of {len(recipe.roles)} "
            f"{'axis' if len(recipe.roles) == 1 else 'axes'}{' or fewer' * recipe.fewer}, got {request.mesh}"
        )
    if all(refused.values()):
        raise PlanError(next(iter(refused.values())))
    return refused


def best_named(
    planner: Planner, timer: Timer, known_s: float, beat: Callable[[float], float] = lambda known_s: known_s
) -> tuple[Candidate | None, list[Alternative]]:
    """Price the recipes, or only the one that was asked for: the best Candidate, and an Alternative for each recipe and
    mesh. `known_s`: the fastest known step of one stage; `beat` makes of it what plans of one stage have to beat.

    Recipes are skipped once time is up, unless no plan that fits is known or found yet. Those that split samples, and
    with them all of the work, come first: where there is time for one alone, it is no baseline that computes everything
    on every rank. Then of those that might beat what is known fewer blocks run again; to find which ones takes longer
    than all else here. Raises PlanError for an unknown recipe, and for one that the model or the mesh cannot use.
    """
    request = planner.request
    if request.recipe is not None:
        check_name(request.recipe)
    asked = [RECIPES[request.recipe]] if request.recipe else [r for r in RECIPES.values() if r.fits(planner.program)]
    tried: list[Alternative | Candidate] = []
    order = {name: place for place, name in enumerate(RECIPES)}
    for recipe in sorted(asked, key=lambda recipe: not any(role in roles.BY_SAMPLE for role in recipe.roles)):
        if lacking := recipe.lacking(planner.program):
            raise PlanError(lacking)
        for sizes, refused in (refused_meshes if request.recipe else tried_meshes)(planner, recipe).items():
            if refused:
                tried.append(Alternative(recipe.name, sizes, None, None, refused))
                continue
            if (recipe.name, sizes) in planner.settled or (known_s < math.inf and timer.skips()):
                continue
            try:
                found = _priced(planner, recipe, sizes, RECIPE_S if request.recipe is None else max(1.0, timer.left_s))
            except InfeasibleError as error:
                tried.append(Alternative(recipe.name, sizes, None, None, str(error)))
                continue
            tried.append(found)
            known_s = min(known_s, found.cost.time_s)
    rows = _filled(planner, timer, tried, known_s, beat)
    fit = [row for row in rows if isinstance(row, Candidate)]
    best = min(fit, key=lambda one: (one.cost.time_s, order[one.name]), default=None)  # all are alike on one device
    return best, sorted(map(_row, rows), key=lambda row: order[row.name])


def _filled(
    planner: Planner,
    timer: Timer,
    tried: Sequence[Alternative | Candidate],
    known_s: float,
    beat: Callable[[float], float],
) -> list[Alternative | Candidate]:
    """`tried`, with fewer blocks run again in those Candidates that might beat what is known, the fastest first, in the
    share FILLING of the time that is left; all of it for a recipe that was asked for. `beat` as in `best_named`, asked
    once, if there are any."""
    fit = {number: one for number, one in enumerate(tried) if isinstance(one, Candidate)}
    if planner.request.remat == "auto" and any(one.remat for one in fit.values()):
        known_s = min(known_s, beat(known_s))
    late = partial(timer.skips, timer.after(FILLING if planner.request.recipe is None else 1.0))
    rows = [*tried]
    for number, one in sorted(fit.items(), key=lambda each: each[1].cost.time_s):
        rows[number] = made = filled(planner, one, known_s, late)
        known_s = min(known_s, made.cost.time_s)
    return rows


def _row(one: Alternative | Candidate) -> Alternative:
    """What a plan says of a recipe on one mesh."""
    return one if isinstance(one, Alternative) else Alternative(one.name, one.mesh.sizes, one.cost.time_s, one.peak)


def _priced(planner: Planner, recipe: Recipe, sizes: tuple[int, ...], limit_s: float) -> Candidate:
    """A recipe on one mesh. One that is not short of memory is noted in `planner.settled`: running blocks again would
    not make it faster.

    Raises InfeasibleError where it does not fit.
    """
    planner.request.say(f"recipe {recipe.name} on {times(sizes)}")
    found = planner.candidate(
        sizes, recipe.roles_on(len(sizes)), recipe.name, partial(ilp.search, time_limit_s=limit_s)
    )
    if found.peak < FULL * planner.request.limit_bytes:
        planner.settled.add((recipe.name, sizes))
    return found
