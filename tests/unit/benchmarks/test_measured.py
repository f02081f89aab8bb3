"""The measured comparison: what it counts, and that its plans are what they say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.calibrate.samples import Sample
from benchmarks.measured import MODELS, Row, middle, ordered, show, twelve


def row(measured_s: float, predicted_s: float | None) -> Row:
    return Row("gpt tp", "4", predicted_s, predicted_s or 1.0, (measured_s, 0.5 * measured_s, 9 * measured_s))


def test_pairs_in_the_right_order() -> None:
    rows = [row(1.0, 1.1), row(2.0, 1.9), row(3.0, 1.5)]
    assert ordered(rows, [1.1, 1.9, 1.5]) == pytest.approx(2 / 3)
    assert ordered(rows, [3.0, 2.0, 1.0]) == 0.0 and ordered(rows, [1.0, 2.0, 3.0]) == 1.0
    assert rows[0].measured_s == 1.0 and rows[1].error(1.9) == pytest.approx(-0.05)


def test_a_plan_without_a_price_is_left_out_of_the_priced(capsys: pytest.CaptureFixture[str]) -> None:
    show([row(1.0, 1.1), row(2.0, None), row(3.0, 3.9)])
    said = capsys.readouterr().out
    assert (
        "priced: mean error 20.0 %, worst 30.0 %, 1 of 2 within 15 %; 100.0 % of pairs" in said
        and "of 3 within" in said
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_twelve_plans_of_all_kinds(ranks: int) -> None:
    plans = twelve(ranks)
    assert len(plans) == len(set(plans)) == 12 and {case.model for case in plans} == set(MODELS)
    assert {case.recipe for case in plans} >= {
        "ddp",
        "zero3",
        "tp",
        "1f1b",
        "gpipe",
        "tp_zero3" if ranks == 4 else "tp_sp",
    }
    assert all(math.prod(case.mesh) == ranks for case in plans if case.mesh)


def test_several_passes_count_by_their_median() -> None:
    one = [(-1, Sample("copy", (nbytes,), 1e-9 * nbytes)) for nbytes in (10, 20)]
    one += [(0, Sample("all_reduce", (10,), 1e-3, members)) for members in (2, 4)]
    slow = [(level, replace(sample, seconds=50 * sample.seconds)) for level, sample in one]
    assert middle([one, slow, one]) == one
