"""The decision table of Hugging Face's guide to training on several GPUs, as rows of a model on a cluster, and what the
search makes of each.

The guide (https://huggingface.co/docs/transformers/perf_train_gpu_many, "Scalability strategy") says which kind of
parallelism is for which machine. Nothing here tells the search so: a row has a model and a cluster, and strategies that
are priced beside the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from autopar import joint
from autopar.capture import Captured, capture
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.frontend import load
from autopar.plan import Plan
from autopar.problem.graph import Program
from autopar.problem.read_graph import read
from autopar.problem.settings import Settings
from autopar.report.weights import weights
from autopar.request import Request
from autopar.text import seconds

HERE = Path(__file__).resolve().parent
LLAMA = f"hf:{HERE.parent}/models/hf/llama3-8b.json"
TENSOR = ("column", "row", "vocabulary")


@dataclass(frozen=True)
class Row:
    """One row of the table: the guide's case and answer, a model of `spec` at a batch and sequence on a cluster,
    trained in mixed precision (`precision` "bf16") or as it is, and named strategies that are priced beside the answer,
    to show the figures that decide."""

    name: str
    guide: str
    spec: str
    batch: int
    seq: int
    cluster: str
    beside: tuple[str, ...] = ()
    precision: str = "bf16"


ROWS = {
    row.name: row
    for row in (
        Row(
            "one node, fits", "DP, or ZeRO", f"hf:{HERE.parent}/models/hf/gpt2.json", 64, 512, "a100-80:1x8", ("tp_sp",)
        ),
        Row(
            "one node, does not fit, NVLink",
            "PP, ZeRO and TP about equal",
            LLAMA,
            8,
            2048,
            "a100-80:1x4",
            ("zero3", "tp_sp", "zero_bubble"),
        ),
        Row(
            "one node, does not fit, PCIe",
            "PP before TP and ZeRO",
            LLAMA,
            8,
            2048,
            f"{HERE}/clusters/a100-80-pcie.toml",
            ("zero3", "tp_sp", "zero_bubble"),
        ),
        Row(
            "largest layer does not fit",
            "TP, or ZeRO-3",
            f"{HERE.parent}/models/mlp.py:giant",
            64,
            1,
            "h100:1x8",
            ("zero3", "1f1b"),
            "float32",
        ),
        Row("several nodes, fast links", "ZeRO, or PP+TP+DP", LLAMA, 16, 2048, "a100-80:2x4", ("3d",)),
        Row(
            "several nodes, slow links, short of memory",
            "DP+PP+TP+ZeRO-1",
            LLAMA,
            16,
            2048,
            f"{HERE}/clusters/a100-40-ethernet.toml",
            ("zero3", "pp_zero1", "3d"),
        ),
        Row("few samples on two nodes", "TP inside the node", LLAMA, 2, 2048, "h100:2x8", ("tp_sp",)),
        Row(
            "few samples of wide layers on two nodes",
            "TP inside the node",
            f"{HERE.parent}/models/mlp.py:wide",
            16,
            1,
            "h100:2x4",
            ("3d", "tp_zero3"),
            "float32",
        ),
    )
}


@dataclass(frozen=True)
class Answer:
    """What the search chose, and what the strategies beside it came to: a plan, or why there is none."""

    program: Program
    plan: Plan
    beside: Mapping[str, Plan | str]

    @property
    def uses(self) -> list[Counter[str]]:
        """For each mesh axis of a place how weights with two or more dims are used on it, and how many are."""
        large = [w for w in weights(self.program, self.plan) if len(w.shape) > 1]
        return [Counter(w.uses[axis].split()[0] for w in large) for axis in range(len(self.plan.mesh))]

    @property
    def tensor_axes(self) -> list[int]:
        """The mesh axes on which most large weights are used in part, by tensor parallelism."""
        return [axis for axis, uses in enumerate(self.uses) if 2 * sum(uses[name] for name in TENSOR) > uses.total()]

    @property
    def kinds(self) -> set[str]:
        """What the plan is made of: PP; TP, ZeRO-3, ZeRO-1 or DP where an axis uses a large weight so (TP: most of
        them)."""
        found = {"PP"} if self.plan.places > 1 else set()
        found |= {"TP"} if self.tensor_axes else set()
        words = {"gathered": "ZeRO-3", "once": "ZeRO-1", "replicated": "DP"}
        return found | {
            word
            for use, word in words.items()
            for axis, uses in enumerate(self.uses)
            if uses[use] and self.plan.mesh[axis] > 1
        }

    def levels(self, axis: int) -> set[str]:
        """The cluster levels that a mesh axis of a place spans."""
        mesh = Cluster.from_dict(dict(self.plan.cluster)).places(self.plan.places, self.plan.mesh).mesh(0)
        return {span.level.name for span in mesh.axes[axis].spans}

    def step_s(self, name: str) -> float:
        """Seconds of a strategy beside the answer. Raises KeyError where there is no plan of it."""
        made = self.beside[name]
        if isinstance(made, str):
            raise KeyError(f"{name}: {made}")
        return made.predicted.step_s

    def __str__(self) -> str:
        plan = self.plan
        shape = "x".join(map(str, (*((plan.places,) if plan.places > 1 else ()), *plan.mesh)))
        how = "; ".join(" ".join(f"{n} {use}" for use, n in uses.most_common()) for uses in self.uses)
        return (
            f"{plan.strategy} on {shape} {plan.schedule}: {1e3 * plan.predicted.step_s:.1f} ms, "
            f"{plan.predicted.memory_bytes / 2**30:.1f} GiB, weights by axis: {how}; {self.reasons}"
        )

    @property
    def reasons(self) -> str:
        """The figures beside it: milliseconds, or the first line that says bytes."""
        return ", ".join(
            f"{name} {seconds(made.predicted.step_s)}" if isinstance(made, Plan) else f"{name}: {_short(made)}"
            for name, made in self.beside.items()
        )


def _short(why: str) -> str:
    """The part of a refusal that has the figures."""
    line = next((part for part in why.splitlines() if "need" in part), why)
    return line[line.find("need") :].partition(";")[0]


@cache
def captured(spec: str, batch: int, seq: int, precision: str) -> Captured:
    """The graph of a model, with symbolic sizes."""
    here = load(spec, batch=batch, seq=seq, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    return capture(here.model, here.args, here.kwargs)


@cache
def answer(name: str) -> Answer:
    """The row of that name, planned; the same graph serves all rows of a model."""
    row = ROWS[name]
    sizes = next((other.batch, other.seq) for other in ROWS.values() if other.spec == row.spec)
    graph = captured(row.spec, *sizes, row.precision)
    hints = {**graph.hints, "b": row.batch}
    cluster = Cluster.parse(row.cluster)

    def planned(recipe: str | None) -> Plan:
        request = Request(cluster, Settings(precision=row.precision), recipe=recipe, time_limit_s=600.0)
        return joint.plan(graph.gm, hints, request, model=row.spec, graph_hash=graph.graph_hash)

    def tried(recipe: str) -> Plan | str:
        try:
            return planned(recipe)
        except InfeasibleError as error:
            return str(error)

    found = planned(None)
    return Answer(
        read(graph.parted(found.parted).gm, hints, training=True, device=cluster.device.kind),
        found,
        {recipe: tried(recipe) for recipe in row.beside},
    )
