"""A given configuration: parts add up, more work takes longer, devices are found where they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.cost.comm import collective_s
from autopar.errors import PlanError
from autopar.pipeline.units import Unit
from benchmarks.costmodel.predict import Layers, Place, Prediction, Setup, Software, UnitTime, predict
from benchmarks.costmodel.predict.owners import Owners, between, line
from benchmarks.costmodel.predict.step import largest_of

CLUSTER = Cluster.parse("a100-80:4x8")
PLACE = Place(
    (Unit("embedding"), Unit("blocks", 0), Unit("blocks", 1), Unit("head")),
    {
        "embedding": UnitTime(1e-4, 2e-4, parameters=1e6, trained=1e6),
        "head": UnitTime(3e-4, 6e-4, parameters=1e6, trained=1e6),
        "blocks": UnitTime(
            1e-3,
            2e-3,
            1e-4,
            1e-4,
            attention_s=2e-4,
            last_s=3e-4,
            operators=30,
            collectives=4,
            parameters=1e7,
            trained=1e7,
        ),
    },
    1e6,
    CLUSTER.mesh((4, 8)),
)
SETUP = Setup(1, 8, 1024, tp=2, dp=2, pp=4)


def step(**change: object) -> Prediction:
    return predict(PLACE, 8, replace(SETUP, **change), CLUSTER)  # type: ignore[arg-type]


def test_parts_add_up() -> None:
    found = step()
    assert found.step_s == pytest.approx(sum(vars(found).values())) and min(vars(found).values()) >= 0


@pytest.mark.parametrize(
    "change",
    [
        {"microbatches": 9},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"software": Software(overlap_gradients=False)},
        {"software": Software(optimizer_bytes=60.0)},
    ],
)
def test_more_work_takes_longer(change: dict[str, object]) -> None:
    assert step(**change).step_s > step().step_s


def test_what_hides_or_is_spread_takes_less() -> None:
    assert step(vpp=2).step_s < step().step_s
    assert step(zero=1).optimizer_s < step().optimizer_s
    assert step(software=Software(captured=True)).host_s == 0 < step().host_s
    assert step(software=Software(hidden_tensor=0.5)).tensor_s < step().tensor_s


def test_layers_of_experts_keep_the_host_busy() -> None:
    place = replace(PLACE, times={**PLACE.times, "blocks": replace(PLACE.times["blocks"], experts=1)})
    more = [
        predict(place, 8, replace(SETUP, software=Software(expert_calls=calls)), CLUSTER).host_s
        for calls in (0, 100, 200)
    ]
    assert more[0] == step().host_s < more[1] < more[2]
    assert step(software=Software(expert_calls=200)).host_s == step().host_s  # there are none


def test_the_host_issues_what_no_graph_holds() -> None:
    place = replace(PLACE, times={**PLACE.times, "blocks": replace(PLACE.times["blocks"], mlp_operators=5)})
    all_of_it, rest, none = (
        predict(place, 8, replace(SETUP, software=software), CLUSTER).host_s
        for software in (Software(), Software(captured_mlp=True), Software(captured=True))
    )
    assert all_of_it == step().host_s > rest > none == 0


@pytest.mark.parametrize("ahead, back, under", [(2e-4, 4e-4, 6e-4), (8e-4, 1.2e-3, 1e-3)])
def test_tokens_go_to_experts_beside_another_microbatch(ahead: float, back: float, under: float) -> None:
    """Of 1 ms forward and 2 back some are for the way: where the rest is as long, what is left of it is the share of
    the compute units that it takes."""
    place = replace(
        PLACE, times={**PLACE.times, "blocks": replace(PLACE.times["blocks"], routed_s=ahead, routed_back_s=back)}
    )
    shown, hidden = (
        predict(
            place,
            8,
            replace(SETUP, software=Software(captured=True, hidden_tokens=share)),
            replace(CLUSTER, device=replace(CLUSTER.device, spread=0.0)),
        )
        for share in (0.0, 1.0)
    )
    assert shown.compute_s - hidden.compute_s == pytest.approx(8 * 2 * under * (1 - CLUSTER.device.contended))


def test_blocks_are_dealt_and_run_again_as_stated() -> None:
    even, uneven = step(blocks=(2, 2, 2, 2)), step(blocks=(1, 2, 4, 1))
    assert even == step() and uneven.step_s > even.step_s
    again = [step(recompute="full", again=(n,) * 4).recompute_s for n in (0, 1, 2)]
    assert again == pytest.approx([0.0, again[2] / 2, step(recompute="full").recompute_s])
    with pytest.raises(PlanError, match="wanted 8 in all"):
        step(blocks=(1, 1, 1, 1))


def test_only_ends_may_have_no_block() -> None:
    """Stages without anything were priced, as if a pipeline of fewer were one of more."""
    with pytest.raises(PlanError, match="pp 4 x vpp 4 are 16 stages for 8 layers; wanted a layer for each"):
        step(vpp=4)
    with pytest.raises(PlanError, match="wanted none without a block but the first stage"):
        step(blocks=(4, 0, 2, 2))
    ends, inner = step(blocks=(0, 4, 4, 0)), step(blocks=(2, 4, 2, 0))
    assert ends.compute_s == pytest.approx(inner.compute_s)  # of the fullest place, which has four in both


def test_layers_of_each_kind_are_where_they_are_in_the_model() -> None:
    layers, stages = Layers(9, leading=2), Setup(1, 8, 1024, pp=4).blocks_of(9)
    found = [layers.shares(["dense", "experts"], sum(stages[:at]), count) for at, count in enumerate(stages)]
    assert found == [
        {"dense": 2, "experts": 1},
        {"dense": 0, "experts": 2},
        {"dense": 0, "experts": 2},
        {"dense": 0, "experts": 2},
    ]
    assert Layers(6, period=2).shares(["pairs"], 1, 3) == {"pairs": 1.5} and Layers(6).shares(["a", "b"], 0, 3) == {
        "a": 1.5,
        "b": 1.5,
    }


def test_leading_layers_slow_the_first_stage_alone() -> None:
    slow = replace(
        PLACE,
        order=(Unit("embedding"), *(Unit("slow", number) for number in range(3)), Unit("blocks", 0), Unit("head")),
        times={**PLACE.times, "slow": PLACE.times["blocks"].scaled(2.0)},
    )
    setup = replace(SETUP, software=Software(captured=True))  # the host is not in the way
    plain, one, two = (
        predict(*model, setup, CLUSTER).compute_s
        for model in ((PLACE, 8), (slow, Layers(8, leading=1)), (slow, Layers(8, leading=2)))
    )
    # milliseconds of a microbatch: the fullest stage was the last one, with the head
    assert (one / plain, two / plain) == pytest.approx((9.3 / 6.9, 12.3 / 6.9), rel=0.05)


def test_what_runs_again_may_end_early_or_be_of_parts() -> None:
    whole, early = (step(recompute="full", software=Software(stops_early=on)).recompute_s for on in (False, True))
    assert early == pytest.approx(0.7 * whole)
    assert step(recompute="selective", parts=("mlp",)).recompute_s == 0 < step(recompute="selective").recompute_s


def test_the_feed_forward_layer_may_run_again_alone() -> None:
    """Of a block of 1 ms 0.5 are of it; of two pairs of collectives one is."""
    place = replace(PLACE, times={**PLACE.times, "blocks": replace(PLACE.times["blocks"], mlp_s=5e-4)})
    attention, both, mlp, whole, experts = (
        predict(place, 8, replace(SETUP, recompute=how, parts=parts, software=Software(captured=True)), CLUSTER)
        for how, parts in (
            ("selective", ("attention",)),
            ("selective", ("attention", "mlp")),
            ("selective", ("mlp",)),
            ("full", ()),
            ("selective", ("experts",)),
        )
    )
    assert mlp.recompute_s == pytest.approx(0.5 * whole.recompute_s) and both.recompute_s == pytest.approx(
        attention.recompute_s + mlp.recompute_s
    )
    assert mlp.tensor_s - attention.tensor_s == pytest.approx((whole.tensor_s - attention.tensor_s) / 2)
    assert experts.recompute_s == 0 and experts.step_s == pytest.approx(
        predict(place, 8, replace(SETUP, software=Software(captured=True)), CLUSTER).step_s
    )


def test_all_but_some_operators_may_run_again() -> None:
    """Of a block of 1 ms, 0.4 ms are of operators that are kept; of what tensor-parallel ranks send the gathers go
    again."""
    kept = replace(PLACE, times={**PLACE.times, "blocks": replace(PLACE.times["blocks"], kept_s=4e-4)})
    some, whole = (
        predict(kept, 8, replace(SETUP, recompute=how, parts=("operators",)), CLUSTER) for how in ("selective", "full")
    )
    assert some.recompute_s == pytest.approx(0.6 * whole.recompute_s)
    assert some.tensor_s - step().tensor_s == pytest.approx((whole.tensor_s - step().tensor_s) / 2)
    # of the 0.3 ms behind the end of a second run
    both = replace(kept, times={**kept.times, "blocks": replace(kept.times["blocks"], last_kept_s=2e-4)})
    early = predict(
        both,
        8,
        replace(SETUP, recompute="selective", parts=("operators",), software=Software(stops_early=True)),
        CLUSTER,
    )
    assert early.recompute_s == pytest.approx(0.5 * whole.recompute_s)


def test_fewer_bits_take_less_of_the_links_and_copies_take_memory() -> None:
    shards = [step(zero=3, software=Software(gathered_bytes=n)).step_s for n in (1, 2)]
    assert shards[0] < shards[1] < step(zero=3, software=Software(shard_bytes=16.0)).step_s
    assert step(software=Software(tensor_share=0.5)).tensor_s == pytest.approx(step().tensor_s / 2)
    updated = [step(zero=1, software=Software(gathered_bytes=n, overlap_gradients=False)).sync_s for n in (1, 2, 4)]
    assert updated[0] == updated[1] < updated[2]


def test_one_place_runs_its_microbatches_one_after_the_other() -> None:
    one, two = (predict(PLACE, 8, replace(SETUP, pp=1, dp=8, microbatches=n), CLUSTER) for n in (8, 16))
    assert one.pipeline_s == 0
    assert two.compute_s == pytest.approx(2 * one.compute_s)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 16, 37])
@pytest.mark.parametrize("vpp", [1, 2])
def test_a_pipeline_is_never_shorter_than_its_busiest_place_nor_than_one_microbatch(
    microbatches: int, vpp: int
) -> None:
    found = step(microbatches=microbatches, vpp=vpp)
    assert found.pipeline_s >= -1e-12
    assert found.step_s > 8 * (3e-3 + 2e-4)


def test_long_runs_go_on_as_they_began() -> None:
    few, more, most = (step(microbatches=n).step_s for n in (16, 20, 24))
    assert most - more == pytest.approx(more - few, rel=1e-6)


@pytest.mark.parametrize("vpp", [1, 2])
def test_each_filling_of_a_pipeline_waits_for_itself(vpp: int) -> None:
    """Of 16 microbatches in two fillings each is a run of 8: twice its bubble, and as much work."""
    one, two, short = (step(microbatches=n, flushes=times, vpp=vpp) for n, times in ((16, 1), (16, 2), (8, 1)))
    assert two.pipeline_s == pytest.approx(2 * short.pipeline_s) and two.pipeline_s > 1.5 * one.pipeline_s
    assert two.compute_s == pytest.approx(2 * short.compute_s) and two.sync_s == short.sync_s


@pytest.mark.parametrize(
    "schedule, vpp, bubble",
    [
        ("", 1, 9.0),
        ("interleaved_zero_bubble", 1, 3.0),
        ("", 2, 4.5),
        ("interleaved_zero_bubble", 2, 1.5),
        ("zbv_zero_bubble", 2, 1.5),
        ("dualpipev", 2, 1.5),
    ],
)
@pytest.mark.parametrize("microbatches", [8, 64, 66])
def test_gradients_of_weights_fill_bubbles(schedule: str, vpp: int, bubble: float, microbatches: int) -> None:
    """Blocks alone, with 1 s for each of forward, gradients of inputs, of weights, on four places: 1F1B leaves (p - 1)
    (f + b + w) idle, the first schedule of zero bubble (p - 1) (f + b - w) (https://arxiv.org/abs/2401.10241, table
    1)."""
    blocks = UnitTime(1.0, 2.0, weights_s=1.0)
    place = Place((Unit("blocks", 0), Unit("blocks", 1)), {"blocks": blocks}, 0.0, CLUSTER.mesh((4, 8)))
    setup = replace(SETUP, microbatches=microbatches, vpp=vpp, schedule=schedule, software=Software(captured=True))
    found = predict(place, 4 * vpp, setup, replace(CLUSTER, device=replace(CLUSTER.device, spread=0.0)))
    # sends take microseconds
    assert found.pipeline_s == pytest.approx(bubble * vpp, rel=1e-3) and found.compute_s == pytest.approx(
        3.0 * vpp * microbatches
    )


def test_axes_lie_where_their_neighbours_are() -> None:
    assert [(span.level.name, span.size) for span in line(CLUSTER, 1, 8).spans] == [("gpu", 8)]
    assert [(span.level.name, span.size) for span in line(CLUSTER, 2, 8).spans] == [("node", 2), ("gpu", 4)]
    assert [(span.level.name, span.size) for span in line(CLUSTER, 8, 4).spans] == [("node", 4)]
    assert line(CLUSTER, 1, 1).spans == ()


def test_stages_of_one_node_send_inside_it() -> None:
    """Eight places of four GPUs, two to a node: every second send leaves a node. All were priced as if they did."""
    places = line(CLUSTER, 4, 8)
    assert [[span.level.name for span in between(places, at, at + 1).spans] for at in range(3)] == [
        ["gpu"],
        ["node", "gpu"],
        ["gpu"],
    ]
    assert between(places, 7, 0).spans == places.spans and between(places, 3, 3).size == 1
    chain, setup = line(CLUSTER, 1, 16), replace(SETUP, tp=1, dp=1, pp=16, microbatches=1)
    free, wide = (predict(replace(PLACE, sent_bytes=nbytes), 16, setup, CLUSTER).pipeline_s for nbytes in (0.0, 1e9))
    starts, sends = (
        [collective_s("send", nbytes, between(chain, at, at + 1)) for at in range(15)] for nbytes in (0.0, 1e9)
    )
    # there and back
    assert sends.count(max(sends)) == 1 and wide - free == pytest.approx(2 * (sum(sends) - sum(starts)))


def test_the_slowest_of_more_is_slower() -> None:
    assert largest_of(1) == 0
    assert [round(largest_of(n), 1) for n in (2, 8, 64, 512)] == pytest.approx([0.56, 1.4, 2.4, 3.0], abs=0.25)


@pytest.mark.parametrize(
    "change, why",
    [
        ({"tp": 0}, "tp is 0"),
        ({"recompute": "some"}, "recompute is 'some'"),
        ({"zero": 4}, "zero is 4"),
        ({"ep": 3}, "a multiple of ep 3"),
        ({"ep": 3, "cp": 2, "experts_over_context": True}, "a multiple of cp 2, whose ranks"),
        ({"ep": 8, "cp": 2, "dp": 2, "experts_over_context": True}, "a multiple of ep 8 / cp 2"),
        ({"schedule": "gpipe"}, "schedule is 'gpipe'"),
        ({"flushes": 3}, "flushes is 3; wanted a number that 8 microbatches divide by"),
        ({"schedule": "dualpipev"}, "vpp is 1; wanted 2"),
        ({"ep": 8, "whole_experts": True}, "a multiple of ep 8 / tp 2"),
        ({"ep": 3, "whole_experts": True}, "a multiple of tp 2, whose ranks have experts of their own"),
    ],
)
def test_setups_that_make_no_sense(change: dict[str, object], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        replace(SETUP, **change)  # type: ignore[arg-type]


def test_a_cluster_has_as_many_devices_as_there_are_ranks() -> None:
    with pytest.raises(PlanError, match=r"tp 2 x cp 1 x dp 8 x pp 4 are 64 ranks on the 32 devices of a100-80:4x8"):
        step(dp=8)


def test_frozen_weights_are_gathered_and_neither_summed_nor_updated() -> None:
    frozen = replace(PLACE, times={name: replace(time, trained=0.0) for name, time in PLACE.times.items()})
    for zero in (0, 1, 3):
        setup = replace(SETUP, zero=zero)
        all_of_it, none = predict(PLACE, 8, setup, CLUSTER), predict(frozen, 8, setup, CLUSTER)
        assert none.sync_s == none.optimizer_s == 0 < all_of_it.optimizer_s and none.compute_s < all_of_it.compute_s
        assert (0 < none.shards_s < all_of_it.shards_s) if zero == 3 else none.shards_s == 0


def test_context_parallel_ranks_have_parts_of_the_shards_too() -> None:
    """The same ranks, dense weights alone: however they share the tokens, gathers, sums and the optimizer are of as
    many."""
    data, both, context = (
        step(pp=1, tp=1, zero=3, dp=32 // cp, cp=cp, software=Software(overlap_gradients=False)) for cp in (1, 4, 32)
    )
    assert data.shards_s > 0 and data.shards_s == pytest.approx(both.shards_s) == pytest.approx(context.shards_s)
    assert data.optimizer_s == pytest.approx(context.optimizer_s) and data.compute_s == pytest.approx(context.compute_s)


@pytest.mark.parametrize(
    "change, dense, stacked",
    [
        ({"dp": 16}, (16, 16, 1), (4, 4, 1)),
        ({"dp": 4}, (4, 4, 1), (1, 1, 1)),
        ({"dp": 16, "replicas": 2}, (16, 8, 2), (4, 2, 2)),
        ({"dp": 4, "cp": 4}, (16, 16, 1), (4, 4, 1)),
        ({"dp": 16, "replicas": 8}, (16, 2, 8), (4, 1, 4)),
        ({"dp": 4, "cp": 4, "experts_over_context": True}, (16, 16, 1), (4, 4, 1)),
        ({"dp": 2, "cp": 2, "experts_over_context": True}, (4, 4, 1), (1, 1, 1)),
    ],
)
def test_who_has_the_same_weights(change: dict[str, int], dense: tuple[int, ...], stacked: tuple[int, ...]) -> None:
    """Of 4 expert-parallel ranks each has other experts than the next."""
    setup = replace(SETUP, pp=1, ep=4, **change)
    for found, sizes in ((Owners.of_dense(CLUSTER, setup), dense), (Owners.of_experts(CLUSTER, setup), stacked)):
        assert (found.all.size, found.shards.size, found.copies.size) == sizes


def test_experts_without_copies_are_neither_gathered_nor_cut() -> None:
    routed = replace(PLACE.times["blocks"], parameters=5e9, trained=5e9, expert_parameters=5e9, expert_trained=5e9)
    place = replace(PLACE, times={**PLACE.times, "blocks": routed})
    software = Software(overlap_gradients=False, captured=True)
    alone, copied = (
        predict(place, 8, replace(SETUP, pp=1, dp=16, ep=ep, zero=3, microbatches=2, software=software), CLUSTER)
        for ep in (16, 8)
    )
    assert alone.shards_s < 0.1 * copied.shards_s and alone.optimizer_s == pytest.approx(
        2 * copied.optimizer_s, rel=0.01
    )


def test_copies_of_shards_sum_their_parts() -> None:
    """Of 16 ranks 4 next to each other have a quarter of each gradient, which the 4 nodes sum."""
    one, copies = (step(pp=1, dp=16, zero=3, replicas=n, software=Software(overlap_gradients=False)) for n in (1, 4))
    assert one.sync_s == 0 and copies.sync_s == pytest.approx(
        collective_s("all_reduce", 4 * (8e7 + 2e6) / 4, line(CLUSTER, 8, 4))
    )
    assert copies.optimizer_s == pytest.approx(4 * one.optimizer_s)
