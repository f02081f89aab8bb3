"""Training steps of emitted modules on one GPU, against what is predicted of them: whole models, and single ranks of
plans for many GPUs.

    python -m benchmarks.gpu prepare DIR [--only NAME ...]      # plans, on any machine: a folder for each case
    python -m benchmarks.gpu run DIR [--json FILE]              # on a machine with a GPU; needs torch alone
    # what was measured on an H100; --again: against what is predicted now
    python -m benchmarks.gpu show benchmarks/gpu_h100.json [--again]

A rank of many runs beside nobody: its collectives return at once (torch's fake process group; of pipelines that of
torch 2.11, as 2.13 asks neighbours for shapes first), so that what it computes and holds is measured, and communication
is none of it. Such a step is compared with what the simulation says that the rank computes, a step on one GPU with the
whole step, and the peak of torch's allocator with the peak that is predicted. `launched` are the seconds until the host
has issued a step: where they are about the step, the GPU waits for the host. `busy` are the seconds of kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.on_gpu import measured

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Case:
    """A model of models/hf at a global batch, on a cluster of H100; the rank that runs is the first of `place`."""

    model: str
    batch: int
    seq: int
    cluster: str = "h100:1x1"
    recipe: str | None = None
    mesh: tuple[int, ...] | None = None
    place: int = 0
    precision: str = "bf16"

    def __str__(self) -> str:
        how = " ".join(filter(None, (self.recipe, "x".join(map(str, self.mesh or ())))))
        return (
            f"{self.model} {self.batch}x{self.seq} {self.cluster}"
            + f" {how}".rstrip()
            + (f" place {self.place}" if self.place else "")
        )

    @property
    def folder(self) -> str:
        """Its name as a folder."""
        return str(self).replace(" ", "_").replace(":", "-")


CASES = {
    "gpt2": Case("gpt2", 16, 1024),
    "gpt2-wide": Case("gpt2", 64, 1024),
    "llama-1b": Case("llama3.2-1b", 8, 2048),
    "llama-1b-long": Case("llama3.2-1b", 2, 8192),
    "bert": Case("bert", 64, 512),
    "t5": Case("t5", 64, 512),
    "vit": Case("vit", 256, 1),
    "resnet50": Case("resnet50", 256, 1),
    "gpt2-fp32": Case("gpt2", 8, 1024, precision="float32"),
    "8b": Case("llama3-8b", 16, 8192, "h100:8x8"),
    "8b-node": Case("llama3-8b", 16, 4096, "h100:1x8"),
    "8b-zero3": Case("llama3-8b", 16, 4096, "h100:1x8", "zero3"),
    "8b-megatron": Case("llama3-8b", 8, 4096, "h100:1x8", "megatron"),
    "8b-first": Case("llama3-8b", 64, 4096, "h100:1x8", "3d"),
    "8b-last": Case("llama3-8b", 64, 4096, "h100:1x8", "3d", place=-1),
    "70b": Case("llama3-70b", 64, 8192, "h100:8x8"),
}


def prepare(folder: Path, names: Sequence[str]) -> None:
    """Plan cases, and write for each its emitted module, labelled for the profiler, and what is predicted."""
    for name in names:
        case = CASES[name]
        print(f"planning {case}", file=sys.stderr, flush=True)
        compiled, batch = planned(case)
        where = compiled.save(folder / name)
        (where / "labelled.py").write_text(labels(compiled))
        (where / "case.json").write_text(json.dumps({**about(case, compiled), "batch": batch}, indent=1))


def about(case: Case, compiled: Any) -> dict[str, Any]:
    """What a case is, and what is predicted for its rank: seconds in all and by operator, bytes."""
    from autopar.profile.predicted import predicted

    plan, place = compiled.plan, case.place % compiled.plan.places
    found, held = compiled.simulate(), compiled.memory().places[place]
    here = found.places[place]
    return {
        "case": str(case),
        "rank": place * plan.ranks // plan.places,
        "strategy": plan.strategy,
        "places": plan.places,
        "mesh": plan.mesh,
        "microbatches": plan.microbatches,
        "alone": plan.ranks == 1,
        "model": f"hf:models/hf/{case.model}.json",
        "sizes": (case.batch, case.seq),
        "mixed": case.precision != "float32",
        "step_s": found.step_s,
        "priced_s": plan.predicted.step_s,
        "computes_s": here.compute_s + here.optimizer_s,
        "launches": here.launches,
        "peak_bytes": held.peak_bytes,
        "rest_bytes": held.rest_bytes,
        "kinds": held.by_kind(),
        "again": plan.run_again,
        "rows": [[list(key), seconds] for key, seconds in predicted(compiled.captured.gm, plan, place).items()],
    }


def again(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured of whole models, with what is predicted for them now."""
    known = {str(case): case for case in CASES.values()}
    return [
        {**found, **about(known[found["case"]], planned(known[found["case"]])[0])}
        for found in rows
        if found["alone"] and "measured_s" in found
    ]


def planned(case: Case) -> tuple[Any, dict[str, Any]]:
    """The compiled plan, and of each input of the global batch its shape, dtype and the number that its ids are
    below."""
    import torch

    import autopar
    from autopar.frontend import load

    loaded = load(f"hf:{ROOT}/models/hf/{case.model}.json", batch=case.batch, seq=case.seq, device="meta")
    compiled = autopar.compile(
        loaded.model,
        case.cluster,
        (loaded.args, loaded.kwargs),
        precision=case.precision,
        recipe=case.recipe,
        mesh=case.mesh,
        time_limit_s=60.0,
    )
    config, named = (
        loaded.model.config,
        {**dict(zip(compiled.captured.input_names, loaded.args, strict=False)), **loaded.kwargs},
    )
    below = config.num_labels if "pixel_values" in named else config.vocab_size
    return compiled, {
        name: (tuple(x.shape), str(x.dtype).removeprefix("torch."), below if name in IDS else 2)
        for name, x in named.items()
        if isinstance(x, torch.Tensor)
    }


IDS = ("input_ids", "labels", "decoder_input_ids")
"""Inputs whose numbers are ids of a vocabulary or classes; others that are no floats are masks."""


def labels(compiled: Any) -> str:
    """The emitted source with a range of the profiler around each operator."""
    from autopar.codegen.module import emit
    from autopar.codegen.tables import Names
    from autopar.profile.label import labelled

    return labelled(emit(compiled.captured.gm, compiled.plan, Names.of(compiled.captured), probes=True))


def row(found: dict[str, Any]) -> list[Any]:
    """A line of the table."""
    if "measured_s" not in found:
        return [found["case"], found["error"][:60]]
    predicted_s, gib = found["step_s" if found["alone"] else "computes_s"], 2**30
    shape = (
        f"{found['places']} places of " * (found["places"] > 1)
        + "x".join(map(str, found["mesh"]))
        + f", {found['microbatches']} microbatches" * (found["microbatches"] > 1)
    )
    return [
        found["case"],
        shape,
        predicted_s * 1e3,
        found["measured_s"] * 1e3,
        100 * (predicted_s / found["measured_s"] - 1),
        found["launched_s"] * 1e3,
        found.get("busy_s", math.nan) * 1e3,
        found["peak_bytes"] / gib,
        found["allocated_bytes"] / gib,
        100 * (found["peak_bytes"] / found["allocated_bytes"] - 1),
        found["reserved_bytes"] / gib,
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table and the means."""
    print(
        tabulate(
            map(row, rows),
            headers=[
                "case",
                "shape",
                "predicted ms",
                "measured ms",
                "error %",
                "launched ms",
                "busy ms",
                "predicted GiB",
                "allocated GiB",
                "error %",
                "reserved GiB",
            ],
            floatfmt=".1f",
            tablefmt="github",
        )
    )
    right = [row(found) for found in rows if "measured_s" in found]
    for what, at in (("step", 4), ("memory", 9)):
        errors = [abs(line[at]) for line in right if math.isfinite(line[at])]
        if errors:
            print(f"{what}: mean error {statistics.mean(errors):.1f} %, worst {max(errors):.1f} % of {len(errors)}")


def main() -> None:
    """Prepare, run or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["prepare", "run", "show"])
    parser.add_argument("where", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path, help="write what was measured here as well")
    parser.add_argument("--again", action="store_true", help="show: predict anew")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to try it")
    options = parser.parse_args()
    if options.do == "prepare":
        prepare(options.where, options.only)
    elif options.do == "show":
        rows = json.loads(options.where.read_text())
        show(again(rows) if options.again else rows)
    else:
        rows = []
        for name in (name for name in options.only if (options.where / name).is_dir()):
            rows.append(measured(options.where / name, options.device))
            print(
                json.dumps({key: value for key, value in rows[-1].items() if key not in ("rows", "kinds", "batch")}),
                file=sys.stderr,
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps(rows))
        show(rows)


if __name__ == "__main__":
    main()
