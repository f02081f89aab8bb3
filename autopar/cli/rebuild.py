"""From a plan file back to what it was made for: the model, its graph, the Problem."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from autopar import frontend, torchrun
from autopar.capture import Captured, own_state
from autopar.capture.precision import capture_in, resting
from autopar.cluster import Cluster
from autopar.cluster.this_machine import machine_bytes
from autopar.errors import CaptureError, PlanError, RuleError
from autopar.plan import Plan
from autopar.plan_schema import one_of, record, text, whole
from autopar.plan_suits_graph import suits
from autopar.planner import Planner
from autopar.problem.at_rest import EACH
from autopar.problem.build import Model
from autopar.problem.read_graph import laid_out
from autopar.problem.settings import Settings
from autopar.recipes import roles
from autopar.request import Request
from autopar.rules.rule import Rule
from autopar.text import gibibytes, shown
from autopar.verify import inputs_of

OWN = "own"
"""What `Source.dtypes` says of a model that is planned in the dtypes in which its factory makes it."""
SOURCE = record(
    {"model": text, "batch": whole(1), "seq": whole(1), "seed": whole(0), "rules": text, "dtypes": one_of((OWN,))},
    left_out=("rules", "dtypes"),
)
"""What `Plan.source` must say."""


@dataclass(frozen=True)
class Source:
    """The MODEL argument, the sizes and the --rules that gave a plan: what `Plan.source` holds for the command line.
    `dtypes` is OWN, or empty for those of the plan's precision."""

    model: str
    batch: int
    seq: int
    seed: int = 0
    rules: str = ""
    dtypes: str = ""

    @staticmethod
    def of(plan: Plan, where: Path) -> Source:
        """Raises PlanError when the plan was made in Python and names no model."""
        try:
            SOURCE("source", dict(plan.source))
            return Source(**plan.source)
        except PlanError as error:
            raise PlanError(
                f"plan {where} does not say which model it is for (source is {shown(dict(plan.source))}): it was not "
                "made by `autopar plan`. In Python use what autopar.compile gave (its verify, simulate, memory and "
                "save), or plan the model again"
            ) from error

    def load(
        self,
        plan: Plan,
        *,
        device: str = "meta",
        dtype: torch.dtype | None = None,
        batch: int | None = None,
        seq: int | None = None,
    ) -> frontend.Loaded:
        """The model as it rests under the plan (or in `dtype`) and one global batch. Raises CaptureError when the model
        is not where it was."""
        training = plan.mode == "train"
        return frontend.load(
            self.model,
            batch=batch or self.batch,
            seq=seq or self.seq,
            device=device,
            dtype=dtype or (None if self.dtypes == OWN else resting(plan.precision, plan.mode)),
            train=training,
            labels=training,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Rebuilt:
    """A plan with its model (on the meta device unless weights were asked for) and the graph that it fits."""

    plan: Plan
    source: Source
    loaded: frontend.Loaded
    captured: Captured
    rules: Mapping[Any, Rule]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        return own_state(self.loaded.model)

    @property
    def batch(self) -> dict[str, Any]:
        """The global batch by input name."""
        return inputs_of(self.captured, self.loaded.args, self.loaded.kwargs)


def rebuild(where: Path, progress: Callable[[str], None] | None = None, *, weights: bool = False) -> Rebuilt:
    """Read a plan and capture its model again. Raises PlanError when the graph is not the one that was planned."""
    plan = Plan.load(where)
    source = Source.of(plan, where)
    with _read_again(where):
        if weights:
            check_room(source.load(plan), where)
        loaded = source.load(plan, device="cpu" if weights else "meta")
        rules = frontend.load_rules(source.rules)
    captured, _ = capture_in(
        loaded.model,
        loaded.args,
        loaded.kwargs,
        precision=None if source.dtypes == OWN else plan.precision,
        mode=plan.mode,
        progress=progress,
    )
    if not weights and captured.valueless:
        return rebuild(where, progress, weights=True)  # buffers that only the making of the whole model computes
    return Rebuilt(plan, source, loaded, met(plan, source, captured, rules), rules)


@contextlib.contextmanager
def _read_again(where: Path) -> Iterator[None]:
    """Errors inside come from what a plan names, its model and rules: say so, and relative to which folder paths are
    looked for."""
    try:
        yield
    except (CaptureError, RuleError) as error:
        raise type(error)(
            f"plan {where}: its model and rules are read again, by the names that `autopar plan` was given, from the "
            f"folder {Path.cwd()}; start the command in the folder in which the plan was made, with the files as they "
            f"were there. {error}"
        ) from error


def check_room(loaded: frontend.Loaded, where: Path) -> None:
    """Raise PlanError where this machine has too little memory for the weights of `loaded` (on meta): each process that
    was started here makes all of them."""
    processes = torchrun.local_ranks() or 1
    wanted, there = (
        processes * sum(each.numel() * each.element_size() for each in own_state(loaded.model).values()),
        machine_bytes(),
    )
    if wanted > there:
        raise PlanError(
            f"plan {where}: the weights of {loaded.name} take "
            f"{gibibytes(wanted)}{f' in {processes} processes' if processes > 1 else ''}, and this machine has "
            f"{gibibytes(there)} of memory. verify, run and profile make the whole model on each machine: plan a "
            "smaller one of its kind (fewer layers) with the same --recipe and --mesh and try that, or start one on a "
            "machine with more memory. explain, simulate, memory and emit need no weights"
        )


def met(plan: Plan, source: Source, captured: Captured, rules: Mapping[Any, Rule] | None = None) -> Captured:
    """The graph, with its runs of blocks divided into parts as `plan` says. Raises PlanError where the plan was made
    for another graph, or does not suit it (autopar.plan_suits_graph)."""
    plan.check(captured.graph_hash, laid_out(captured.gm, captured.hints, training=plan.mode == "train"), source.model)
    if dict(captured.hints) != dict(plan.hints):
        raise PlanError(
            f"hints are {dict(plan.hints)}, but {source.model} at batch {source.batch} and sequence {source.seq} "
            f"(source) has {dict(captured.hints)}: plan the model again"
        )
    parted = captured.parted(plan.parted)
    suits(parted.gm, plan, rules)
    return parted


def problem(rebuilt: Rebuilt) -> tuple[Planner, Model]:
    """The free Problem on the plan's mesh, in which the plan is one solution; of a pipeline, that of one microbatch."""
    plan = rebuilt.plan
    planner = Planner.of(
        rebuilt.captured.gm,
        plan.micro_hints,
        Request(Cluster.from_dict(dict(plan.cluster)), Settings.of(plan), rules=rebuilt.rules),
        plan.runs,
    )
    planner.remat = plan.remat
    each = any(EACH in node.runs for node in plan.nodes.values())
    return planner, planner.model(plan.mesh, (roles.Free(each=each),) * len(plan.mesh), "explain", plan.places)


def as_source(source: Source) -> dict[str, Any]:
    """What to put into `Plan.source`: all of it but empty texts."""
    return {name: value for name, value in asdict(source).items() if value != ""}
