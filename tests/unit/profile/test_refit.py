"""A refit: what took twice as long as predicted is priced twice as high, what was predicted right stays."""

from __future__ import annotations

import dataclasses

import pytest

from autopar import joint
from autopar.calibrate.fit_level import limit_bytes_s
from autopar.cluster import Cluster
from autopar.cost.comm import collective_s
from autopar.plan import Plan
from autopar.planner import Request
from autopar.problem.read_graph import read
from autopar.profile import Profile, Row, refit
from autopar.profile.predicted import predicted, starts
from autopar.profile.profile import _rows
from autopar.profile.refit import _group, _level
from tests.helpers.planned import BATCH, graph


def profile(times: dict[str, float]) -> tuple[Cluster, dict[str, float], Cluster]:
    """The cluster refitted to a profile in which rows of some kinds took longer; the ratios; the cluster before."""
    cluster = Cluster.parse("cpu:1x4")
    plan = joint.plan(
        graph(), {"b": BATCH}, Request(cluster, recipe="tp", time_limit_s=10.0), model="stack", graph_hash="0" * 64
    )
    foreseen = predicted(graph(), plan)
    rows = [
        dataclasses.replace(row, measured_s=row.predicted_s * times.get(row.what, 1.0))
        for row in _rows(plan, 0, {}, foreseen, {})
    ]
    assert all(isinstance(row, Row) for row in rows) and sum(foreseen.values()) == pytest.approx(
        plan.predicted.step_s, rel=0.03
    )
    found = Profile("stack", "cpu", 1.0, 1.0, plan.predicted.step_s, 0.0, tuple(rows))
    return *refit(cluster, plan, read(graph(), plan.hints, training=True), found, "2026-11-21"), cluster


def test_what_was_right_stays() -> None:
    made, ratios, cluster = profile({})
    assert all(ratio == pytest.approx(1.0) for ratio in ratios.values())
    assert made.device.peak_flops["float32"] == pytest.approx(cluster.device.peak_flops["float32"])


def test_slow_collectives_and_a_slow_optimizer() -> None:
    made, ratios, cluster = profile({"collective": 2.0, "gradients": 2.0, "optimizer": 3.0})
    assert (
        ratios["all_reduce"] == pytest.approx(2.0)
        and ratios["optimizer"] == pytest.approx(3.0)
        and ratios["matmul"] == pytest.approx(1.0)
    )
    for nbytes in (1e3, 1e7):
        slow, before = (collective_s("all_reduce", nbytes, c.mesh((1, 4)).axes[1]) for c in (made, cluster))
        assert slow == pytest.approx(2 * before)
        assert collective_s("broadcast", nbytes, made.mesh((1, 4)).axes[1]) == collective_s(
            "broadcast", nbytes, cluster.mesh((1, 4)).axes[1]
        )
    assert made.device.update == pytest.approx(1 / 3) and made.device.sources["update"].startswith(
        "refitted 2026-11-21"
    )


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.8])
def test_fast_collectives(ratio: float) -> None:
    made, ratios, cluster = profile({"collective": ratio, "gradients": ratio})
    assert ratios["all_reduce"] == pytest.approx(ratio)
    for kind, share in (("all_reduce", ratio), ("broadcast", 1.0), ("all_to_all", 1.0)):
        for nbytes in (1e3, 1e7):
            after, before = (collective_s(kind, nbytes, c.mesh((1, 4)).axes[1]) for c in (made, cluster))
            assert after == pytest.approx(share * before), (kind, nbytes)


def test_collectives_are_no_faster_than_the_links_of_a_gpu() -> None:
    cluster = Cluster.parse("h100:1x8")
    made = _level(cluster.levels[1], {"all_gather": 0.1}, "refitted", limit_bytes_s(cluster.device, cluster.levels[1]))
    assert made.bandwidth_bytes_s == cluster.levels[1].bandwidth_bytes_s
    assert max(p.efficiency for p in made.protocols if p.serves("all_gather")) == 1.0


def test_nothing_is_scaled_beyond_reason() -> None:
    made, ratios, cluster = profile({"operator": 1000.0})
    assert ratios["matmul"] == 10.0 and made.device.peak_flops["float32"] == pytest.approx(
        cluster.device.peak_flops["float32"] / 10
    )


def again(cluster: Cluster, real: Cluster, times: int = 1) -> Cluster:
    """`cluster` refitted so many times to a profile of a plan on the `real` one."""
    for _ in range(times):
        plan = joint.plan(
            graph(), {"b": BATCH}, Request(cluster, recipe="ddp", time_limit_s=10.0), model="stack", graph_hash="0" * 64
        )
        ran = predicted(graph(), dataclasses.replace(plan, cluster=real.to_dict()))
        found = Profile(
            "stack",
            "cpu",
            1.0,
            1.0,
            1.0,
            0.0,
            tuple(_rows(plan, 0, ran, predicted(graph(), plan), starts(graph(), plan))),
        )
        cluster, _ = refit(cluster, plan, read(graph(), plan.hints, training=True), found, "2026-11-21")
    return cluster


def device(**change: object) -> Cluster:
    cluster = Cluster.parse("cpu:1x4")
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, **change))  # type: ignore[arg-type]  # fields by name


def test_the_peak_is_not_to_blame_for_starts() -> None:
    """Operators start five times as fast as was thought, and small matmuls do little else: their peak was taken for
    three times as high."""
    thought, real = device(launch_s=5e-2), device(launch_s=1e-2)
    made = again(thought, real, 2)
    assert made.device.peak_flops["float32"] == pytest.approx(
        real.device.peak_flops["float32"], rel=0.05
    ) and made.device.launch_s == pytest.approx(real.device.launch_s, rel=0.2)


@pytest.mark.parametrize(("measured_s", "ratio"), [(2.0, 1.0), (4.4, 1.0), (5.0, 5.0)])
def test_starts_that_are_more_than_what_was_measured_say_nothing_of_the_peak(measured_s: float, ratio: float) -> None:
    """What is left of matmuls beside starts as slow as those of other operators would be less than nothing, and the
    peak ten times as high."""
    cluster = Cluster.parse("cpu:1x4")
    plan = joint.plan(
        graph(), {"b": BATCH}, Request(cluster, recipe="ddp", time_limit_s=10.0), model="stack", graph_hash="0" * 64
    )
    program = read(graph(), plan.hints, training=True)
    names = {_group(Row(0, "operator", name, 1.0, 1.0, ("op", name)), program): name for name in predicted_ops(plan)}
    matmul, other = (("op", names[group]) for group in ("matmul", "other"))
    rows = _rows(plan, 0, {matmul: measured_s, other: 5.0}, {matmul: 1.0, other: 1.0}, {matmul: 0.45, other: 0.45})
    made, ratios = refit(cluster, plan, program, Profile("stack", "cpu", 1.0, 1.0, 1.0, 0.0, tuple(rows)), "2026-11-21")
    assert ratios["other"] == 5.0 and ratios["matmul"] == pytest.approx(ratio)
    assert made.device.peak_flops["float32"] == pytest.approx(cluster.device.peak_flops["float32"] / ratio)


def predicted_ops(plan: Plan) -> list[str]:
    """The operators of which something is predicted."""
    return [str(key[1]) for key in predicted(graph(), plan) if key[0] == "op"]


def test_a_slow_peak_is_found_beside_starts() -> None:
    thought = device(launch_s=1e-7)
    slow = dataclasses.replace(
        thought,
        device=dataclasses.replace(thought.device, peak_flops={k: v / 4 for k, v in thought.device.peak_flops.items()}),
    )
    assert again(thought, slow).device.peak_flops["float32"] == pytest.approx(
        slow.device.peak_flops["float32"], rel=0.1
    )


def test_bytes_of_a_collective_have_a_unit_of_their_size() -> None:
    plan = joint.plan(
        graph(),
        {"b": BATCH},
        Request(Cluster.parse("cpu:1x4"), recipe="tp", time_limit_s=10.0),
        model="stack",
        graph_hash="0" * 64,
    )
    keys = [("all_reduce", 0, nbytes) for nbytes in (4, 3072, 33_550_000)]
    assert [row.name for row in _rows(plan, 0, dict.fromkeys(keys, 1.0), {}, {})] == [
        f"all-reduce on {plan.axes[0]}, {said}" for said in ("4 B", "3.07 kB", "33.5 MB")
    ]
