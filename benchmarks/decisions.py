"""What is chosen for which model on which cluster, beside the best and the worst recipe that fits.

    python -m benchmarks.decisions [--only NAME ...] [--time-limit 20]
    python -m benchmarks.decisions --guide          # the decision table of Hugging Face's guide (benchmarks.guide)

The rest column says how weights with two or more dims lie and are used, and how many do; splits counts the operators by
what they split (sample, attribute, parameter), over all mesh axes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tabulate import tabulate

from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.frontend import load
from autopar.onestage import plan
from autopar.plan import Alternative, Plan
from autopar.problem.graph import Program
from autopar.problem.read_graph import read
from autopar.report.tables import kinds
from autopar.report.weights import weights
from autopar.request import Request
from benchmarks.guide import ROWS, answer

MODELS = Path(__file__).resolve().parents[1] / "models"
SPLITS = ("sample", "attribute", "parameter", "operator")


@dataclass(frozen=True)
class Case:
    """One row: a model at a size on a cluster, and what an expert expects."""

    name: str
    spec: str
    batch: int
    seq: int
    dtype: torch.dtype
    cluster: str
    expected: str


CASES = (
    Case("gpt2", f"hf:{MODELS}/hf/gpt2.json", 64, 512, torch.bfloat16, "a100-80:1x8", "small: data parallel"),
    Case("gpt2", f"hf:{MODELS}/hf/gpt2.json", 32, 1024, torch.float32, "h100:1x4", "small: data parallel"),
    Case("bert", f"hf:{MODELS}/hf/bert.json", 64, 512, torch.float32, "v100:1x8", "small: data parallel"),
    Case("llama3-8b", f"hf:{MODELS}/hf/llama3-8b.json", 8, 2048, torch.bfloat16, "h100:1x8", "does not fit: ZeRO-3"),
    Case(
        "llama3-8b",
        f"hf:{MODELS}/hf/llama3-8b.json",
        1,
        2048,
        torch.bfloat16,
        "h100:1x8",
        "one sample: tensor parallel",
    ),
    Case(
        "llama3-8b",
        f"hf:{MODELS}/hf/llama3-8b.json",
        64,
        4096,
        torch.bfloat16,
        "h100:8x8",
        "sharded, tensor parallel inside",
    ),
    Case("wide-mlp", f"{MODELS}/mlp.py:wide", 16, 1, torch.float32, "h100:1x8", "few samples: tensor parallel"),
    Case("alexnet", f"{MODELS}/cnn.py:alexnet", 128, 1, torch.float32, "l4:1x4", "one weird trick"),
    Case("alexnet", f"{MODELS}/cnn.py:alexnet", 128, 1, torch.float32, "v100:1x4", "one weird trick"),
    Case("alexnet", f"{MODELS}/cnn.py:alexnet", 128, 1, torch.float32, "cpu:1x4", "one weird trick"),
)


def row(case: Case, limit_s: float) -> dict[str, object]:
    """Plan one case."""
    loaded = load(case.spec, batch=case.batch, seq=case.seq, dtype=case.dtype)
    start = time.perf_counter()
    graph = capture(loaded.model, loaded.args, loaded.kwargs)
    made = plan(
        graph.gm,
        graph.hints,
        Request(Cluster.parse(case.cluster), time_limit_s=limit_s),
        model=case.name,
        graph_hash=graph.graph_hash,
    )
    spent = time.perf_counter() - start
    program = read(graph.gm, graph.hints, training=True)
    fitting = sorted((a for a in made.alternatives if a.step_s is not None), key=lambda a: a.step_s or 0.0)
    splits = kinds(made.nodes)
    return {
        "model": f"{case.name} {case.batch}x{case.seq}" if case.seq > 1 else f"{case.name} {case.batch}",
        "cluster": case.cluster,
        "an expert": case.expected,
        "chosen": made.strategy,
        "mesh": "x".join(map(str, made.mesh)),
        "step ms": f"{1e3 * made.predicted.step_s:.2f}",
        "GiB": f"{made.predicted.memory_bytes / 2**30:.1f}",
        "gap": f"{100 * made.predicted.gap:.1f} %" if made.predicted.bound_s > 0 else "no bound",
        "best recipe": _recipe(fitting, 0),
        "worst": _recipe(fitting, -1),
        "splits": " ".join(f"{name[:5]} {splits[name]}" for name in SPLITS if name in splits),
        "rest": _rest(program, made),
        "s": f"{spent:.1f}",
    }


def _recipe(fitting: list[Alternative], index: int) -> str:
    if not fitting:
        return "none fits"
    return f"{fitting[index].name} {1e3 * (fitting[index].step_s or 0.0):.2f}"


def _rest(program: Program, made: Plan) -> str:
    large = [w for w in weights(program, made) if len(w.shape) > 1]
    counts = Counter("/".join(w.uses) for w in large)
    return ", ".join(f"{count} {uses}" for uses, count in counts.most_common(3))


def guide_row(name: str) -> dict[str, object]:
    """One row of the guide's table: what it says, what is chosen, and the figures that decide."""
    asked, found = ROWS[name], answer(name)
    made = found.plan
    shape = "x".join(map(str, (*((made.places,) if made.places > 1 else ()), *made.mesh)))
    return {
        "case": name,
        "model": f"{Path(asked.spec).name.removesuffix('.json')} {asked.batch}x{asked.seq}",
        "cluster": Cluster.parse(asked.cluster).label,
        "guide": asked.guide,
        "chosen": "+".join(sorted(found.kinds)),
        "mesh": shape,
        "schedule": made.schedule if made.places > 1 else "",
        "step ms": f"{1e3 * made.predicted.step_s:.4g}",
        "GiB": f"{made.predicted.memory_bytes / 2**30:.1f}",
        "beside it": found.reasons,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of models")
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--guide", action="store_true", help="the decision table of the guide")
    options = parser.parse_args()
    if options.guide:
        tell([partial(guide_row, name) for name in ROWS])
        return
    cases = [case for case in CASES if options.only is None or case.name in options.only]
    tell([partial(row, case, options.time_limit) for case in cases])


def tell(todo: Sequence[Callable[[], dict[str, object]]]) -> None:
    """Make the rows, each of which takes up to minutes: one by one on the way to stderr, and the table at the end."""
    rows = []
    for number, make in enumerate(todo):
        rows.append(make())
        print(f"{number + 1}/{len(todo)} {rows[-1]}", file=sys.stderr, flush=True)
    print(tabulate(rows, headers="keys", tablefmt="github"))


if __name__ == "__main__":
    main()
