"""Weights and gradients that rest cut over data-parallel ranks: how often they are gathered and scattered."""

from __future__ import annotations

import pytest

from benchmarks.costmodel.predict import Software
from tests.unit.benchmarks.predict.test_step import step


def test_shards_are_waited_for_where_nothing_overlaps() -> None:
    apart, hidden = (step(zero=3, software=Software(overlap_gradients=overlap)) for overlap in (False, True))
    assert apart.shards_s > hidden.shards_s and apart.compute_s == hidden.compute_s


def test_gradients_that_rest_cut_are_scattered_after_every_microbatch() -> None:
    """With ZeRO-2 they were once per step, as with ZeRO-1, where a rank has whole ones in between."""
    alone = {"pp": 1, "dp": 8, "software": Software(overlap_gradients=False)}
    one, four, eight = (step(zero=2, microbatches=m, **alone) for m in (1, 4, 8))
    assert one == step(zero=1, microbatches=1, **alone) and four.shards_s > 0
    assert eight.shards_s == pytest.approx(2 * four.shards_s) and eight.sync_s == four.sync_s < one.sync_s
    assert four.shards_s == pytest.approx(
        4 * (one.sync_s - four.sync_s), rel=0.2
    )  # units apart have starts of their own
    assert step(zero=2).shards_s == 0  # places of a pipeline have whole ones


def test_stages_may_gather_once() -> None:
    """Weights that rest cut were gathered for each microbatch, and their gradients scattered, whatever the software
    does. On one place nothing changes."""
    each, once = (step(zero=3, software=Software(gathers_once=on, overlap_gradients=False)) for on in (False, True))
    more = step(zero=3, microbatches=16, software=Software(gathers_once=True, overlap_gradients=False))
    assert each.shards_s > 0 == once.shards_s == more.shards_s and 0 < once.sync_s == more.sync_s < each.shards_s
    assert once.step_s < each.step_s and once.optimizer_s == each.optimizer_s
    alone = [step(pp=1, dp=8, zero=3, software=Software(gathers_once=on)) for on in (False, True)]
    assert alone[0] == alone[1]


def test_gradients_may_be_scattered_behind_the_last_microbatch() -> None:
    """As without synchronisation: weights are gathered for each, gradients scattered once."""
    each, last = (
        step(pp=1, dp=8, zero=3, microbatches=4, software=Software(sums_last=on, overlap_gradients=False))
        for on in (False, True)
    )
    assert each.sync_s < last.sync_s and last.shards_s < each.shards_s
    assert each.shards_s - last.shards_s == pytest.approx(4 * (last.sync_s - each.sync_s), rel=0.2)
    alone = [step(pp=1, dp=8, zero=3, microbatches=1, software=Software(sums_last=on)) for on in (False, True)]
    assert alone[0] == alone[1]


def test_an_optimizer_on_the_host_waits_for_copies_and_its_memory() -> None:
    here, there = (step(pp=1, dp=8, zero=3, software=Software(hosted=on)) for on in (False, True))
    assert there.optimizer_s > 10 * here.optimizer_s and there.sync_s == here.sync_s
    short = step(pp=1, dp=8, zero=3, software=Software(hosted=True, optimizer_bytes=15.0))
    assert short.optimizer_s < there.optimizer_s
