"""What the search prices a step at against what the simulation of the same plan takes: every recipe and every schedule,
the furthest off first.

    python -m benchmarks.simulated [--models gpt2 llama3-70b ...] [--clusters h100:8x8 ...] [--ways ddp zbv_zero_bubble
    ...] [--limit 10] [--json FILE]

A *way* is a recipe, a schedule (with data parallel, with ZeRO-3 and with tensor parallel places, and with roles over
two axes), roles over two axes on one stage, or "search". Both sides have the same prices of operators and collectives,
so that what differs is what they think of when things run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten

import torch
from tabulate import tabulate

from autopar import joint
from autopar.capture import Captured, capture
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.frontend import load
from autopar.joint.choice import staged
from autopar.joint.search_context import SearchContext
from autopar.joint.spaces import Space
from autopar.joint.timetables import Kind
from autopar.onestage import finish
from autopar.pipeline.schedules import SCHEDULES
from autopar.plan import Plan
from autopar.planner import Planner
from autopar.problem.settings import Settings
from autopar.recipes import RECIPES, roles
from autopar.recipes.pipelines import PIPELINES
from autopar.request import Request
from autopar.search import SEARCHES
from autopar.simulate import simulate
from autopar.text import first_line

ROOT = Path(__file__).resolve().parents[1]
SLOW = "benchmarks/clusters/a100-40-ethernet.toml"
CLOSE = 0.03  # what docs/simulate.md promises


@dataclass(frozen=True)
class Case:
    """A model at a size, in a precision, on a cluster."""

    model: str
    batch: int
    seq: int
    precision: str
    cluster: str


CASES = (
    Case("gpt2", 8, 128, "float32", "cpu:1x4"),
    Case("gpt2", 64, 512, "float32", "cpu:1x4"),
    Case("gpt2", 8, 512, "bf16", "h100:1x8"),
    Case("gpt2", 64, 1024, "bfloat16", "h100:1x8"),
    Case("gpt2", 512, 1024, "bf16", "a100-80:2x8"),
    Case("gpt2", 64, 1024, "bf16", SLOW),
    Case("llama3-8b", 8, 2048, "bf16", "h100:1x8"),
    Case("llama3-8b", 64, 4096, "bf16", "a100-80:2x8"),
    Case("llama3-8b", 16, 8192, "bfloat16", "h100:8x8"),
    Case("llama3-8b", 256, 4096, "bf16", "h100:8x8"),
    Case("llama3-70b", 64, 8192, "bf16", "h100:8x8"),
    Case("llama3-70b", 512, 4096, "bf16", "h100:32x8"),
    Case("mixtral-8x7b", 32, 2048, "bf16", "h100:8x8"),
    Case("mixtral-8x7b", 512, 4096, "bf16", "h100:8x8"),
    Case("mixtral-8x7b", 32, 2048, "bf16", "a100-80:2x8"),
    Case("gpt2", 64, 1024, "bf16", "a100-80:2x8"),
    Case("llama3.2-1b", 32, 2048, "bf16", "rtx4090:2x8"),
    Case("bert", 64, 512, "bf16", "l4:2x4"),
    Case("t5", 64, 512, "bf16", "h100:2x4"),
    Case("vit", 256, 1, "bf16", "a100-80:2x4"),
    Case("resnet50", 256, 1, "bf16", "a100-80:1x8"),
)


@dataclass(frozen=True)
class Row:
    """One plan: its shape, and seconds of a step as priced and as simulated."""

    case: str
    way: str
    shape: str
    priced_s: float
    simulated_s: float

    @property
    def off(self) -> float:
        """How far the simulation is above the price."""
        return self.simulated_s / self.priced_s - 1


TWO_AXES = {"zero3 over two axes": (roles.zero3, roles.zero3), "zero1 over two axes": (roles.zero1, roles.zero1)}


def _roles() -> dict[str, tuple[roles.Role, ...]]:
    return {
        "ddp": (roles.data,),
        "zero3": (roles.zero3,),
        "tp": (roles.tensor_sequence,),
        "tp_zero3": (roles.zero3, roles.tensor_sequence),
        **TWO_AXES,
    }


VIRTUAL = (2, 4)
"""Stages of each place, under schedules that leave that open."""


def _by_schedule() -> dict[str, Space]:
    """Each schedule with each of some roles: name -> space."""
    found = {}
    for about in SCHEDULES.values():
        for name, used in _roles().items():
            known = {len(used): used, **({1: used[-1:]} if len(used) > 1 and name not in TWO_AXES else {})}
            for virtual in (about.virtual,) if about.virtual else VIRTUAL:
                deep = f" {virtual}" if virtual > 2 else ""
                found[f"{about.name}{deep} {name}"] = Space(
                    about.name,
                    lambda mesh, known=known: (roles.nothing,) if mesh == (1,) else known.get(len(mesh)),
                    (Kind(about.name, virtual),),
                    len(used),
                )
    return found


WAYS = ("search", *RECIPES, *TWO_AXES, *PIPELINES, *_by_schedule())


def captured_of(case: Case) -> Captured:
    """The graph of the case's model."""
    dtype = torch.float32 if case.precision == "float32" else torch.bfloat16
    loaded = load(
        f"hf:{ROOT}/models/hf/{case.model}.json",
        batch=case.batch,
        seq=case.seq,
        device="meta",
        dtype=dtype,
        train=True,
        labels=True,
    )
    return capture(loaded.model, loaded.args, loaded.kwargs, mode="train")


def plans(case: Case, captured: Captured, ways: list[str], limit_s: float) -> Iterator[tuple[str, Plan | AutoparError]]:
    """The plan of each way, or why there is none."""
    cluster = Cluster.parse(str(ROOT / case.cluster) if case.cluster.endswith(".toml") else case.cluster)
    request = Request(cluster, Settings(precision=case.precision), time_limit_s=limit_s)
    # a name: what is searched then is the space alone
    context = SearchContext(captured.gm, captured.hints, replace(request, recipe="1f1b"))
    by_schedule = _by_schedule()
    for way in ways:
        try:
            context.restart()
            if way in by_schedule:
                yield (
                    way,
                    staged(context, [by_schedule[way]], None, {"model": case.model, "graph_hash": captured.graph_hash}),
                )
            elif way in TWO_AXES:
                yield (
                    way,
                    _on_two_axes(captured, request, way, {"model": case.model, "graph_hash": captured.graph_hash}),
                )
            else:
                asked = replace(request, recipe=None if way == "search" else way)
                yield (
                    way,
                    joint.plan(captured.gm, captured.hints, asked, model=case.model, graph_hash=captured.graph_hash),
                )
        except AutoparError as error:
            yield way, error


def _on_two_axes(captured: Captured, request: Request, way: str, about: dict[str, str]) -> Plan:
    """One stage on a mesh of nodes and their devices, or of two and the rest of them."""
    cluster = request.cluster
    inside = (
        cluster.levels[-1].size
        if len(cluster.levels) > 1 and cluster.devices > cluster.levels[-1].size
        else cluster.devices // 2
    )
    mesh = (cluster.devices // inside, inside)
    planner = Planner.of(captured.gm, captured.hints, replace(request, mesh=mesh))
    best = planner.candidate(
        mesh, TWO_AXES[way], way, lambda problem: SEARCHES["ilp"](problem, time_limit_s=request.time_limit_s)
    )
    return finish(planner, best, 0.0, [], about)


def _shape(plan: Plan) -> str:
    places = f"{plan.places}p " if plan.places > 1 else ""
    again = f" {'some ' if any(s.again for s in plan.stages) else ''}again" if plan.remat else ""
    return f"{places}{'x'.join(map(str, plan.mesh))} {plan.schedule} m{plan.microbatches}{again}"


def rows(case: Case, ways: list[str], limit_s: float, refused: Counter[str]) -> Iterator[Row]:
    """One row for each way that has a plan; those that have none are counted by why that is."""
    captured = captured_of(case)
    name = f"{case.model} {case.batch}x{case.seq} {case.precision} {Path(case.cluster).stem}"
    for way, made in plans(case, captured, ways, limit_s):
        if isinstance(made, Plan):
            parted = captured.parted(made.parted)
            yield Row(name, way, _shape(made), made.predicted.step_s, simulate(parted.gm, made).step_s)
        else:
            refused[first_line(made)] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(dict.fromkeys(case.model for case in CASES)))
    parser.add_argument("--clusters", nargs="+", default=list(dict.fromkeys(case.cluster for case in CASES)))
    parser.add_argument(
        "--ways",
        nargs="+",
        default=[way for way in WAYS if way not in ("search", "single")],
        choices=WAYS,
        metavar="WAY",
        help="names of recipes and schedules; an unknown one is refused with all that there are",
    )
    parser.add_argument("--limit", type=float, default=5.0, help="seconds for each plan")
    parser.add_argument("--json", type=Path, help="write all rows there")
    options = parser.parse_args()
    found: list[Row] = []
    for case in CASES:
        if case.model in options.models and case.cluster in options.clusters:
            began = time.monotonic()
            refused = Counter[str]()
            here = list(rows(case, options.ways, options.limit, refused))
            found += here
            far = sum(abs(row.off) > CLOSE for row in here)
            print(
                f"{case}: {len(here)} plans, {far} further off than {100 * CLOSE:.0f} %, "
                f"{time.monotonic() - began:.0f} s; {refused.total()} ways without a plan",
                flush=True,
            )
            for why, count in refused.most_common():
                print(f"    {count}: {shorten(why, 200)}", flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in found]))
    found.sort(key=lambda row: -abs(math.log(row.simulated_s / row.priced_s)))
    table = [[row.case, row.way, row.shape, 1e3 * row.priced_s, 1e3 * row.simulated_s, 100 * row.off] for row in found]
    print(
        tabulate(
            table,
            headers=["model", "way", "plan", "priced ms", "simulated ms", "off %"],
            floatfmt=".1f",
            tablefmt="github",
        )
    )


if __name__ == "__main__":
    main()
