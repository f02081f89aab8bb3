"""One published measurement, as a configuration that can be priced."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cluster import Cluster
from benchmarks.costmodel.config import Config
from benchmarks.costmodel.predict import Setup


@dataclass(frozen=True)
class Peak:
    """`nbytes` that a device had at its peak: of place `place` of the pipeline (from the end where negative; None: of
    the fullest). `kind`: what was counted, one of KINDS."""

    nbytes: float
    kind: str
    place: int | None = None


KINDS = ("allocated", "reserved", "device", "xla")
"""What torch's allocator gave out (what is predicted); what it took from the device, its cache too; what the device
said, the context and other libraries too (nvidia-smi); what XLA's allocator gave out or its compiler planned."""


@dataclass(frozen=True)
class Row:
    """`model.layers` blocks of `model`, trained as `setup` on `cluster`: `step_s` seconds a step (None: not published),
    `peaks` of the memory of devices. `group`: rows that differ in the configuration alone. `complete`: all that a
    prediction needs is published. `unsaid`: nothing is of recomputation. `remarks`: what is known to be odd,
    or was assumed."""

    name: str
    source: str
    model: Config
    setup: Setup
    cluster: Cluster
    precision: str
    step_s: float | None
    peaks: tuple[Peak, ...] = ()
    group: tuple[object, ...] = ()
    unsaid: bool = False
    complete: bool = True
    remarks: tuple[str, ...] = ()


@dataclass
class Loaded:
    """What a file gave: rows, and for each line that is no row why not."""

    rows: list[Row] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
