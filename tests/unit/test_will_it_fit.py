"""Will it fit: a row per strategy, and sizes up to which it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest

from autopar import onestage, will_it_fit
from autopar.cli.fitting import LOOKED_AT, _size
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.problem.remat import levels
from autopar.request import Request
from autopar.will_it_fit import LARGEST, ROUNDS, Row, Survey, _runs
from tests.helpers.kinds import two_kinds
from tests.helpers.planned import graph
from tests.helpers.verify import Subject, subject


def survey(memory_bytes: int = 1 << 22) -> Survey:
    """The tiny model on two CPU ranks with little memory."""
    cluster = Cluster.parse("cpu:1x2")
    small = replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes))
    who = subject("gpt")
    return Survey(who.captured.gm, who.captured.hints, Request(small), {"s": 64})


@cache
def row_of(name: str) -> Row:
    """That of one strategy."""
    return next(row for row in survey().rows(() if name == "one device" else (name,)) if row.name == name)


def test_there_is_a_row_for_each() -> None:
    rows = {row.name: row for row in survey().rows(["ddp", "zero3", "megatron", "1f1b"])}
    assert list(rows) == ["one device", "ddp", "zero3", "megatron", "1f1b"]
    assert all(row.prediction is not None for row in rows.values())
    one, ddp, zero3 = (rows[name].prediction for name in ("one device", "ddp", "zero3"))
    assert one and ddp and zero3
    assert zero3.fullest.rest["weights"] < ddp.fullest.rest["weights"] == one.fullest.rest["weights"]
    assert ddp.fullest.activations_bytes == pytest.approx(one.fullest.activations_bytes / 2, rel=0.02)


def test_a_pipeline_for_which_time_was_up_at_first_has_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine 4 s were over before anything was priced: the row said that it does not fit, and the note to
    try a longer time limit, which the command has not."""
    monkeypatch.setattr(will_it_fit, "PIPELINE_SOLVE_S", 1e-6)
    row = next(row for row in survey().rows(["1f1b"]) if row.name == "1f1b")
    assert row.prediction is not None and not row.why


def test_blocks_that_keep_different_results_are_walked_in_their_parts() -> None:
    """The plan has no whole run of blocks any more."""
    surveys = (
        Survey(graph(6), {"b": 8192}, Request(Cluster.parse("cpu:1x4"), memory_bytes=nbytes * 1e6))
        for nbytes in sorted(range(252, 300, 6), key=lambda nbytes: abs(nbytes - 270))  # the first one is mostly such
    )
    rows = ((here, row) for here in surveys for row in here.rows(["megatron"]) if row.name == "megatron")
    here, row = next((here, row) for here, row in rows if row.plan is not None and row.plan.parted)
    assert row.plan is not None and row.fits
    size, step = row.largest["b"], here._step(row.plan, "b")
    again = replace(row.plan, remat=dict.fromkeys(row.plan.remat, ()))
    assert size > 8192 and here.predicted(again, b=size).peak_bytes <= row.limit_bytes
    assert here.predicted(again, b=size + step).peak_bytes > row.limit_bytes


@pytest.mark.parametrize("name", ["one device", "ddp", "zero3", "megatron"])
def test_the_largest_sizes_fit_and_the_next_ones_do_not(name: str) -> None:
    row, here = row_of(name), survey()
    assert row.plan is not None and row.fits == (row.largest["b"] >= 8)
    again = replace(row.plan, remat=levels(here._program(here.hints, {}), "full"))

    def peak(**sizes: int) -> float:
        """The least of the plan and of the same with all blocks run again."""
        return min(here.predicted(plan, **sizes).peak_bytes for plan in (row.plan, again))

    for symbol, step, most in (("b", here._step(row.plan, "b"), 1 << 22), ("s", here._step(row.plan, "s"), 64)):
        size = row.largest[symbol]
        assert size == 0 or peak(**{symbol: size}) <= row.limit_bytes
        assert size + step > most or peak(**{symbol: size + step}) > row.limit_bytes


@pytest.mark.parametrize("name", ["ddp", "zero3", "megatron"])
def test_a_strategy_fits_where_compile_finds_that_it_does(name: str) -> None:
    """With blocks run again where nothing else fits, and not where a level of it is asked for."""
    who, seen = subject("gpt"), set[tuple[bool, bool]]()
    for memory_bytes in (12 << 20, 6 << 20, 1 << 20):
        here = survey(memory_bytes)
        here.hints = {**here.hints, "b": 64}
        row = next(row for row in here.rows([name]) if row.name == name)
        assert row.fits == _compiles(replace(here.request, recipe=name, time_limit_s=5.0), who, here.hints), (
            memory_bytes
        )
        seen.add((row.fits, bool(row.plan.remat)))
        plain = Survey(here.gm, here.hints, replace(here.request, remat="none"))
        assert not any(row.plan.remat for row in plain.rows([name]))
    assert {(True, False), (True, True)} <= seen and any(not fits for fits, _ in seen)


def _compiles(request: Request, who: Subject, hints: Mapping[str, int]) -> bool:
    try:
        onestage.plan(who.captured.gm, hints, request)
    except InfeasibleError:
        return False
    return True


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_the_largest_sizes_of_a_pipeline_have_as_many_microbatches_as_they_want(name: str) -> None:
    here = survey()
    row = row_of(name)
    plan, level = row.plan, levels(here._program(here.hints, {}), "full")
    assert plan is not None and plan.remat == {}

    def peak(**sizes: int) -> float:
        """The least that any number of microbatches takes, with blocks run again."""
        batch, again = {**here.hints, **sizes}["b"], replace(plan, remat=level)
        plans = [replace(again, microbatches=n) for n in range(2, batch + 1) if batch % n == 0 and _runs(again, n)]
        return min(here.predicted(each, **sizes).peak_bytes for each in plans)

    step, size = here._step(plan, "s"), row.largest["s"]
    assert peak(s=size) <= row.limit_bytes < here.predicted(plan, s=size).peak_bytes
    assert peak(s=size + step) > row.limit_bytes
    step, size = here._microbatch_step(plan), row.largest["b"]
    # keeps all microbatches; the others have room for any number, until the inputs of the batch fill the memory
    if name == "gpipe":
        assert (
            peak(b=size) <= row.limit_bytes < here.predicted(plan, b=size).peak_bytes
            and peak(b=size + step) > row.limit_bytes
        )
    else:
        assert size >= 2 * ROUNDS


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_what_fits_when_it_is_planned_is_no_larger_than_the_largest(name: str) -> None:
    largest = row_of(name).largest
    for symbol, sizes in {"b": (16, 24, 40), "s": (32, 48, 64)}.items():
        for size in sizes:
            here = survey()
            here.hints = {**here.hints, symbol: size}
            assert size <= largest[symbol] or not any(row.fits for row in here.rows([name]) if row.name == name), (
                symbol,
                size,
            )


def test_what_does_not_fit_is_shown_as_its_plan_of_least_memory() -> None:
    row = next(row for row in survey(1 << 20).rows(["ddp"]) if row.name == "ddp")
    assert not row.fits and row.prediction is not None and row.prediction.peak_bytes > row.limit_bytes
    assert row.largest["b"] < 8


def test_each_place_has_its_own_memory() -> None:
    """On two kinds of devices: with as much as its plan takes on the fuller one there, a pipeline fits, with less it
    does not."""
    who = subject("gpt")

    def row(small: float) -> Row:
        here = Survey(who.captured.gm, who.captured.hints, Request(two_kinds("cpu:1x1", 1.5, small)))
        return next(row for row in here.rows(["1f1b"]) if row.name == "1f1b")

    roomy = row(1.0)
    assert roomy.fits and roomy.plan is not None and roomy.place is not None and roomy.prediction is not None
    tight = row(2.5e-4)  # the least that a cluster may say
    assert tight.place is not None and tight.limit_bytes < roomy.limit_bytes
    assert tight.fits == all(
        place.peak_bytes <= limit for place, limit in zip(tight.prediction.places, _limits(tight), strict=True)
    )


def _limits(row: Row) -> list[int]:
    at = Cluster.from_dict(dict(row.plan.cluster)).places(row.plan.places, row.plan.mesh)
    return [at.device(place).usable_memory_bytes for place in range(row.plan.places)]


def test_recipes_of_the_host_have_rows_where_hosts_are_known() -> None:
    """Less on the device, some on the host; what is there fits if both do."""
    who = subject("gpt")

    def rows(cluster: Cluster, *names: str) -> dict[str, Row]:
        return {
            row.name: row
            for row in Survey(who.captured.gm, who.captured.hints, Request(cluster), {"s": 64}).rows(names)
        }

    gpus = Cluster.parse("h100:1x2")
    found = rows(gpus, "zero1", "optimizer_offload", "zero_offload")
    peaks = [found[name].prediction.peak_bytes for name in ("zero1", "optimizer_offload", "zero_offload")]
    assert peaks[0] > peaks[1] > peaks[2] and all(row.fits for row in found.values())
    assert (
        0 == found["zero1"].host_bytes < found["optimizer_offload"].host_bytes == found["zero_offload"].host_bytes / 2
    )
    small = replace(gpus, device=replace(gpus.device, host_memory_bytes=1000))
    full = rows(small, "zero_offload")["zero_offload"]
    assert not full.fits and set(full.largest.values()) == {0}, "no size takes less of the host"
    unknown = replace(gpus, device=replace(gpus.device, host_memory_bytes=0))
    assert "needs to know the hosts" in rows(unknown, "zero_offload")["zero_offload"].why
    assert Survey(who.captured.gm, who.captured.hints, Request(gpus))._has_hosts
    assert not Survey(who.captured.gm, who.captured.hints, Request(unknown))._has_hosts


def test_sizes_that_are_not_looked_at_are_no_largest_ones() -> None:
    assert (
        LOOKED_AT < LARGEST
        and _size(LARGEST, None) == "over 4000000"
        and _size(LARGEST, LARGEST) == f"{LARGEST} (all positions)"
    )
    assert (_size(2838597, None), _size(0, None)) == ("2838597", "none")


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(PlanError, match="unknown recipe 'fast'"):
        list(survey().rows(["fast"]))


def test_a_strategy_that_the_model_has_nothing_for_says_so() -> None:
    (row,) = [row for row in survey().rows(("ep",)) if row.name == "ep"]
    assert row.plan is None and "needs experts" in row.why
