"""What shifting cuts gains: one shape under every timetable, with stages as even as they can be and as the schedule
wants them.

    python -m benchmarks.cuts [--model llama3-70b] [--cluster h100:16x8] [--batch 16] [--seq 8192] [--places 8] [--mesh
    2 8] [--microbatches 8]

The shape is priced to the end with nothing run again, blocks laid out alike on all places; `even` and `shifted` are
steps by the schedule's own order of actions.
"""

from __future__ import annotations

import argparse
import itertools
from contextlib import suppress
from pathlib import Path

import torch
from tabulate import tabulate

from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.frontend import load
from autopar.joint.pricing import Pricing
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH
from autopar.problem.settings import Settings
from autopar.request import Request

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-70b")
    parser.add_argument("--cluster", default="h100:16x8")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--places", type=int, default=8)
    parser.add_argument("--mesh", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--microbatches", type=int, default=8)
    options = parser.parse_args()
    loaded = load(
        f"hf:{ROOT}/models/hf/{options.model}.json", batch=options.batch, seq=options.seq, dtype=torch.bfloat16
    )
    captured = capture(loaded.model, loaded.args, loaded.kwargs)
    pricing = Pricing(
        SearchContext(captured.gm, captured.hints, Request(Cluster.parse(options.cluster), Settings("train"))), SEARCH
    )
    shape, rows = Shape(options.places, tuple(options.mesh), options.microbatches), []
    for table in pricing.tables(shape):
        with suppress(InfeasibleError):
            found = pricing.price(shape, [table], "none", exact=True)
            even_s = found.even_s or found.step_s
            pieces = [
                stop - first for first, stop in itertools.pairwise([0, *found.cuts.bounds, pricing.context.pieces])
            ]
            rows.append(
                (
                    table.kind.schedule,
                    table.virtual,
                    1e3 * even_s,
                    1e3 * found.step_s,
                    100 * (even_s / found.step_s - 1),
                    " ".join(map(str, pieces)),
                )
            )
    print(f"{options.model}, {options.batch} x {options.seq} on {options.cluster}: {shape}")
    print(
        tabulate(
            rows,
            ["schedule", "stages per place", "even ms", "shifted ms", "gain %", "pieces of each stage"],
            tablefmt="github",
            floatfmt=(".0f", ".0f", ".4g", ".4g", ".1f", ""),
        )
    )


if __name__ == "__main__":
    main()
