"""Plans of real models for the tests of decisions: captured once, planned once per request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from autopar.capture import Captured, capture
from autopar.cluster import Cluster
from autopar.frontend import load
from autopar.frontend.loading import Loaded
from autopar.onestage import plan
from autopar.plan import Plan
from autopar.problem.graph import Program
from autopar.problem.read_graph import read
from autopar.problem.settings import Settings
from autopar.report.weights import Weight, weights
from autopar.request import Request
from tests.helpers.tiny import TINY
from tests.helpers.verify import subject

MODELS = Path(__file__).resolve().parents[3] / "models"
SPECS = {
    **TINY,
    "gpt2": f"hf:{MODELS}/hf/gpt2.json",
    "llama3-8b": f"hf:{MODELS}/hf/llama3-8b.json",
    "mixtral-8x7b": f"hf:{MODELS}/hf/mixtral-8x7b.json",
    "llama3.1-8b": f"hf:{MODELS}/hf/llama3.1-8b.json",
    "alexnet": f"{MODELS}/cnn.py:alexnet",
    "wide-mlp": f"{MODELS}/mlp.py:wide",
}


@dataclass(frozen=True)
class Work:
    """What is planned: a model by name at a batch and sequence, its weights in `dtype`."""

    model: str
    batch: int
    seq: int = 1
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Planned:
    """A plan, the program it is for and how its weights lie, by the name of the first instance."""

    plan: Plan
    program: Program
    weights: dict[str, Weight]

    @property
    def step_ms(self) -> float:
        """Predicted milliseconds of one step."""
        return 1e3 * self.plan.predicted.step_s

    @property
    def recipes_ms(self) -> dict[str, float]:
        """Milliseconds of every recipe that fits, on its best mesh."""
        found: dict[str, float] = {}
        for other in self.plan.alternatives:
            if other.step_s is not None:
                found[other.name] = min(1e3 * other.step_s, found.get(other.name, float("inf")))
        return found

    @property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        """Kind of split per axis of every operator."""
        return {name: self.plan.nodes[name].kinds for name, op in self.program.ops.items() if op.role == "op"}

    def __str__(self) -> str:
        predicted = self.plan.predicted
        steps = ", ".join(
            f"{name} {ms:.3f} ms" for name, ms in sorted(self.recipes_ms.items(), key=lambda item: item[1])
        )
        rests = ", ".join(f"{name} {w.layout} {'/'.join(w.uses)}" for name, w in self.weights.items())
        return (
            f"{self.plan.model} on {self.plan.cluster['name']}: {self.plan.strategy} {self.plan.mesh} "
            f"{self.step_ms:.3f} ms, {predicted.memory_bytes / 2**30:.2f} GiB; {steps}; {rests}"
        )


@cache
def loaded(work: Work) -> Loaded:
    """The model and one batch, on the meta device."""
    return load(SPECS[work.model], batch=work.batch, seq=work.seq, dtype=work.dtype)


@cache
def captured(work: Work) -> Captured:
    """The captured graph, which is the same at all sizes: a model is captured once."""
    if work.model in TINY and work.dtype is torch.float32:
        found = subject(work.model).captured
    else:
        found = _captured(work.model, work.dtype)
    return replace(found, hints={name: {"b": work.batch, "s": work.seq}[name] for name in found.hints})


@cache
def _captured(model: str, dtype: torch.dtype) -> Captured:
    here = loaded(Work(model, 8, 64, dtype))
    return capture(here.model, here.args, here.kwargs)


@cache
def planned(
    work: Work,
    cluster: str,
    recipe: str | None = None,
    mesh: tuple[int, ...] | None = None,
    optimizer: str = "adamw",
    remat: str = "auto",
) -> Planned:
    """The plan of `work`, searched or by a recipe."""
    graph = captured(work)
    request = Request(
        Cluster.parse(cluster), Settings(optimizer=optimizer), recipe=recipe, mesh=mesh, time_limit_s=20.0, remat=remat
    )
    made = plan(graph.gm, graph.hints, request, model=work.model, graph_hash=graph.graph_hash)
    program = read(graph.gm, graph.hints, training=True)
    names = {op.fqn: _first(op.node.meta.get("fqns"), op.fqn) for op in program.ops.values() if op.role == "param"}
    return Planned(made, program, {names[w.name]: w for w in weights(program, made)})


def _first(fqns: list[str] | None, fqn: str) -> str:
    return fqns[0] if fqns else fqn
