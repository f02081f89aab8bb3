"""Time and memory from `compile()` to emitted source, for Llama-3 models of growing depth and for ResNet-50.

    python -m benchmarks.plan_time [--models 8b 70b 405b resnet50] [--cluster h100:8x8] [--batch 16] [--seq 8192]
    [--prove]

Each model is planned in a process of its own, on the meta device, in bfloat16 (CASES: for which cluster and batch;
Llama for the smallest one of a power of two nodes on which it fits without rematerialisation, and for one with more
meshes). Building the model (Hugging Face's own constructor) and importing torch are not counted; capture, passes,
search and emission are. `cpu_s` is the processor time of the same, that of the process that proves beside the search
included: the figure to look at on a machine that does other things besides. `MiB` is the largest size of both together,
what they share counted twice.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from tabulate import tabulate

CASES = {  # name: (config, cluster, batch, sequence)
    "8b": ("llama3-8b", "h100:8x8", 16, 8192),
    "70b": ("llama3-70b", "h100:16x8", 16, 8192),
    "70b-wide": ("llama3-70b", "h100:32x8", 16, 8192),
    "405b": ("llama3-405b", "h100:64x8", 16, 8192),
    "70b-512": ("llama3-70b", "h100:64x8", 1024, 8192),
    "405b-16k": ("llama3-405b", "h100:2048x8", 2048, 8192),
    "gemma3-27b": ("gemma3-27b", "h100:8x8", 128, 4096),
    "deepseek-v3": ("deepseek-v3", "h100:128x8", 2048, 4096),
    "resnet50": ("resnet50", "a100-80:1x8", 256, 1),
}

ROOT = Path(__file__).resolve().parents[1]


def one(
    case: str, cluster: str | None, batch: int | None, seq: int | None, limit_s: float, *, prove: bool = False
) -> dict[str, object]:
    """Plan one case in this process, on another cluster or at other sizes where they are given."""
    import torch

    import autopar
    from autopar.frontend import load

    config, usual, *sizes = CASES[case]
    cluster, batch, seq = cluster or usual, batch or sizes[0], seq or sizes[1]
    loaded = load(f"hf:{ROOT}/models/hf/{config}.json", batch=batch, seq=seq, dtype=torch.bfloat16)
    start, used = time.perf_counter(), sum(os.times()[:4])
    compiled = autopar.compile(loaded.model, cluster, (loaded.args, loaded.kwargs), time_limit_s=limit_s, prove=prove)
    lines = len(compiled.source.splitlines())
    seconds, cpu_s = time.perf_counter() - start, sum(os.times()[:4]) - used
    most_kib = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    plan = compiled.plan
    gap = f"{100 * plan.predicted.gap:.2f}" if plan.predicted.bound_s > 0 else "no bound"
    return {
        "model": case,
        "layers": getattr(loaded.model.config, "num_hidden_layers", ""),
        "cluster": cluster,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "capture_s": sum(compiled.captured.seconds.values()) if compiled.captured else 0.0,
        "MiB": most_kib / 1024,
        "strategy": plan.strategy,
        "mesh": "x".join(map(str, plan.mesh)),
        "step_s": plan.predicted.step_s,
        "memory_GiB": plan.predicted.memory_bytes / 2**30,
        "gap_%": gap,
        "lines": lines,
    }


def main() -> None:
    from autopar.timer import TIME_LIMIT_S

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--cluster")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S)
    parser.add_argument(
        "--prove",
        action="store_true",
        help="bound every shape, so that the gap is a proof against all plans; what that takes is counted too",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(
            json.dumps(
                one(options.one, options.cluster, options.batch, options.seq, options.time_limit, prove=options.prove)
            )
        )
        return
    rows = []
    for model in options.models:
        given = [
            ("--cluster", options.cluster),
            ("--batch", options.batch),
            ("--seq", options.seq),
            ("--time-limit", options.time_limit),
        ]
        command = [sys.executable, "-m", "benchmarks.plan_time", "--one", model]
        command += [text for name, value in given if value is not None for text in (name, str(value))]
        command += ["--prove"] * options.prove
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            rows.append({"model": model, "strategy": done.stderr.strip().splitlines()[-1][:100]})
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"load of the machine (1 min): {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(tabulate(rows, headers="keys", floatfmt=".3f"))


if __name__ == "__main__":
    main()
