"""One published measurement, as a configuration that can be priced."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cluster import Cluster
from autopar.predict import Setup
from benchmarks.costmodel.transformer import Config


@dataclass(frozen=True)
class Row:
    """`model.layers` blocks of `model`, trained as `setup` on `cluster`: `step_s` seconds a step, `memory_bytes` of the fullest device
    at its peak (None: not published). `group`: rows that differ in the configuration alone. `complete`: all that a prediction needs
    is published. `remarks`: what is known to be odd, or was assumed."""

    name: str
    source: str
    model: Config
    setup: Setup
    cluster: Cluster
    precision: str
    step_s: float | None
    memory_bytes: float | None = None
    memory_kind: str = ""
    group: tuple[object, ...] = ()
    complete: bool = True
    remarks: tuple[str, ...] = ()


@dataclass
class Loaded:
    """What a file gave: rows, and for each line that is no row why not."""

    rows: list[Row] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
