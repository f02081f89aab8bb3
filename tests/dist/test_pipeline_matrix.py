"""Pipelines by schedule, places, mesh of a place and what is run again: the matrix of `python -m benchmarks.verify
--pipelines`."""

from __future__ import annotations

import pytest

from tests.helpers.matrix import PIPED, PLACES, Piped, pipelines
from tests.helpers.verify import FROZEN, right

FAST = [
    Piped("hf-gpt2", "pp2 x dp2 x zero1", "interleaved_1f1b", "selective"),
    Piped("hf-t5", "pp4", "1f1b", "full"),
    Piped(f"hf-resnet{FROZEN}", "pp2", "zbv_zero_bubble", "none"),
    Piped("hf-llama-deep", "pp2 x tp2 x zero3", "1f1b", "full"),
]
ALL = pipelines()


@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in ALL if case not in FAST)], ids=str
)
def test_equals_one_device(case: Piped) -> None:
    right(case.run())


def test_the_matrix_has_every_model_and_shape() -> None:
    assert (
        {case.model for case in ALL} == set(PIPED)
        and {case.shape for case in ALL} == set(PLACES)
        and set(FAST) <= set(ALL)
    )
