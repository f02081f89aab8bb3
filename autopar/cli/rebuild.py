"""From a plan file back to what it was made for: the model, its graph, the Problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar import frontend
from autopar.capture import Captured, capture
from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.planner import Planner, Request
from autopar.problem.build import Model
from autopar.problem.prices import Settings
from autopar.recipes import roles


@dataclass(frozen=True)
class Source:
    """The MODEL argument and the sizes that gave a plan's model: what `Plan.source` holds for the command line."""

    model: str
    batch: int
    seq: int
    seed: int = 0

    @staticmethod
    def of(plan: Plan, where: Path) -> Source:
        """Raises PlanError when the plan was made in Python and names no model."""
        try:
            return Source(str(plan.source["model"]), int(plan.source["batch"]), int(plan.source["seq"]), int(plan.source["seed"]))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"plan {where} does not say which model it is for (source is {dict(plan.source)!r}): it was not made by "
                            "`autopar plan`. Use autopar.compile and Compiled.save in Python, or plan the model again") from error

    def load(self, plan: Plan, *, device: str = "meta", dtype: torch.dtype = torch.float32, batch: int | None = None,
             seq: int | None = None) -> frontend.Loaded:
        """The model and one global batch. Raises CaptureError when the model is not where it was."""
        training = plan.mode == "train"
        return frontend.load(self.model, batch=batch or self.batch, seq=seq or self.seq, device=device, dtype=dtype,
                             train=training, labels=training, seed=self.seed)


@dataclass(frozen=True)
class Rebuilt:
    """A plan with the graph that it fits."""

    plan: Plan
    source: Source
    captured: Captured


def rebuild(where: Path, progress: Callable[[str], None] | None = None) -> Rebuilt:
    """Read a plan and capture its model again. Raises PlanError when the graph is not the one that was planned."""
    plan = Plan.load(where)
    source = Source.of(plan, where)
    loaded = source.load(plan)
    captured = capture(loaded.model, loaded.args, loaded.kwargs, loss_fn=None, mode=plan.mode, dynamic_shapes=None, progress=progress)
    if captured.graph_hash != plan.graph_hash:
        raise PlanError(f"plan {where} is for another graph than {source.model} gives now ({difference(plan, captured)}): plan the model again")
    return Rebuilt(plan, source, captured)


def difference(plan: Plan, captured: Captured) -> str:
    """What differs between the graph of a plan and the captured one, in a few words."""
    program = Planner.of(captured.gm, plan.hints, Request(Cluster.from_dict(dict(plan.cluster)), settings(plan))).program
    gone = [name for name in plan.nodes if name not in program.ops]
    new = [name for name in program.ops if name not in plan.nodes]
    parts = [f"{len(plan.nodes)} nodes planned, {len(program.ops)} now"] if len(plan.nodes) != len(program.ops) else []
    for what, names in (("gone", gone), ("new", new)):
        if names:
            parts.append(f"{what}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}")
    parts.append(f"hash {plan.graph_hash[:12]} planned, {captured.graph_hash[:12]} now")
    return "; ".join(parts if len(parts) > 1 else ["the same nodes with other sizes or arguments", *parts])


def settings(plan: Plan) -> Settings:
    """What a plan was priced for."""
    return Settings(plan.mode, plan.optimizer, plan.precision)


def problem(rebuilt: Rebuilt) -> tuple[Planner, Model]:
    """The free Problem on the plan's mesh, in which the plan is one solution."""
    plan = rebuilt.plan
    planner = Planner.of(rebuilt.captured.gm, plan.hints, Request(Cluster.from_dict(dict(plan.cluster)), settings(plan)))
    return planner, planner.model(plan.mesh, (roles.anything,) * len(plan.mesh), "explain")


def as_source(source: Source) -> dict[str, Any]:
    """What to put into `Plan.source`."""
    return {"model": source.model, "batch": source.batch, "seq": source.seq, "seed": source.seed}
