"""A calibration on real ranks, as short as can be: it measures, writes a cluster that plans can be made for, and says
what it left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import autopar
from autopar.calibrate import calibrate, machine, network
from autopar.cli.app import app
from autopar.cluster import Cluster
from autopar.errors import RunError
from models import mlp


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and small sizes."""
    monkeypatch.setitem(machine.SQUARES, "cpu", (32, 64, 128))
    monkeypatch.setitem(machine.OBLONG, "cpu", ())
    monkeypatch.setitem(machine.STREAMS, "cpu", (1 << 14, 1 << 16, 1 << 18))
    monkeypatch.setitem(network.SIZES, "cpu", (1 << 12, 1 << 14, 1 << 16, 1 << 18))


def test_two_ranks_are_measured_and_planned_for(short: None, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    result = CliRunner().invoke(
        app,
        ["calibrate", "-o", str(path), "--device", "cpu", "--ranks", "2", "--seconds", "2", "--json", "-"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    cluster = Cluster.parse(path)
    assert cluster.to_dict() == data["cluster"] and cluster.label == "cpu-measured:1x2"
    assert cluster.device.sources["peak_flops"].startswith("measured") and 1e8 < cluster.device.flops("float32") < 400e9
    assert {kind for p in cluster.levels[1].protocols for kind in p.kinds} == set(network.KINDS)
    assert {s["what"] for s in data["samples"]} >= {
        "matmul float32",
        "matmul bfloat16",
        "copy",
        "launch",
        "update",
        "schedule",
        "all_reduce",
        "send",
        "compute over all_gather",
    }
    assert cluster.device.contention is None or 0.0 <= cluster.device.contention <= 1.0
    assert 0 < cluster.device.launch_s < 1e-2 and 0 < cluster.device.update_s < 0.1
    model, batch = mlp.tiny()
    assert autopar.compile(model, str(path), batch, recipe="ddp").plan.predicted.step_s > cluster.device.launch_s


def test_a_rank_that_fails_is_named(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.SQUARES, "cpu", ("many",))
    with pytest.raises(RunError, match=r"rank . of 2 failed"):
        calibrate("cpu", 2, seconds=1.0)
