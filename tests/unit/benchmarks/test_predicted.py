"""Rows become results: what cannot be told of one is refused, what can be is kept."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cluster import Cluster
from benchmarks import cost_model
from benchmarks.cost_model import predicted
from benchmarks.costmodel.config import Config
from benchmarks.costmodel.predict import Setup
from benchmarks.costmodel.rows import Loaded, Peak, Row

SIZES = Config(vocab=1024, positions=64, layers=4, heads=4, kv_heads=4, head_dim=16, hidden=64, ffn=256)
ROW = Row(
    "one",
    "somebody",
    SIZES,
    Setup(1, 2, 64, pp=2),
    Cluster.parse("h100:1x2"),
    "bfloat16",
    1.0,
    (Peak(1e6, "allocated"),),
)


def test_a_row_whose_memory_cannot_be_told_keeps_its_step() -> None:
    # the first stage has the embedding alone
    loaded = Loaded([ROW, replace(ROW, name="two", setup=replace(ROW.setup, blocks=(0, SIZES.layers)))])
    one, two = predicted(loaded, memory=True)
    assert one.held is not None and len(one.held.places) == 2 and one.peaks[0][1] > 0
    assert two.held is None and two.prediction.step_s > 0 and not two.peaks
    assert (
        len(loaded.refused) == 1
        and loaded.refused[0].startswith("two: PlanError")
        and "every stage needs one" in loaded.refused[0]
    )


def test_memory_is_told_where_it_is_asked_for() -> None:
    (result,) = predicted(Loaded([ROW]), memory=False)
    assert result.held is None


def test_what_cannot_be_printed_or_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cost_model, "load", lambda folder: Loaded([ROW], []))
    monkeypatch.setattr(sys, "argv", ["cost_model.py", "--only", "nobody"])
    assert cost_model.main() == 2 and "sources are somebody" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["cost_model.py", "--json", str(tmp_path / "none" / "out.json")])
    with pytest.raises(SystemExit):
        cost_model.main()
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
