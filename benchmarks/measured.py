"""Predicted against measured step times of emitted modules on local gloo ranks.

    python -m benchmarks.measured [--ranks 4] [--rounds 7] [--seconds 60] [--cluster FILE] [--json FILE]

Calibrates this machine with as many ranks as the plans have (or takes a file that `autopar calibrate` wrote), plans a transformer and an MLP in twelve
ways on that cluster, and runs all of them in turns, one step of each per round, on the same ranks: the machine's speed drifts, what takes turns drifts alike. The
median over rounds is compared with the price of the search and with the simulation. Nothing is fitted to the plans.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

import autopar
from autopar.bundle import Bundle
from autopar.calibrate import calibrate
from autopar.cluster import Cluster
from autopar.runtime.launch import Ranks
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
CASES = (
    Case("gpt", "ddp"), Case("gpt", "zero3"), Case("gpt", "tp"), Case("gpt", "megatron"), Case("gpt", "hsdp", (2, 2)),
    Case("gpt", "tp_zero3", (2, 2)), Case("gpt", "1f1b"), Case("mlp", "ddp"), Case("mlp", "zero3"), Case("mlp", "tp"),
    Case("mlp", "tp_zero3", (2, 2)), Case("mlp", "gpipe"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One plan: seconds of a step as the search priced it, as the simulation has it, and of every measured round."""

    case: str
    mesh: str
    priced_s: float
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


def run(bundles: Sequence[Bundle], batches: Sequence[dict[str, Any]], rounds: int) -> list[list[float]]:
    """On each rank: seconds of every round of every plan, the slowest rank's."""
    torch.manual_seed(0)
    plans = [_prepared(bundle, batch) for bundle, batch in zip(bundles, batches, strict=True)]
    found: list[list[float]] = [[] for _ in plans]
    for turn in range(WARM + rounds):
        for seconds, (module, optimizer, batch) in zip(found, plans, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            optimizer.zero_grad()
            module.train_step(*batch)
            optimizer.step()
            took = torch.tensor([time.perf_counter() - begin])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn >= WARM:
                seconds.append(float(took))
    return found


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


def measure(cases: Sequence[Case], cluster: Cluster, ranks: int, rounds: int) -> list[Row]:
    """Plan, predict and run `cases`."""
    plans = [(case, *planned(case, cluster)) for case in cases]
    simulated = [compiled.simulate().step_s for _, compiled, _ in plans]
    with Ranks(ranks) as team:
        times = team.run(run, [compiled.bundle for _, compiled, _ in plans], [batch for *_, batch in plans], rounds)[0]
    return [Row(str(case), _shape(compiled.plan), compiled.plan.predicted.step_s, sim_s, tuple(took))
            for (case, compiled, _), sim_s, took in zip(plans, simulated, times, strict=True)]


def _shape(plan: Any) -> str:
    places = f"{plan.places} places x " if plan.places > 1 else ""
    return places + "x".join(map(str, plan.mesh)) + (f", {plan.microbatches} microbatches" if plan.microbatches > 1 else "")


def show(rows: Sequence[Row]) -> None:
    """Print the table and the summary."""
    table = [[row.case, row.mesh, row.measured_s * 1e3, f"{min(row.rounds_s) * 1e3:.0f}-{max(row.rounds_s) * 1e3:.0f}", row.priced_s * 1e3,
              100 * row.error(row.priced_s), row.simulated_s * 1e3, 100 * row.error(row.simulated_s)] for row in rows]
    print(tabulate(table, headers=["plan", "mesh", "measured ms", "range", "priced ms", "error %", "simulated ms", "error %"], floatfmt=".1f", tablefmt="github"))
    for what, predicted in (("priced", [row.priced_s for row in rows]), ("simulated", [row.simulated_s for row in rows])):
        errors = [abs(row.error(value)) for row, value in zip(rows, predicted, strict=True)]
        print(f"{what}: mean error {100 * statistics.mean(errors):.1f} %, worst {100 * max(errors):.1f} %, {sum(e <= 0.15 for e in errors)} of "
              f"{len(rows)} within 15 %; {100 * ordered(rows, predicted):.1f} % of pairs in the right order")


def main() -> None:
    """Calibrate, plan, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the calibration")
    parser.add_argument("--cluster", help="a measured cluster file; without it the machine is calibrated first")
    parser.add_argument("--json", metavar="FILE", help="write rows and cluster here as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"calibrating with {options.ranks} ranks" if not options.cluster else f"cluster {options.cluster}", file=sys.stderr)
    cluster = Cluster.parse(options.cluster) if options.cluster else calibrate("cpu", options.ranks, seconds=options.seconds).cluster
    rows = measure(CASES, cluster, options.ranks, options.rounds)
    show(rows)
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": [asdict(row) for row in rows], "cluster": cluster.to_dict()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
