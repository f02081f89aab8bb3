"""The memory of a given configuration: the plan is the one that was given, and each habit of the software takes what it
says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from torch import fx

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.memory import Habits, Prediction, predict
from benchmarks.costmodel.config import Config
from benchmarks.costmodel.predict import Setup, Software, peak
from benchmarks.costmodel.predict.given import Given, given_plan
from benchmarks.costmodel.predictions import captured

SIZES = Config(
    vocab=2048,
    positions=256,
    layers=8,
    heads=8,
    kv_heads=8,
    head_dim=32,
    hidden=256,
    ffn=1024,
    gated=True,
    dropout=0.1,
)
UNFUSED = replace(SIZES, fused_attention=False)
SETUP = Setup(1, 8, 128, tp=2, dp=2, pp=2, zero=1)
CLUSTER = Cluster.parse("h100:2x8")
OTHERS = Habits(frames=False, keeps_sent=False, casts_gradients=False)


@cache
def graph(sizes: Config) -> fx.GraphModule:
    return captured(sizes, "bfloat16")


@cache
def made(setup: Setup, sizes: Config = SIZES) -> Given:
    return given_plan(graph(sizes), setup, CLUSTER, "bf16")


def held(habits: Habits, setup: Setup = SETUP, sizes: Config = SIZES) -> Prediction:
    found = made(setup, sizes)
    return predict(found.program, found.plan, habits)


def kept(prediction: Prediction) -> float:
    """What a microbatch keeps in the first stage."""
    return prediction.places[0].kept_bytes[0]


def test_the_plan_is_the_one_that_was_given() -> None:
    plan = made(replace(SETUP, recompute="full")).plan
    assert plan.mesh == (2, 2) and plan.places == 2 and plan.schedule == "1f1b" and plan.hints == {"b": 8, "s": 128}
    assert [stage.blocks["blocks_0"] for stage in plan.stages] == [(0, 4), (4, 8)] and plan.remat == {"blocks_0": ()}


def test_blocks_are_dealt_and_run_again_as_stated() -> None:
    plan = made(replace(SETUP, blocks=(3, 5), again=(2, 0), recompute="full")).plan
    assert [stage.blocks["blocks_0"] for stage in plan.stages] == [(0, 3), (3, 8)]
    assert [stage.again["blocks_0"] for stage in plan.stages] == [2, 0]


@pytest.mark.parametrize(
    "change, why", [({"blocks": (3, 4)}, "wanted 8 in all"), ({"blocks": (8, 0)}, "every stage needs one")]
)
def test_blocks_that_cannot_be_dealt(change: dict[str, tuple[int, ...]], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        given_plan(graph(SIZES), replace(SETUP, **change), CLUSTER, "bf16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change, why", [({"blocks": (8,)}, "for each of 2 stages"), ({"parts": ("head",)}, "wanted some of")]
)
def test_setups_without_sense(change: dict[str, tuple[str, ...]], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        replace(SETUP, **change)  # type: ignore[arg-type]


def test_the_more_is_run_again_the_less_is_kept() -> None:
    none, attention, mlp, both, full = (
        kept(held(OTHERS, replace(SETUP, recompute=level, parts=parts), UNFUSED))
        for level, parts in (
            ("none", ()),
            ("selective", ("attention",)),
            ("selective", ("mlp",)),
            ("selective", ("attention", "mlp")),
            ("full", ()),
        )
    )
    assert full < both < min(attention, mlp) and max(attention, mlp) < none


def test_a_pipeline_that_is_full_takes_no_more() -> None:
    few, many = (held(OTHERS, replace(SETUP, microbatches=n)).peak_bytes for n in (8, 64))
    assert few == pytest.approx(many, rel=0.01)


def test_emitted_modules_hold_more_than_software_that_lets_go() -> None:
    setup = replace(SETUP, micro_batch=4)  # so that the most is there in a backward, not while gradients are summed
    assert held(OTHERS, setup).peak_bytes < held(Habits(), setup).peak_bytes


def test_standing_gradients_are_as_many_bytes_as_stated() -> None:
    four, two = (held(replace(OTHERS, standing=True, gradient_bytes=n)).places[0].rest["gradients"] for n in (4, 2))
    # of four blocks and the tables of words and positions, halves on a rank
    elements = 4 * 16 * 256**2 / 2 + (2048 + 256) * 256 / 2
    assert four == 2 * two == pytest.approx(4 * elements, rel=0.01)


def test_without_masters_all_that_rests_has_the_dtype_that_is_computed_in() -> None:
    mixed, pure = (
        peak(graph(SIZES), Setup(1, 1, 128, software=Software(masters=on)), CLUSTER).places[0].rest
        for on in (True, False)
    )
    weights = pure["weights"]
    assert pure["gradients"] == weights and pure["optimizer"] == pytest.approx(2 * weights) and "master" not in pure
    assert mixed["weights"] == weights and mixed["master"] == 2 * weights
    assert mixed["optimizer"] == pytest.approx(4 * weights)


def test_a_fused_chain_keeps_what_it_reads() -> None:
    """silu(gate) * up: the backward needs gate, up and silu(gate), of which the last is computed again."""
    apart, fused = (kept(held(replace(OTHERS, fused=on))) for on in (False, True))
    between = 4 * 128 * 1024 / 2 * 2  # blocks x rows x width / tp x bytes
    assert apart - fused == pytest.approx(between, rel=0.02)


def test_what_is_gathered_again_is_not_kept() -> None:
    sequence = replace(SETUP, sequence_parallel=True)
    gathered, again = (kept(held(replace(OTHERS, regathers=on), sequence)) for on in (False, True))
    # of two norms in each of four blocks, the other rank's half
    assert gathered - again == pytest.approx(4 * 2 * 128 * 256 * 2 / 2, rel=0.02)


def test_rows_are_kept_in_fewer_bits() -> None:
    assert kept(held(replace(OTHERS, kept_bytes=1))) < kept(held(OTHERS))


def test_a_loss_in_place_takes_the_logits_once() -> None:
    alone = Setup(4, 1, 128)
    apart, inside = (held(replace(OTHERS, loss_in_place=on), alone).peak_bytes for on in (False, True))
    assert apart - inside >= 4 * 128 * 2048 * 4


def test_a_log_softmax_over_split_classes_leaves_no_room_to_work_in() -> None:
    """Emitted programs make the gradient of float32 logits where their exponentials were; torch's loss_parallel makes
    both beside the log-softmax that it keeps."""
    split = Setup(4, 1, 128, tp=2, dp=1)
    ours, torchs = (held(replace(OTHERS, log_softmax=on), split).peak_bytes for on in (False, True))
    assert torchs - ours == pytest.approx(2 * 4 * 128 * 2048 / 2 * 4, rel=0.02)


def test_states_and_kept_on_the_host() -> None:
    whole, hosted = (held(replace(OTHERS, hosted=share)).places for share in ((), (0.5, 0.0)))
    assert hosted[0].rest["optimizer"] == whole[0].rest["optimizer"] / 2 and hosted[1].rest == whole[1].rest
    apart = replace(OTHERS, standing=True)
    there, gone = (held(replace(apart, hosted_kept=share)).places for share in ((), (1.0, 1.0)))
    assert there[0].peak_bytes - gone[0].peak_bytes == pytest.approx(there[0].kept_bytes[0])  # of the one that waits
    assert gone[1].peak_bytes == there[1].peak_bytes


def test_what_libraries_take_is_there_once() -> None:
    software = Software(habits=replace(OTHERS, workspace_bytes=1e6))
    more, less = (
        peak(graph(SIZES), replace(SETUP, software=s), CLUSTER).peak_bytes for s in (software, Software(habits=OTHERS))
    )
    assert more - less == 1e6


@pytest.mark.parametrize(
    "change",
    [{"ep": 2}, {"cp": 2}, {"zero": 3}, {"zero": 2}, {"vpp": 2}, {"microbatches": 1}, {"tp": 1, "replicas": 2}],
)
def test_all_axes_can_be_planned(change: dict[str, int]) -> None:
    setup = replace(SETUP, **change)  # type: ignore[arg-type]
    found = peak(graph(SIZES), setup, CLUSTER)
    assert len(found.places) == 2 and all(
        place.peak_bytes == pytest.approx(sum(place.by_kind().values())) for place in found.places
    )


def test_moments_in_16_bits_take_half_of_the_optimizer_state() -> None:
    def bytes_of(kind: str, habits: Habits) -> float:
        return sum(entry.nbytes for entry in held(habits).places[0].entries if entry.kind == kind)

    short = replace(OTHERS, moment_bytes=2)
    assert bytes_of("optimizer", short) == bytes_of("optimizer", OTHERS) / 2 > 0
    assert bytes_of("master", short) == bytes_of("master", OTHERS) > 0
