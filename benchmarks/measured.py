"""Predicted against measured step times of emitted modules on local gloo ranks.

    python -m benchmarks.measured [--ranks 4] [--passes 3] [--rounds 3] [--seconds 30] [--cpu-time] [--json FILE]

Measures this machine with as many ranks as the plans have, plans a transformer and an MLP in twelve ways on it, and
runs all of them in turns on the same ranks, one step of each per round. Calibration and rounds take turns too, `passes`
times, so that both see the machine as it is all the while; medians count: the constants are fitted to the median of
each of the calibration's own measurements, never to a plan. The plans were made on the first pass; they are priced by
the search and simulated with the constants of all passes. A plan that the search would make in another way with these
has no price.

With --cpu-time both the calibration and the steps count what the ranks compute, over the cores, and not the time on the
wall: other work of the machine is no part of that. What it cannot see is waiting with idle cores, as in the bubbles of
pipelines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import autopar
from autopar.bundle import Bundle
from autopar.calibrate import Clock, cores_here, fitted, here, taken
from autopar.calibrate.samples import Sample
from autopar.cluster import Cluster
from autopar.runtime.launch import Ranks
from autopar.simulate import simulate
from models import gpt, mlp

WARM = 2
"""Steps of each plan before the first that counts."""


@dataclass(frozen=True, slots=True)
class Case:
    """One plan: a model of MODELS, a recipe, and the mesh where it is not the recipe's own."""

    model: str
    recipe: str
    mesh: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.model} {self.recipe}{' ' + 'x'.join(map(str, self.mesh)) if self.mesh else ''}"


MODELS = {
    "gpt": lambda: gpt.build(gpt.Config(vocab=2048, positions=128, layers=2, heads=8, hidden=512), 8, 128),
    "mlp": lambda: mlp.build(512, 1024, 6, 512, 512),
}
FLAT = (
    Case("gpt", "ddp"),
    Case("gpt", "zero3"),
    Case("gpt", "tp"),
    Case("gpt", "megatron"),
    Case("gpt", "1f1b"),
    Case("mlp", "ddp"),
    Case("mlp", "zero3"),
    Case("mlp", "tp"),
    Case("mlp", "gpipe"),
)
"""On any number of ranks."""

MORE = {4: (Case("gpt", "hsdp", (2, 2)), Case("gpt", "tp_zero3", (2, 2)), Case("mlp", "tp_zero3", (2, 2)))}
"""By ranks, what makes twelve of them; else those of OTHERS."""

OTHERS = (Case("gpt", "zero1"), Case("gpt", "tp_sp"), Case("mlp", "zero2"))


def twelve(ranks: int) -> tuple[Case, ...]:
    """The twelve plans for so many ranks."""
    return (*FLAT, *MORE.get(ranks, OTHERS))


@dataclass(frozen=True, slots=True)
class Row:
    """One plan: seconds of a step as the search prices it (None: it would plan another way), as the simulation has it,
    and of every measured round."""

    case: str
    mesh: str
    priced_s: float | None
    simulated_s: float
    rounds_s: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        """The median."""
        return statistics.median(self.rounds_s)

    def error(self, predicted_s: float) -> float:
        """Relative to what was measured."""
        return predicted_s / self.measured_s - 1


def ordered(rows: Sequence[Row], predicted: Sequence[float]) -> float:
    """The share of pairs of plans whose order by `predicted` seconds is that of the measured ones."""
    pairs = list(itertools.combinations(range(len(rows)), 2))
    right = sum((predicted[a] < predicted[b]) == (rows[a].measured_s < rows[b].measured_s) for a, b in pairs)
    return right / len(pairs) if pairs else 1.0


_PLANS: list[tuple[Any, torch.optim.Optimizer, Any]] = []
"""What a rank runs, from one job to the next."""


def prepare(bundles: Sequence[Bundle], batches: Sequence[dict[str, Any]]) -> None:
    """On each rank: build all modules, and run each for some steps."""
    torch.manual_seed(0)
    _PLANS[:] = [_prepared(bundle, batch) for bundle, batch in zip(bundles, batches, strict=True)]
    run(WARM)


def run(rounds: int, cores: int = 0) -> list[list[float]]:
    """On each rank: seconds of every round of every plan, the slowest rank's, or what all ranks compute over
    `cores`."""
    found: list[list[float]] = [[] for _ in _PLANS]
    clock = Clock("cpu", cores=cores)
    for _ in range(rounds):
        for seconds, made in zip(found, _PLANS, strict=True):
            seconds.append(clock.runs_s(partial(_step, *made)))
    return found


def _step(module: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    module.train_step(*batch)
    optimizer.step()


def _prepared(bundle: Bundle, batch: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer, Any]:
    """A module with small weights, as many on all ranks, AdamW, and this rank's part of the batch."""
    from autopar.runtime.main import initialise

    module = bundle.build()
    initialise(module, 0)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-4), module.shard_batch(**batch)


def planned(case: Case, cluster: Cluster) -> tuple[Any, dict[str, Any]]:
    """The compiled plan of a case, and the global batch by input name."""
    torch.manual_seed(0)
    model, batch = MODELS[case.model]()
    compiled = autopar.compile(model.to("meta"), cluster, batch, recipe=case.recipe, mesh=case.mesh)
    assert compiled.captured is not None
    return compiled, dict(zip(compiled.captured.input_names, batch, strict=True))


def measure(
    cases: Sequence[Case], ranks: int, passes: int, rounds: int, seconds: float, cores: int = 0
) -> tuple[list[Row], Cluster]:
    """Calibrate, plan and run `cases` in turns; then predict them."""
    base, sizes, samples, times = here("cpu"), (1, ranks), [], [list[float]() for _ in cases]
    plans: list[tuple[Any, dict[str, Any]]] = []
    with Ranks(ranks) as team:
        for number in range(passes):
            say(f"pass {number + 1} of {passes}: calibrating")
            samples.append(
                taken(lambda job, clock: team.run(job, clock)[0], base, sizes, seconds, lambda *_: None, cores)
            )
            if not plans:
                cluster = fitted(base, sizes, samples[0]).cluster
                plans = [said(planned, case, cluster) for case in cases]
                team.run(prepare, [compiled.bundle for compiled, _ in plans], [batch for _, batch in plans])
            say(f"pass {number + 1} of {passes}: running")
            for all_s, more in zip(times, team.run(run, rounds, cores)[0], strict=True):
                all_s += more
    cluster = fitted(base, sizes, middle(samples)).cluster
    return [
        row(case, compiled, cluster, took) for case, (compiled, _), took in zip(cases, plans, times, strict=True)
    ], cluster


def middle(passes: Sequence[Sequence[tuple[int, Sample]]]) -> list[tuple[int, Sample]]:
    """One calibration out of several: the median of what each took."""
    times: dict[tuple[int, str, tuple[int, ...], int], list[float]] = {}
    for level, sample in (each for one in passes for each in one):
        times.setdefault((level, sample.what, sample.size, sample.members), []).append(sample.seconds)
    return [
        (level, Sample(what, size, statistics.median(seconds), members))
        for (level, what, size, members), seconds in times.items()
    ]


def row(case: Case, compiled: Any, cluster: Cluster, took: Sequence[float]) -> Row:
    """The plan that ran, predicted on `cluster`."""
    say(f"predicting {case}")
    plan = replace(compiled.plan, cluster=cluster.to_dict())
    now = planned(case, cluster)[0].plan
    same = (now.nodes, now.mesh, now.stages, now.microbatches, now.remat) == (
        plan.nodes,
        plan.mesh,
        plan.stages,
        plan.microbatches,
        plan.remat,
    )
    return Row(
        str(case),
        _shape(plan),
        now.predicted.step_s if same else None,
        simulate(compiled.captured.gm, plan).step_s,
        tuple(took),
    )


def said(make: Callable[[Case, Cluster], Any], case: Case, cluster: Cluster) -> Any:
    """`make`, told."""
    say(f"planning {case}")
    return make(case, cluster)


def say(text: str) -> None:
    """What is being done, on stderr."""
    print(text, file=sys.stderr, flush=True)


def _shape(plan: Any) -> str:
    places = f"{plan.places} places x " if plan.places > 1 else ""
    return (
        places
        + "x".join(map(str, plan.mesh))
        + (f", {plan.microbatches} microbatches" if plan.microbatches > 1 else "")
    )


def show(rows: Sequence[Row]) -> None:
    """Print the table and the summary."""

    def cells(row: Row, predicted_s: float | None) -> list[float | None]:
        return [None, None] if predicted_s is None else [predicted_s * 1e3, 100 * row.error(predicted_s)]

    table = [
        [
            row.case,
            row.mesh,
            row.measured_s * 1e3,
            f"{min(row.rounds_s) * 1e3:.0f}-{max(row.rounds_s) * 1e3:.0f}",
            *cells(row, row.priced_s),
            *cells(row, row.simulated_s),
        ]
        for row in rows
    ]
    print(
        tabulate(
            table,
            headers=["plan", "mesh", "measured ms", "range", "priced ms", "error %", "simulated ms", "error %"],
            floatfmt=".1f",
            missingval="-",
            tablefmt="github",
        )
    )
    for what in ("priced", "simulated"):
        found = [(row, predicted) for row in rows if (predicted := getattr(row, f"{what}_s")) is not None]
        errors = [abs(row.error(predicted)) for row, predicted in found]
        if errors:
            print(
                f"{what}: mean error {100 * statistics.mean(errors):.1f} %, worst {100 * max(errors):.1f} %, "
                f"{sum(e <= 0.15 for e in errors)} of {len(errors)} within 15 %; "
                f"{100 * ordered([row for row, _ in found], [predicted for _, predicted in found]):.1f} % of pairs in "
                "the right order"
            )


def main() -> None:
    """Calibrate, plan, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="of each pass")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each pass of the calibration")
    parser.add_argument("--json", metavar="FILE", help="write rows and cluster here as well")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count what ranks compute, over the cores, not the time on the wall: for a busy machine",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, cluster = measure(
        twelve(options.ranks),
        options.ranks,
        options.passes,
        options.rounds,
        options.seconds,
        cores_here() if options.cpu_time else 0,
    )
    show(rows)
    if options.json:
        Path(options.json).write_text(
            json.dumps({"rows": [asdict(row) for row in rows], "cluster": cluster.to_dict()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
