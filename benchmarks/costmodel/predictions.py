"""Predictions of rows: each distinct model is captured once, each distinct microbatch on a place priced once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar.capture import capture
from autopar.memory import Habits
from autopar.memory import Prediction as Held
from benchmarks.costmodel.config import Config
from benchmarks.costmodel.predict import Decided, Place, Prediction, Setup, decide, peak, predict
from benchmarks.costmodel.rows import Row
from benchmarks.costmodel.transformer import Transformer

HELD_IN = "bfloat16"
"""Mixed precision in 16 bits: float16 takes as many bytes."""


class Predictor:
    """Keeps what rows share."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[Config, str], Any] = {}
        self._places: dict[tuple[object, ...], Place] = {}

    def predict(self, row: Row) -> Prediction:
        """The step of one row."""
        return predict(self.place(row), row.model.layer_kinds, row.setup, row.cluster)

    def settled(self, row: Row) -> Row:
        """`row` with every block run again, where nothing is published of that, what devices held is, and they would
        not have room otherwise: what was measured fitted."""
        if not (row.unsaid and row.peaks) or self.held(row).peak_bytes <= row.cluster.device.memory_bytes:
            return row
        return replace(row, setup=replace(row.setup, recompute="full"))

    def held(self, row: Row) -> Held:
        """The memory of each place of one row at its peak."""
        return peak(self._graph(row.model, HELD_IN), row.setup, row.cluster)

    def place(self, row: Row) -> Place:
        """The prices of one microbatch of a row."""
        setup, device = row.setup, row.cluster.device
        alone = _alone(setup)
        inner = setup.tp * setup.cp * setup.expert_ways
        levels = tuple((level.name, level.size, level.bandwidth_bytes_s) for level in row.cluster.levels)
        key = (row.model.short(), row.precision, alone, device.name, levels if inner > levels[-1][1] else levels[1:])
        if key not in self._places:
            self._places[key] = self.decided(row).priced(row.cluster)
        return self._places[key]

    def decided(self, row: Row) -> Decided:
        """The decisions for one microbatch of a row."""
        return decide(self._graph(row.model.short(), row.precision), _alone(row.setup), row.cluster, row.precision)

    def _graph(self, config: Config, precision: str) -> Any:
        if (config, precision) not in self._graphs:
            self._graphs[config, precision] = captured(config, precision)
        return self._graphs[config, precision]


def _alone(setup: Setup) -> Setup:
    """What the prices of a microbatch on one place depend on."""
    return replace(
        setup,
        microbatches=1,
        flushes=1,
        dp=setup.expert_ways,
        pp=1,
        vpp=1,
        schedule="",
        zero=0,
        replicas=1,
        recompute="none",
        recompute_share=1.0,
        blocks=(),
        again=(),
        parts=(),
        software=replace(setup.software, habits=Habits()),
    )


def captured(config: Config, precision: str) -> Any:
    """The graph of a model, batch and sequence symbolic."""
    with torch.device("meta"):
        model = Transformer(config).to(getattr(torch, precision)).train()
        ids = torch.empty((4, max(min(config.positions, 1024), 2 * config.window)), dtype=torch.int64)
    return capture(model, (ids, ids)).gm
