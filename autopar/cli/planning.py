"""`autopar plan`: from a MODEL argument to a plan, its tables and its file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar import frontend
from autopar.api import compile
from autopar.capture.precision import resting
from autopar.cli.console import progress, show, writable, write_json, write_out
from autopar.cli.rebuild import OWN, Source, as_source
from autopar.compiled import Compiled
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.problem.graph import Program
from autopar.problem.read_graph import read
from autopar.report.frontier import frontier, point
from autopar.report.reshards import reshards
from autopar.report.tables import kinds, report
from autopar.report.weights import weights
from autopar.text import near, sizes
from autopar.timer import TIME_LIMIT_S

AUTO = "auto"
PRECISIONS = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bf16",
    "float16": "float16",
    "fp16": "fp16",
}


@dataclass(frozen=True)
class Asked:
    """The arguments of `autopar plan`; a size that is None is that of the model's factory, or the usual one."""

    model: str
    cluster: str
    batch: int | None = None
    seq: int | None = None
    recipe: str | None = None
    mesh: str | None = None
    search: str = "ilp"
    precision: str = "auto"
    mode: str = "train"
    optimizer: str = "adamw"
    time_limit_s: float = TIME_LIMIT_S
    seed: int = 0
    pareto: bool = False
    remat: str = "auto"
    prove: bool = False
    rules: str = ""

    def load(self) -> frontend.Loaded:
        """The model, on meta, with one batch. Raises CaptureError where it leads nowhere, or its factory cannot be told
        a size that is asked for."""
        training, stated = self.mode == "train", self.stated
        loaded = frontend.load(
            self.model,
            batch=self.batch,
            seq=self.seq,
            dtype=None if stated is None else resting(stated, self.mode),
            train=training,
            labels=training,
            seed=self.seed,
        )
        loaded.check_sizes(size for size, value in (("batch", self.batch), ("seq", self.seq)) if value is not None)
        return loaded

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """`"2x2"` -> (2, 2). Raises PlanError for anything else."""
        if self.mesh is None:
            return None
        found = sizes(self.mesh)
        if found is None:
            raise PlanError(f"mesh {self.mesh!r}: wanted sizes joined by x, as 4 or 2x2")
        return found

    @property
    def stated(self) -> str | None:
        """The precision as `autopar.compile` has it; "auto" is what the model's config says, and None for a factory:
        the dtype of the model that it makes. Raises PlanError for an unknown one."""
        if self.precision == AUTO:
            return frontend.stated_precision(self.model, train=self.mode == "train")
        if self.precision not in PRECISIONS:
            raise PlanError(
                f"precision {self.precision!r}: wanted one of {AUTO}, "
                f"{', '.join(PRECISIONS)}{near(self.precision, (AUTO, *PRECISIONS))}"
            )
        return PRECISIONS[self.precision]


def plan_command(asked: Asked, output: Path | None, json: str | None) -> None:
    """Plan, print, and write what was asked for."""
    writable("--output", output, "the plan")
    began = time.perf_counter()
    with progress(f"planning {asked.model}") as tell:
        compiled = _compiled(asked, tell)
        assert compiled.captured is not None  # compile always captures
        program = read(compiled.captured.gm, compiled.plan.hints, training=asked.mode == "train")
    took_s = time.perf_counter() - began
    if str(output) == "-":
        write_out(compiled.plan.to_json())
    elif output is not None:
        compiled.plan.save(output)
    points = [point(plan) for plan in compiled.frontier] if asked.pareto else []
    if (
        not write_json(
            json, {**as_json(compiled.plan, program), "took_s": took_s, **({"frontier": points} if points else {})}
        )
        and str(output) != "-"
    ):
        show(
            report(compiled.plan, program),
            *(("", frontier(compiled.frontier)) if points else ()),
            "",
            f"planned in {took_s:.1f} s" + (f", written to {output}" if output else ""),
        )


def _compiled(asked: Asked, tell: Callable[[str], None]) -> Compiled:
    """What `compile` makes of the arguments."""
    mesh = asked.sizes  # may be refused before the model is loaded
    loaded = asked.load()
    return compile(
        loaded.model,
        asked.cluster,
        (loaded.args, loaded.kwargs),
        search=asked.search,
        recipe=asked.recipe,
        mesh=mesh,
        mode=asked.mode,
        precision=asked.stated,
        optimizer=asked.optimizer,
        time_limit_s=asked.time_limit_s,
        seed=asked.seed,
        progress=tell,
        source=as_source(
            Source(
                asked.model,
                loaded.batch,
                loaded.seq,
                asked.seed,
                asked.rules,
                dtypes=OWN if asked.stated is None else "",
            )
        ),
        pareto=asked.pareto,
        remat=asked.remat,
        prove=asked.prove,
        rules=frontend.load_rules(asked.rules) or None,
    )


def as_json(plan: Plan, program: Program) -> dict[str, Any]:
    """The tables as data; the gap is None where no bound is proven."""
    return {
        "model": plan.model,
        "cluster": plan.cluster["name"],
        "axes": list(plan.axes),
        "mesh": list(plan.mesh),
        "strategy": plan.strategy,
        "mode": plan.mode,
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "places": plan.places,
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "hints": dict(plan.hints),
        "graph_hash": plan.graph_hash,
        "predicted": {**asdict(plan.predicted), "gap": plan.predicted.gap if plan.predicted.bound_s > 0 else None},
        "splits": kinds(plan.nodes),
        "recipes": [asdict(other) for other in plan.alternatives],
        "weights": [asdict(weight) for weight in weights(program, plan)],
        "reshards": [asdict(row) for row in reshards(program, plan)],
        "remat": {scope: list(names) for scope, names in plan.remat.items()},
        "notes": list(plan.notes),
    }
