"""Time and memory from `compile()` to emitted source, for Llama-3 models of growing depth.

    python -m benchmarks.plan_time [--models 8b 70b 405b] [--cluster h100:8x8] [--batch 16] [--seq 8192]

Each model is planned in a process of its own, on the meta device, in bfloat16. Building the model (Hugging Face's own constructor)
and importing torch are not counted; capture, passes, search and emission are. `cpu_s` is the processor time of the same, the figure to
look at on a machine that does other things besides.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]


def one(model: str, cluster: str, batch: int, seq: int, limit_s: float) -> dict[str, object]:
    """Plan one model in this process."""
    import torch

    import autopar
    from autopar.frontend import load

    loaded = load(f"hf:{ROOT}/models/hf/llama3-{model}.json", batch=batch, seq=seq, dtype=torch.bfloat16)
    start, used = time.perf_counter(), time.process_time()
    compiled = autopar.compile(loaded.model, cluster, (loaded.args, loaded.kwargs), time_limit_s=limit_s)
    lines = len(compiled.source.splitlines())
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - used
    plan = compiled.plan
    return {"model": model, "layers": loaded.model.config.num_hidden_layers, "seconds": seconds, "cpu_s": cpu_s,
            "capture_s": sum(compiled.captured.seconds.values()) if compiled.captured else 0.0,
            "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "strategy": plan.strategy, "mesh": "x".join(map(str, plan.mesh)),
            "step_s": plan.predicted.step_s, "memory_GiB": plan.predicted.memory_bytes / 2**30, "gap_%": 100 * plan.predicted.gap,
            "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["8b", "70b", "405b"])
    parser.add_argument("--cluster", default="h100:8x8")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.cluster, options.batch, options.seq, options.time_limit)))
        return
    rows = []
    for model in options.models:
        command = [sys.executable, "-m", "benchmarks.plan_time", "--one", model, "--cluster", options.cluster, "--batch",
                   str(options.batch), "--seq", str(options.seq), "--time-limit", str(options.time_limit)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            rows.append({"model": model, "strategy": done.stderr.strip().splitlines()[-1][:100]})
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(tabulate(rows, headers="keys", floatfmt=".3f"))


if __name__ == "__main__":
    main()
