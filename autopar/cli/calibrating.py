"""`autopar calibrate`: this machine measured, as a cluster file."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from autopar import torchrun
from autopar.calibrate import Calibration, calibrate, write
from autopar.cli.console import show, writable, write_json
from autopar.cluster import Cluster
from autopar.errors import ClusterError
from autopar.report.calibration import calibration as report
from autopar.runtime.process_group import joined


def calibrate_command(output: Path, device: str | None, ranks: int | None, seconds: float, json: str | None) -> None:
    """Measure, write and print. Raises ClusterError where the file cannot be written, before anything is measured."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ClusterError(f"--device {device!r}: wanted cpu or cuda")
    check_output(output)
    began, first = time.perf_counter(), True
    with _group(device) as rank:
        first = rank == 0
        with _bar(shown=first) as tell:
            found = calibrate(
                device, ranks or (torch.cuda.device_count() if device == "cuda" else 4), seconds=seconds, progress=tell
            )
    if not first:
        return
    write_cluster(found.cluster, output, "calibrate")
    if not write_json(json, {**as_json(found), "took_s": time.perf_counter() - began}):
        show(
            report(found),
            "",
            f"measured in {time.perf_counter() - began:.0f} s, written to {output}: use it as --cluster {output}",
        )


def check_output(output: Path) -> None:
    """Raise ClusterError where `output` cannot be a cluster file."""
    if output.suffix != ".toml":
        raise ClusterError(
            f"--output {output}: wanted the name of a file that ends in .toml, which is how --cluster tells it from a "
            "preset"
        )
    writable("--output", output, "the cluster", error=ClusterError)


def write_cluster(cluster: Cluster, output: Path, command: str) -> None:
    """Write a cluster that `command` has measured, whole or not at all. Raises PlanError where that is not possible."""
    write(
        cluster,
        output,
        f"Measured by `autopar {command}` on {datetime.date.today().isoformat()} with torch {torch.__version__}; each "
        "number has its source.",
        "Units: bytes, seconds, FLOP per second; bandwidths are one direction, per device.",
    )


def as_json(found: Calibration) -> dict[str, Any]:
    """The cluster, the fits and all samples as JSON types."""
    return {
        "cluster": found.cluster.to_dict(),
        "fits": [asdict(fit) for fit in found.fits.found],
        "left_out": [{**asdict(each.sample), "why": each.why} for each in found.fits.rejected],
        "impossible": [asdict(each) for each in found.fits.impossible],
        "samples": [asdict(sample) for sample in found.samples],
    }


@contextlib.contextmanager
def _group(device: str) -> Iterator[int]:
    """The process group of torchrun, where that started us; gives the rank."""
    if torchrun.ranks() is None or dist.is_initialized():
        yield dist.get_rank() if dist.is_initialized() else 0
        return
    torch.set_num_threads(1)
    with joined(device) as rank:
        yield rank


@contextlib.contextmanager
def _bar(*, shown: bool) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr, on terminals only."""
    console = Console(stderr=True)
    columns = (
        TextColumn("calibrating: {task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
