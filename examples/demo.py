"""GPT-2 small on four CPU ranks: plan it, emit it, run one training step, compare with one device.

    python examples/demo.py [MODEL]      # `make demo` does this in .venv

Twice: with the plan that the search found, and with plain data parallelism. Loss, every gradient and every parameter after
an AdamW step must agree in float32 within TOLERANCE (relative to the largest value of each tensor, at least 1).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from autopar.cli.console import show
from autopar.cli.planning import Asked, plan_command
from autopar.cli.rebuild import rebuild
from autopar.cli.verifying import case
from autopar.report.checks import checked
from autopar.verify import verify

ROOT = Path(__file__).resolve().parents[1]
MODEL = f"hf:{ROOT}/models/hf/gpt2.json"
TOLERANCE = 1e-5  # float32: sums over 4 ranks and 1024 tokens in another order; 3e-7 is what is seen


def main(model: str = MODEL) -> int:
    """Plan, run and compare with both strategies; the exit code is 0 when all values agree."""
    began = time.perf_counter()
    right = True
    with tempfile.TemporaryDirectory() as folder:
        for recipe in (None, "ddp"):
            print(f"\n=== {'what the search found' if recipe is None else f'recipe {recipe}'} ===\n", flush=True)
            path = Path(folder) / "plan.json"
            plan_command(Asked(model, "cpu:1x4", batch=8, seq=128, recipe=recipe), path, None)
            right &= compare(path)
    print(f"\n{'All values agree with the single device' if right else 'SOME VALUES ARE WRONG'}; {time.perf_counter() - began:.0f} s in all")
    return 0 if right else 1


def compare(plan: Path) -> bool:
    """One training step on local ranks against one device; whether all values agree."""
    start = time.perf_counter()
    rebuilt = rebuild(plan, weights=True)
    print(f"\none training step on {rebuilt.plan.ranks} gloo ranks and on one device ...", flush=True)
    report = verify(case(rebuilt, torch.float32), tolerance=TOLERANCE)
    show("", checked(report), f"({time.perf_counter() - start:.0f} s)")
    return report.ok


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
