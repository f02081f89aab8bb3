"""A plan of one stage with given decisions, or of a Candidate, without a prediction. Made where a solution is walked,
timed or emitted (planner, onestage, will_it_fit, joint.staging)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.candidate import Candidate
from autopar.cluster import Cluster, Mesh
from autopar.decisions import node_plan
from autopar.plan import Plan, Predicted, Stage
from autopar.problem.build import Decisions
from autopar.problem.remat import Levels
from passes.part_runs import parts_at, whole_name

if TYPE_CHECKING:
    from autopar.planner import Planner


def bare_plan(
    planner: Planner,
    mesh: Mesh,
    decisions: Decisions,
    strategy: str,
    remat: Levels | None = None,
    again: Mapping[str, int] | None = None,
    cluster: Cluster | None = None,
) -> Plan:
    """A plan of one stage with these decisions, without a prediction, the model's name and the graph's hash.

    The blocks of `remat` are run again: all of a run, or as many as `again` says. `cluster` is the request's cluster
    with its parts in another order, where that is wanted.
    """
    request, ops = planner.request, planner.program.ops
    return Plan(
        model="",
        graph_hash="",
        mode=request.settings.mode,
        precision=request.settings.precision,
        optimizer=request.settings.optimizer,
        offload=request.settings.offload,
        hints=dict(planner.program.hints),
        cluster=(cluster or request.cluster).to_dict(),
        axes=tuple(a.name for a in mesh.axes),
        mesh=tuple(a.size for a in mesh.axes),
        strategy=strategy,
        seed=request.seed,
        nodes={name: node_plan(ops[name], decisions[name]) for name in ops},
        predicted=Predicted(0.0, 0.0, 0.0, 0.0, 0.0),
        remat={scope: tuple(names) for scope, names in (remat or {}).items()},
        stages=(Stage(again=dict(again or {})),),
    )


def laid(planner: Planner, found: Candidate) -> Plan:
    """The plan of a Candidate. A run whose blocks are all run again, but keep different results, is in two parts."""
    parts = parts_at(planner.gm, {scope: [found.again[scope]] for scope in found.rest})
    there, decisions, remat = planner.parted(parts), found.model.decode(found.solution.choice), dict(found.remat)
    for scope, begins in parts.items():
        for part in begins:
            remat[part] = tuple(f"{part}/{name.rpartition('/')[2]}" for name in found.rest[scope])
    made = bare_plan(
        there,
        found.mesh,
        {name: decisions[whole_name(name, parts)] for name in there.program.ops},
        found.strategy,
        remat,
        {scope: count for scope, count in found.again.items() if scope not in parts},
    )
    return replace(made, parted=parts)
