"""Of two configurations of which one can only have more to do that one takes no less time, whatever the sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster
from autopar.pipeline.units import Unit
from benchmarks.costmodel.predict import Place, Setup, Software, UnitTime, predict, step
from tests.helpers.examples import examples

CLUSTER = Cluster.parse("h100:8x8")
SCHEDULES = (
    ("", 1),
    ("", 2),
    ("interleaved_zero_bubble", 1),
    ("interleaved_zero_bubble", 2),
    ("zbv_zero_bubble", 2),
    ("dualpipev", 2),
)
ANOMALY = 0.01
"""Places that run their actions in a given order may end later where one action is shorter (R. L. Graham, Bounds on
multiprocessing timing anomalies, 1969)."""


@st.composite
def units(draw: st.DrawFn) -> UnitTime:
    """Some milliseconds, with parts of them."""
    forward, back, share = draw(st.floats(1e-4, 1e-2)), draw(st.floats(1.0, 3.0)), st.floats(0.0, 0.3)
    return UnitTime(
        forward,
        forward * back,
        forward * draw(share),
        forward * draw(share),
        attention_s=forward * draw(share),
        mlp_s=forward * draw(share),
        last_s=forward * draw(share),
        weights_s=forward * back * draw(share),
        operators=draw(st.integers(0, 200)),
        parameters=(size := draw(st.sampled_from((1e5, 1e7, 1e9)))),
        trained=size,
    )


@st.composite
def places(draw: st.DrawFn) -> Place:
    return Place(
        (Unit("embedding"), Unit("blocks", 0), Unit("blocks", 1), Unit("head")),
        {name: draw(units()) for name in ("embedding", "blocks", "head")},
        draw(st.sampled_from((1e4, 1e6, 1e8))),
        CLUSTER.mesh((8, 8)),
    )


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """On 32 ranks; as many microbatches as any schedule runs."""
    pp, (schedule, vpp) = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from(SCHEDULES))
    software = Software(
        overlap_gradients=draw(st.booleans()),
        captured=draw(st.booleans()),
        shard_bytes=draw(st.sampled_from((0.0, 16.0))),
        stops_early=draw(st.booleans()),
    )
    return Setup(
        1,
        pp * draw(st.integers(2, 9)),
        1024,
        tp=2,
        dp=16 // pp,
        pp=pp,
        vpp=vpp if pp > 1 else 1,
        schedule=schedule if pp > 1 else "",
        zero=draw(st.integers(0, 3)),
        software=software,
    )


@examples(60)
@given(places(), setups(), st.integers(1, 3))
def test_more_to_do_takes_no_less(place: Place, setup: Setup, times: int) -> None:
    layers = setup.pp * setup.vpp * times
    base = predict(place, layers, setup, CLUSTER)
    assert min(vars(base).values()) >= -1e-9 * base.step_s, base
    device, (outer, inner) = CLUSTER.device, CLUSTER.levels
    slower = (
        replace(CLUSTER, device=replace(device, memory_bandwidth_bytes_s=device.memory_bandwidth_bytes_s / 2)),
        replace(CLUSTER, device=replace(device, dispatch_s=2 * device.dispatch_s)),
        replace(CLUSTER, levels=(replace(outer, bandwidth_bytes_s=outer.bandwidth_bytes_s / 2), inner)),
        replace(CLUSTER, levels=(outer, replace(inner, bandwidth_bytes_s=inner.bandwidth_bytes_s / 2))),
    )
    more = [predict(place, layers, setup, cluster) for cluster in slower]
    more += [
        predict(place, layers, replace(setup, recompute=how, parts=("attention", "mlp")), CLUSTER)
        for how in ("selective", "full")
    ]
    more += [
        predict(place, layers, replace(setup, microbatches=setup.microbatches + setup.pp), CLUSTER),
        predict(place, layers + setup.pp * setup.vpp, setup, CLUSTER),
    ]
    assert min(other.step_s for other in more) >= base.step_s * (1 - ANOMALY * (setup.pp > 1))


@pytest.mark.parametrize("schedule, vpp", SCHEDULES)
@pytest.mark.parametrize("pp, microbatches", [(2, 36), (2, 37), (4, 37), (4, 40)])
def test_many_microbatches_take_what_the_schedule_takes(
    monkeypatch: pytest.MonkeyPatch, schedule: str, vpp: int, pp: int, microbatches: int
) -> None:
    """Of many a few are looked at. Where the last round of these makes up for what was idle in the first ones, busy
    places had less time for all others than their work takes."""
    times = {
        "embedding": UnitTime(4e-3, 4e-3, weights_s=1e-3),
        "blocks": UnitTime(4e-3, 4e-3, weights_s=5e-4),
        "head": UnitTime(4e-3, 2e-3),
    }
    place = Place(
        (Unit("embedding"), Unit("blocks", 0), Unit("blocks", 1), Unit("head")), times, 1e6, CLUSTER.mesh((8, 8))
    )
    setup = Setup(1, microbatches, 1024, pp=pp, vpp=vpp, schedule=schedule)
    found = predict(place, pp * vpp, setup, CLUSTER)
    assert found.pipeline_s >= 0
    if microbatches % pp == 0:  # torch lays out the whole schedule
        monkeypatch.setattr(step, "ROUNDS", microbatches)
        assert found.step_s == pytest.approx(predict(place, pp * vpp, setup, CLUSTER).step_s, rel=0.005)


def test_schedules_in_a_v_run_any_number_of_microbatches() -> None:
    """Nine on four places were refused with a word about four, from which they were to be extrapolated."""
    place = Place(
        (Unit("blocks", 0), Unit("blocks", 1)),
        {"blocks": UnitTime(1e-3, 2e-3, weights_s=1e-3)},
        1e6,
        CLUSTER.mesh((8, 8)),
    )
    eight, nine, ten = (
        predict(place, 8, Setup(1, n, 1024, pp=4, vpp=2, schedule="dualpipev"), CLUSTER).step_s for n in (8, 9, 10)
    )
    assert eight < nine < ten
