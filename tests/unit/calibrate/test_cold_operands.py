"""Operands that come in turn: never those of the run before, all of one size valid, and results that are kept for a
while."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.calibrate.cold_operands import COLD_BYTES, Cold


@pytest.mark.parametrize("elements", [1, 100, 4096, 1 << 20, 1 << 23])
def test_a_tensor_does_not_share_memory_with_the_one_before(elements: int) -> None:
    cold = Cold("cpu")
    cold.next(3 * 5)  # somewhere in the middle
    for first, second in itertools.pairwise([cold.next(elements) for _ in range(8)]):
        assert first.numel() == second.numel() == elements
        apart = abs(first.data_ptr() - second.data_ptr())
        assert apart >= first.nbytes


def test_as_much_as_caches_hold_is_gone_over_before_memory_comes_again() -> None:
    cold, seen = Cold("cpu"), list[int]()
    while (at := cold.next(1 << 18).data_ptr()) not in seen:
        seen.append(at)
    assert len(seen) * (1 << 20) == COLD_BYTES["cpu"]


def test_results_are_kept_up_to_a_limit() -> None:
    cold = Cold("cpu")
    results = [cold.keep(torch.empty(1 << 18)) for _ in range(100)]
    assert cold.keep(torch.empty(1)).numel() == 1 and len(results) == 100
    assert COLD_BYTES["cpu"] - (1 << 20) <= cold._held <= COLD_BYTES["cpu"]


def test_tensors_have_the_dtype_and_the_shape_asked_for() -> None:
    made = Cold("cpu", torch.bfloat16).next(3, 7)
    assert made.dtype == torch.bfloat16 and made.shape == (3, 7) and bool(made.isfinite().all())
