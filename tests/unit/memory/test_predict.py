"""What a prediction must be, whatever the plan: never less than what rests, more for more, the sum of its parts."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.buckets import gradient_buckets
from autopar.cluster import Cluster
from autopar.memory import Prediction, predict
from autopar.memory import sums as sums_module
from autopar.memory.place import WEIGHTS
from autopar.memory.predict import fullest
from autopar.pipeline.orders import orders
from autopar.plan import Plan
from autopar.planner import Planner
from autopar.problem.graph import Program
from autopar.problem.read_graph import read
from autopar.problem.settings import Settings
from autopar.recipes import RECIPES
from autopar.report.explain import choice_of
from autopar.request import Request
from tests.helpers.remat import rematerialised
from tests.helpers.verify import by_recipe, by_stages, planned, subject
from tests.unit.decisions.test_memory import activations, at_rest

CASES = [
    ("gpt", "ddp"),
    ("gpt", "zero3"),
    ("gpt", "megatron"),
    ("hf-gpt2", "tp_sp"),
    ("mlp", "zero3"),
    ("hf-t5", "ddp"),
]
SOME = st.sampled_from(CASES)


@cache
def made(name: str, recipe: str) -> Plan:
    """A plan on two ranks."""
    return by_recipe(subject(name), (2,), recipe)


@cache
def program(name: str, batch: int = 8, seq: int = 16) -> Program:
    """The graph at some sizes."""
    hints = subject(name).captured.hints
    return read(
        subject(name).captured.gm,
        {**hints, **{k: n for k, n in (("b", batch), ("s", seq)) if k in hints}},
        training=True,
        device="cpu",
    )


def predicted(case: tuple[str, str], batch: int = 8, seq: int = 16) -> Prediction:
    """What the plan of a case takes."""
    return predict(program(case[0], batch, seq), made(*case))


@pytest.mark.parametrize("case", CASES)
def test_a_peak_is_the_sum_of_its_parts_and_at_least_what_rests(case: tuple[str, str]) -> None:
    place = predicted(case).fullest
    assert place.peak_bytes == pytest.approx(max(place.phases.values()))
    assert place.peak_bytes == pytest.approx(sum(place.by_kind().values()))
    assert place.peak_bytes >= place.rest_bytes
    assert all(entry.nbytes > 0 and entry.count > 0 for entry in place.entries)
    assert place.phases["forward"] >= place.activations_bytes + sum(
        place.rest.get(k, 0) for k in ("weights", "optimizer", "inputs")
    )


@settings(max_examples=12)
@given(SOME, st.integers(1, 12), st.integers(1, 12), st.integers(1, 8), st.integers(1, 8))
def test_more_takes_more(case: tuple[str, str], batch: int, more: int, seq: int, longer: int) -> None:
    here = predicted(case, 2 * batch, 4 * seq)
    assert predicted(case, 2 * (batch + more), 4 * seq).peak_bytes >= here.peak_bytes
    assert predicted(case, 2 * batch, 4 * (seq + longer)).peak_bytes >= here.peak_bytes


@pytest.mark.parametrize("case", CASES)
def test_what_rests_and_what_is_kept_is_what_the_search_counts(case: tuple[str, str]) -> None:
    """The walk over the emitted program and the tables of the Problem, made apart from each other."""
    name, recipe = case
    who = subject(name)
    planner = Planner.of(who.captured.gm, who.captured.hints, Request(Cluster.parse("cpu:1x2"), Settings(), mesh=(2,)))
    model = planner.model((2,), RECIPES[recipe].roles, recipe)
    choice = choice_of(model, made(*case))
    place = predicted(case).fullest
    rest = sum(place.rest.get(kind, 0.0) for kind in ("weights", "gradients", "optimizer", "master"))
    assert rest == at_rest(model, choice)
    assert place.kept_bytes[0] == pytest.approx(activations(model, choice), rel=0.03)


def test_sums_of_gradients_take_as_much_in_whatever_order_their_names_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are in a set, which each process orders in its own way; the program's order fills buckets."""
    monkeypatch.setattr(sums_module, "gradient_buckets", partial(gradient_buckets, limit_bytes=2000))
    (rank,) = fullest(program("gpt"), made("gpt", "zero1"))
    names = sorted(rank.synced)
    orders_of_names = [names, names[::-1], *(random.Random(seed).sample(names, len(names)) for seed in range(4))]
    assert len({replace(rank, synced=dict.fromkeys(some)).sums.after_bytes for some in orders_of_names}) == 1


@pytest.mark.parametrize("case", CASES)
def test_a_saved_plan_says_the_same(case: tuple[str, str]) -> None:
    again = Plan.from_json(made(*case).to_json())
    assert predict(program(case[0]), again) == predicted(case)


@settings(max_examples=20)
@given(st.randoms(use_true_random=False))
def test_on_an_axis_of_one_device_it_does_not_matter_how_values_lie(draw: random.Random) -> None:
    """Changes of layout give there what they are given."""
    plan = planned(subject("gpt"), (1,), "single")
    names = [op.name for op in program("gpt").ops.values() if op.role == "op"]
    drawn = {
        name: replace(plan.nodes[name], outs=tuple("P|S0" if pair == "R|R" else pair for pair in plan.nodes[name].outs))
        for name in names
        if draw.random() < 0.3
    }
    assert (
        predict(program("gpt"), replace(plan, nodes={**plan.nodes, **drawn})).peak_bytes
        == predict(program("gpt"), plan).peak_bytes
    )


def test_rows_that_come_from_other_ranks_are_kept_beside_those_that_are_given() -> None:
    """A causal ring works on two halves of chunks, of queries, keys and values, where the rows divide by them."""

    def of_a_row(seq: int) -> float:
        """Bytes at the peak of the forward, beside what rests, by rows of the sequence."""
        place = predicted(("hf-gpt2", "cp"), seq=seq).places[0]
        return (place.phases["forward"] - sum(n for kind, n in place.rest.items() if kind != "gradients")) / seq

    hidden, ranks = 64, 2
    assert of_a_row(32) - of_a_row(30) == pytest.approx(3 * 8 * hidden * 4 / ranks, rel=0.01)


def test_sums_beside_a_backward_for_weights_are_a_part_of_the_peak() -> None:
    """Of a place whose other stage has begun them; activations are few."""
    plan = by_stages(subject("gpt"), (2,), "ddp", 2, 4, "zbv_zero_bubble", 2)
    place = predict(program("gpt", 8, 1), plan).places[1]
    assert place.phases[WEIGHTS] == max(place.phases.values()) == pytest.approx(place.peak_bytes)


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2), ("zbv_zero_bubble", 2)],
)
def test_stages_keep_as_many_microbatches_as_their_schedule_says(schedule: str, virtual: int) -> None:
    plan = by_stages(subject("gpt"), (1,), "single", 2, 4, schedule, virtual)
    found, lines = predict(program("gpt"), plan), orders(schedule, 2, 2 * virtual, 4)
    for place in found.places:
        mine = [i for i, stage in enumerate(plan.stages) if stage.place == place.number]
        line = lines[place.number]
        later = {(a.stage, a.microbatch) for a in line if a.kind == "W"}
        ends = [a.kind == "W" or (a.kind == "B" and (a.stage, a.microbatch) not in later) for a in line]
        flying = [
            [
                sum((a.kind == "F") - end for a, end in zip(line[: n + 1], ends, strict=False) if a.stage == i)
                for i in mine
            ]
            for n in range(len(line))
        ]
        kept = [sum(n * nbytes for n, nbytes in zip(each, place.kept_bytes, strict=True)) for each in flying]
        assert list(place.in_flight) in flying
        assert place.activations_bytes == max(kept)
        assert place.peak_bytes >= place.activations_bytes + sum(place.rest.get(k, 0) for k in ("weights", "optimizer"))


def test_more_microbatches_keep_less() -> None:
    plans = [by_stages(subject("gpt"), (1,), "single", 2, m, "gpipe") for m in (2, 4, 8)]
    kept = [predict(program("gpt"), plan).places[0].kept_bytes[0] for plan in plans]
    assert kept[0] == pytest.approx(2 * kept[1], rel=0.01) and kept[1] == pytest.approx(2 * kept[2], rel=0.01)


def test_running_blocks_again_keeps_less() -> None:
    plan = made("gpt", "ddp")
    none, selective, full = (
        predict(program("gpt"), rematerialised(subject("gpt"), plan, level)).fullest
        for level in ("none", "selective", "full")
    )
    assert full.kept_bytes[0] < selective.kept_bytes[0] < none.kept_bytes[0]
    assert full.rest == none.rest


@pytest.mark.parametrize(("recipe", "level"), [("ddp", "full"), ("zero3", "selective")])
def test_the_more_blocks_are_run_again_the_less_is_held(recipe: str, level: str) -> None:
    """From none of them to all; the last one frees little, because one block is whole while it is run again."""
    who = subject("hf-llama")
    plain = by_recipe(who, (2,), recipe)
    again = rematerialised(who, plain, level)
    graph = program("hf-llama", 64, 64)
    count = next(iter(graph.runs.values())).count
    parts = [
        replace(again, stages=(replace(again.stages[0], again=dict.fromkeys(again.remat, n)),))
        for n in range(count + 1)
    ]
    peaks = [predict(graph, part).peak_bytes for part in parts]
    assert peaks[0] == predict(graph, plain).peak_bytes and peaks[-1] == predict(graph, again).peak_bytes
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0]
