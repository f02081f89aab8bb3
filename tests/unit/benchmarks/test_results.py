"""Tables of results: what is not known is shown as such, errors and groups are counted right."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.memory import Entry
from autopar.memory import Place as Held
from autopar.memory import Prediction as Prediction_
from benchmarks.costmodel.config import Config
from benchmarks.costmodel.predict import Prediction, Setup
from benchmarks.costmodel.results import (
    Result,
    as_json,
    explained,
    memory_summary,
    memory_text,
    summary,
    summary_text,
    worst_text,
)
from benchmarks.costmodel.rows import Peak, Row

ROW = Row(
    "one", "somebody", Config(), Setup(1, 4, 128), Cluster.parse("l4:1x1"), "float16", 1.0, group=(1,), remarks=("odd",)
)


def result(predicted_s: float, measured_s: float | None, name: str = "one", group: tuple[object, ...] = (1,)) -> Result:
    parts = Prediction(predicted_s, *[0.0] * 7)
    return Result(replace(ROW, name=name, step_s=measured_s, group=group), parts)


def test_a_source_is_summed_up() -> None:
    results = [result(1.1, 1.0, "a"), result(1.8, 2.0, "b"), result(5.0, 3.0, "c"), result(1.0, None, "d")]
    (line,) = summary(results)
    assert line["rows"] == 4 and line["groups"] == 1
    assert line["MAE %"] == pytest.approx(100 * (0.1 + 0.1 + 2 / 3) / 3)
    assert line["> 35 %"] == 1 and line["tau in groups"] == pytest.approx(1.0) and line["regret %"] == 0


def test_unknown_columns_are_left_out_and_unknown_cells_marked() -> None:
    text = summary_text([result(1.0, 1.0, group=()), replace(result(1.0, 1.0), row=replace(ROW, source="other"))])
    assert "memory" not in text and "tau in groups" not in text


def test_peaks_are_compared_like_with_like() -> None:
    places = tuple(
        Held(n, (n,), "", (Entry("weights", "w", "", nbytes),), {}, (), (), {})
        for n, nbytes in enumerate((80.0, 120.0))
    )
    peaks = (Peak(100.0, "allocated"), Peak(100.0, "allocated", 0), Peak(150.0, "reserved", -1))
    one = result(1.0, 1.0)
    found = [replace(one, row=replace(one.row, peaks=peaks), held=Prediction_(places)), result(1.0, 1.0, "without")]
    lines = {(line["counted"], line["source"]): line for line in memory_summary(found)}
    assert lines["allocated", "somebody"]["MAE %"] == pytest.approx(20.0) and lines["allocated", "all"][
        "bias %"
    ] == pytest.approx(0.0)
    assert lines["reserved", "all"]["peaks"] == 1 and lines["reserved", "all"]["worst %"] == pytest.approx(-20.0)
    assert "allocated" in memory_text(found) and "measured 0.00 GiB" in explained(found[0])
    assert as_json(found, [])["rows"][0]["peaks"][2] == {
        "place": -1,
        "kind": "reserved",
        "measured_bytes": 150.0,
        "predicted_bytes": 120.0,
    }


def test_rows_beyond_are_all_listed() -> None:
    results = [result(1.0 + i, 1.0, str(i)) for i in range(5)]
    text = worst_text(results, 1)
    assert text.count("somebody") == 4 and "odd" in text  # four of them beyond 35 %


def test_parts_are_explained_and_json_is_json() -> None:
    assert "(+10.0 %)" in explained(result(1.1, 1.0))
    assert json.loads(json.dumps(as_json([result(1.1, None)], ["x: y"])))["rows"][0]["measured_s"] is None
