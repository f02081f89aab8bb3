"""GPT-2 small on four CPU ranks: plan it, emit it, run one training step, compare with one device.

    python examples/demo.py [MODEL]      # `make demo` does this in .venv

Twice: with the plan that the search found, and with plain data parallelism. Loss, every gradient and every parameter
after an AdamW step must agree in float32 within TOLERANCE (relative to the largest value of each tensor, at least 1).
Both plans are for one model: its weights are made once, and one device computes once.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from pathlib import Path

import torch

from autopar.cli.console import show
from autopar.cli.planning import Asked, plan_command
from autopar.cli.rebuild import rebuild
from autopar.cli.verifying import case
from autopar.plan import Plan
from autopar.problem.read_graph import laid_out
from autopar.report.checks import checked
from autopar.verify import verify

ROOT = Path(__file__).resolve().parents[1]
MODEL = f"hf:{ROOT}/models/hf/gpt2.json"
# As of `autopar verify` in float32. Sums over 4 ranks in another order differ by 1e-6. But in one process of six or so
# torch on one device, with two threads, gives half of the samples logits that are 1.5e-5 off (open why; not with one).
TOLERANCE = 1e-4
STRATEGIES = {"what the search found": None, "recipe ddp": "ddp"}


def main(model: str = MODEL) -> int:
    """Plan, run and compare with both strategies; the exit code is 0 when all values agree."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        plans = {name: Path(folder) / f"{number}.json" for number, name in enumerate(STRATEGIES)}
        for name, path in plans.items():
            print(f"\n=== {name} ===\n", flush=True)
            plan_command(Asked(model, "cpu:1x4", recipe=STRATEGIES[name]), path, None)
        right = compare(plans)
    print(
        f"\n{'All values agree with the single device' if right else 'SOME VALUES ARE WRONG'}; "
        f"{time.perf_counter() - began:.0f} s in all"
    )
    return 0 if right else 1


def compare(plans: dict[str, Path]) -> bool:
    """One training step on one device, and one on local ranks under each plan; whether all values agree."""
    say = Clock()
    rebuilt = rebuild(next(iter(plans.values())), weights=True)
    say("the model again, with weights")
    # `autopar verify` compares a second step and an evaluation too
    base = dataclasses.replace(case(rebuilt, rebuilt.loaded, torch.float32), later=False)
    reference = base.reference()
    say("one training step on one device")
    right = True
    for name, path in plans.items():
        plan = Plan.load(path)
        plan.check(
            rebuilt.captured.graph_hash, laid_out(rebuilt.captured.gm, plan.hints, training=plan.mode == "train")
        )
        report = verify(dataclasses.replace(base, plan=plan), tolerance=TOLERANCE, reference=reference)
        say(f"one training step on {plan.ranks} gloo ranks: {name}")
        show("", checked(report), "")
        right &= report.ok
    return right


class Clock:
    """Says what is done and how long it took."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def __call__(self, what: str) -> None:
        now = time.perf_counter()
        print(f"[{now - self.last:4.1f} s] {what}", flush=True)
        self.last = now


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
