"""The verification matrix: tiny models captured once, plans of every kind for them, and the comparison with one device.

recipe      a named strategy on the real `cpu` preset
searched    the free search on a cluster where splitting pays even for tiny models: slow cores, links that cost next
            to nothing
thrifty     the solution of least memory
spatial     images are cut along height on the first axis, along width on the second, wherever they can be
random      one seeded random option per cluster and axis: any solution of a Problem must compute the same numbers
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.cluster import Cluster
from autopar.decisions import node_plan
from autopar.frontend import load
from autopar.onestage import plan
from autopar.pipeline import barred, units
from autopar.pipeline.assemble import pipelined
from autopar.pipeline.microbatch_splits import sharing
from autopar.plan import Plan, Predicted
from autopar.planner import Planner
from autopar.problem.build import Decisions, fits_together
from autopar.problem.clusters import join
from autopar.problem.settings import Settings
from autopar.problem.types import Problem, Solution
from autopar.recipes import roles
from autopar.recipes.free import space
from autopar.request import Request
from autopar.search import SEARCHES, Search
from autopar.search.feasible import least_memory
from autopar.verify import Case, Report, case_of, verify
from autopar.verify.reference import Results
from autopar.verify.second_step import SECOND
from tests.helpers.ranks import living
from tests.helpers.tiny import DEEP, TINY

BATCH, SEQ = 8, 16
FROZEN = " frozen"
Sizes = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Subject:
    """One tiny model, captured, with its weights by original name."""

    name: str
    mode: str
    captured: Captured
    weights: Mapping[str, Tensor]
    cases: dict[tuple[int, int], Case] = field(default_factory=dict)
    references: dict[tuple[int, int], Results] = field(default_factory=dict)

    def batch(self, batch: int = BATCH, seq: int = SEQ) -> dict[str, Tensor]:
        """A global batch by input name."""
        loaded = load(
            spec(self.name), batch=batch, seq=seq, device="cpu", train=self.mode == "train", labels=self.mode == "train"
        )
        return dict(
            zip(
                self.captured.input_names,
                [x for x in (*loaded.args, *loaded.kwargs.values()) if isinstance(x, Tensor)],
                strict=True,
            )
        )

    def case(self, made: Plan, batch: int = BATCH, seq: int = SEQ) -> Case:
        """What `verify` takes; all but the plan is made once per size of batch."""
        key = (batch, seq)
        if key not in self.cases:
            self.cases[key] = case_of(self.captured, made, self.weights, self.batch(batch, seq))
        return replace(self.cases[key], plan=made)

    def verified(
        self, made: Plan, batch: int = BATCH, seq: int = SEQ, mutate: Callable[[str], str] = str, *, later: bool = True
    ) -> Report:
        """`verify` on living ranks; one device computes once per size of batch. `mutate` changes the emitted text;
        `later` is that of the case."""
        case, key = replace(self.case(made, batch, seq), mutate=mutate), (batch, seq)
        if key not in self.references:
            self.references[key] = case.reference()
        wanted = {kind: results for kind, results in self.references[key].items() if later or kind not in SECOND}
        return verify(replace(case, later=later), reference=wanted, ranks=living(made.ranks))


def verified(case: Case) -> Report:
    """`verify` on living ranks."""
    return verify(case, ranks=living(case.plan.ranks))


def spec(name: str) -> str:
    """What `load` takes of the model that a subject's name begins with."""
    return {**TINY, **DEEP}[name.removesuffix(FROZEN)]


@cache
def subject(name: str, mode: str = "train", batch: int = BATCH) -> Subject:
    """The tiny model of that name, for so many samples; captured once per process. A name that ends in FROZEN: its
    batch norms use the statistics that they have."""
    loaded = load(spec(name), batch=batch, seq=SEQ, device="cpu", train=mode == "train", labels=mode == "train")
    if name.endswith(FROZEN):
        for module in loaded.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    captured = capture(loaded.model, loaded.args, loaded.kwargs, mode=mode)
    return Subject(name, mode, captured, loaded.model.state_dict())


def splitting(ranks: int) -> Cluster:
    """`cpu:1x<ranks>` with cores a thousand times slower and links that are nearly free: splitting work always pays."""
    base = Cluster.parse(f"cpu:1x{ranks}")
    device = replace(
        base.device,
        peak_flops=dict.fromkeys(base.device.peak_flops, 1e8),
        launch_s=1e-12,
        memory_bandwidth_bytes_s=1e8,
        memory_bytes=1 << 40,
    )
    levels = tuple(
        replace(
            level,
            bandwidth_bytes_s=1e13,
            protocols=tuple(replace(p, start_s=1e-9, hop_s=1e-9, efficiency=1.0) for p in level.protocols),
        )
        for level in base.levels
    )
    return Cluster(base.name, levels, device)


@cache
def by_recipe(who: Subject, sizes: Sizes, recipe: str) -> Plan:
    """A named strategy, planned as users do; once per process."""
    request = Request(
        Cluster.parse(f"cpu:1x{math.prod(sizes)}"), Settings(who.mode), recipe=recipe, mesh=sizes, time_limit_s=20.0
    )
    return plan(who.captured.gm, who.captured.hints, request, model=who.name, graph_hash=who.captured.graph_hash)


def by_search(
    who: Subject, sizes: Sizes, search: Search = SEARCHES["ilp"], *, batch: int = BATCH, limit_s: float = 10.0
) -> Plan:
    """What `search` chooses for `batch` samples on a splitting cluster."""
    planner = planner_of(who, sizes, batch)
    found = planner.candidate(sizes, space(sizes), "search", lambda problem: search(problem, time_limit_s=limit_s))
    return assemble(who, planner, sizes, found.model.decode(found.solution.choice), found.solution.strategy)


def thrifty(problem: Problem, *, time_limit_s: float, seed: int = 0, start: tuple[int, ...] | None = None) -> Solution:
    """A search: the least memory."""
    return Solution(least_memory(problem, time_limit_s=time_limit_s), "thrifty")


def at_random(
    problem: Problem, *, time_limit_s: float, seed: int = 0, start: tuple[int, ...] | None = None
) -> Solution:
    """A search: any choice."""
    rng = np.random.default_rng(seed)
    return Solution(tuple(int(rng.integers(len(node.labels))) for node in problem.nodes), "random")


def by_chance(who: Subject, sizes: Sizes, seed: int, wanted: Mapping[Any, tuple[str, ...]] | None = None) -> Plan:
    """A random solution of the Problem of this mesh: one option per cluster and axis, operator placements aside (they
    go by whole branches). No Problem is built, so three axes are cheap. `wanted` names the factors, one per axis, of
    roots by their target."""
    planner, rng = planner_of(who, sizes), np.random.default_rng(seed)
    decisions: Decisions = {}
    for cluster in planner.clusters:
        joints = [join(cluster, planner.table(n, placed=False), roles.anything(n)) for n in sizes]
        if factors := (wanted or {}).get(cluster.root.target):
            joints = [
                [j for j in found if j.options[-1].factor == factor]
                for found, factor in zip(joints, factors, strict=True)
            ]
            assert any(fits_together(cluster, combo, sizes) for combo in itertools.product(*joints)), (
                cluster.name,
                factors,
                sizes,
            )
        combo = tuple(found[rng.integers(len(found))] for found in joints)
        while not fits_together(cluster, combo, sizes):
            combo = tuple(found[rng.integers(len(found))] for found in joints)
        for member, op in enumerate(cluster.members):
            decisions[op.name] = tuple(joint.options[member] for joint in combo)
    return assemble(who, planner, sizes, decisions, f"random {seed}")


def by_place(who: Subject, sizes: Sizes) -> Plan:
    """Height cut on the first axis, width on the second, of as many images [b, c, h, w] as can be; all else whole."""
    planner = planner_of(who, sizes)
    decisions: Decisions = {}
    for cluster in planner.clusters:
        joints = [join(cluster, planner.table(n, placed=False), roles.anything(n)) for n in sizes]
        combo = tuple(
            max(
                found,
                key=lambda joint: sum(
                    op.role == "op" and o.outs[0].value == f"S{2 + axis}" and len(op.call.outs[0].shape) == 4
                    for op, o in zip(cluster.members, joint.options, strict=True)
                    if o.outs
                ),
            )
            for axis, found in enumerate(joints)
        )
        assert fits_together(cluster, combo, sizes)
        for member, op in enumerate(cluster.members):
            decisions[op.name] = tuple(joint.options[member] for joint in combo)
    return assemble(who, planner, sizes, decisions, "spatial")


@lru_cache(maxsize=8)
def planner_of(who: Subject, sizes: Sizes, batch: int = BATCH) -> Planner:
    """The planner for a splitting cluster; several plans of one model come one after the other."""
    request = Request(splitting(math.prod(sizes)), Settings(who.mode), mesh=sizes)
    hints = who.captured.hints
    return Planner.of(who.captured.gm, {**hints, **({"b": batch} if "b" in hints else {})}, request)


def assemble(who: Subject, planner: Planner, sizes: Sizes, decisions: Decisions, strategy: str) -> Plan:
    """A Plan of `decisions`, without a prediction."""
    cluster, settings = planner.request.cluster, planner.request.settings
    ops = planner.program.ops
    return Plan(
        model=who.name,
        graph_hash=who.captured.graph_hash,
        mode=settings.mode,
        precision=settings.precision,
        optimizer=settings.optimizer,
        hints=dict(planner.program.hints),
        cluster=cluster.to_dict(),
        axes=tuple(a.name for a in cluster.mesh(sizes).axes),
        mesh=sizes,
        strategy=strategy,
        seed=0,
        nodes={name: node_plan(ops[name], decisions[name]) for name in ops},
        predicted=Predicted(0, 0, 0, 0, 0),
    )


def by_stages(
    who: Subject,
    sizes: Sizes,
    recipe: str | Sequence[roles.Role],
    places: int,
    microbatches: int,
    schedule: str,
    virtual: int = 1,
    bounds: Sequence[int] | None = None,
) -> Plan:
    """`recipe` (or one role per axis) on the mesh of each place, cut into `places` x `virtual` stages of about equal
    numbers of pieces (or at `bounds`)."""
    planner, made = _whole(who, sizes, recipe if isinstance(recipe, str) else tuple(recipe))
    count = places * virtual
    total, forbidden = len(units(planner.program)), barred(planner.program)
    allowed = [i for i in range(1, total) if i not in forbidden]
    cuts = bounds or [min(allowed, key=lambda i, k=k: abs(i - total * k / count)) for k in range(1, count)]
    micro = _sharing(who, sizes, microbatches) if microbatches > 1 else None
    flat = replace(made, cluster=Cluster.parse(f"cpu:1x{places * math.prod(sizes)}").to_dict())
    return pipelined(flat, planner.program, cuts, schedule, places, micro, microbatches)


@cache
def _whole(who: Subject, sizes: Sizes, recipe: str | tuple[roles.Role, ...]) -> tuple[Planner, Plan]:
    """The plan of one stage that pipelines are cut from, with its planner."""
    made = by_recipe(who, sizes, recipe) if isinstance(recipe, str) else by_roles(who, sizes, recipe, "roles")
    return planner_of(who, sizes), made


@cache
def _sharing(who: Subject, sizes: Sizes, microbatches: int) -> Any:
    """How so many microbatches share each value."""
    planner = planner_of(who, sizes)
    return sharing(
        planner.program,
        planner.clusters,
        planner.table(microbatches, placed=False),
        microbatches,
        planner.request.cluster,
        planner.request.settings,
    )


def kinds(made: Plan) -> dict[str, None]:
    """The kinds of split that operators of a plan use."""
    found: Sequence[str] = [kind for node in made.nodes.values() if node.outs and node.ins for kind in node.kinds]
    return dict.fromkeys(k for k in found if k in ("sample", "attribute", "parameter", "operator"))


@cache
def planned(who: Subject, sizes: Sizes, how: str) -> Plan:
    """One entry of the matrix: a recipe's name, "searched", "few" (searched for two samples), "thrifty", "spatial" or
    "random <seed>"."""
    if how.startswith("random"):
        return by_chance(who, sizes, int(how.removeprefix("random")))
    if how == "spatial":
        return by_place(who, sizes)
    if how in ("searched", "thrifty"):
        return by_search(who, sizes, SEARCHES["ilp"] if how == "searched" else thrifty)
    return by_search(who, sizes, batch=FEW) if how == "few" else by_recipe(who, sizes, how)


def right(report: Report) -> None:
    """Nothing differs from one device, and everything was compared. Raises AssertionError, with what is wrong."""
    wrong = [row for row in report.rows if not row.ok]
    assert report.ok, f"first wrong: {report.first}; {len(wrong)} of {len(report.rows)}: {wrong[:5]}"
    assert {row.kind for row in report.rows} >= {"loss", "gradient", "parameter", "collectives"}


FEW = 2
"""Samples of a "few" plan: less than ranks, so that the search must split something else."""


def batch_for(how: str) -> int:
    """The samples that a plan of kind `how` is verified with."""
    return FEW if how == "few" else BATCH


def by_roles(who: Subject, sizes: Sizes, used: Sequence[roles.Role], name: str) -> Plan:
    """The best plan on a splitting cluster whose mesh axes have these roles."""
    planner = planner_of(who, sizes)
    found = planner.candidate(sizes, used, name, lambda problem: SEARCHES["ilp"](problem, time_limit_s=10.0))
    return assemble(who, planner, sizes, found.model.decode(found.solution.choice), name)
