"""Whole steps: parts add up, closed formulas agree, the trace is one that Perfetto opens, bad input is named."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cluster import Cluster
from autopar.memory import memory_of, predict
from autopar.pipeline.gathering import Gathering
from autopar.pipeline.makespan import step_s
from autopar.pipeline.orders import StageTime, orders
from autopar.pipeline.schedules import SCHEDULES
from autopar.pipeline.summing import Summing
from autopar.problem.read_graph import read
from autopar.simulate import Simulation, simulate
from autopar.simulate.stages import Stages
from autopar.simulate.trace import trace
from tests.helpers.verify import Subject, by_recipe, by_stages, subject

CASES = [
    ("gpipe", 2, 1),
    ("1f1b", 2, 1),
    ("1f1b", 4, 1),
    ("interleaved_1f1b", 2, 2),
    ("looped_bfs", 2, 2),
    ("interleaved_zero_bubble", 2, 1),
    ("interleaved_zero_bubble", 2, 2),
    ("zbv_zero_bubble", 2, 2),
    ("dualpipev", 2, 2),
]


def _simulated(who: Subject, schedule: str, places: int, virtual: int) -> tuple[Simulation, Stages]:
    made = by_stages(who, (2,), "zero3", places, 8, schedule, virtual)
    return simulate(who.captured.gm, made), Stages.of(who.captured.gm, made)


@pytest.mark.parametrize(("schedule", "places", "virtual"), CASES)
def test_closed_formulas_agree_on_every_schedule(schedule: str, places: int, virtual: int) -> None:
    found, stages = _simulated(subject("hf-gpt2"), schedule, places, virtual)
    split = SCHEDULES[schedule].splits_backward
    count, times = places * virtual, []
    for stage, view in enumerate(stages.views):
        back = [
            stages.ran(stage, part).length_s
            for part in (("inputs", "weights") if split and view.separable else ("backward",))
        ]
        forward_s, sums = stages.ran(stage, "forward").length_s, stages.sums(stage)
        summing = Summing(late_s=sums.alone.length_s)  # on a CPU
        longer_s, late_s = stages.ran(stage, "first").length_s - forward_s, back[1] if len(back) > 1 else 0.0
        times.append(StageTime(forward_s, back[0], late_s, stages.send_s(stage), 0.0, summing, Gathering(longer_s)))
    where = [stage.place for stage in stages.plan.stages]
    once = max(stages.optimizer(place).seconds for place in range(places))
    shared = sum(shared.seconds for shared in stages.shared)
    closed = step_s(orders(schedule, places, count, 8), times, where) + once + shared
    assert found.step_s == pytest.approx(closed, rel=0.03)


@pytest.mark.parametrize(("schedule", "places", "virtual"), CASES[:4])
def test_the_parts_of_a_place_are_its_step(schedule: str, places: int, virtual: int) -> None:
    found, _ = _simulated(subject("hf-gpt2"), schedule, places, virtual)
    assert len(found.places) == places and sorted(s for p in found.places for s in p.stages) == list(
        range(places * virtual)
    )
    for place in found.places:
        parts = (place.compute_s, place.exposed_s, place.idle_s, place.optimizer_s)
        assert all(part >= -1e-12 for part in parts) and sum(parts) == pytest.approx(found.step_s)
    assert 0 < found.bubble < 1 and 0 < found.exposed < 1 and 0 < found.mfu < 1
    assert found.tokens_s == pytest.approx(8 * 16 / found.step_s / (2 * places))


@pytest.mark.parametrize(("recipe", "schedule"), [("ddp", "1f1b"), ("zero1", "1f1b"), ("zero1", "")])
def test_each_part_of_a_place_is_what_its_spans_are(recipe: str, schedule: str) -> None:
    """Copies into the buckets of gradients and leaves that a pipeline moves at the end of its step are compute, and
    collectives beside them hidden, as everywhere else."""
    who = subject("hf-gpt2")
    made = by_stages(who, (2,), recipe, 2, 4, schedule) if schedule else by_recipe(who, (2,), recipe)
    shared_s = sum(shared.seconds for shared in Stages.of(who.captured.gm, made).shared)
    assert bool(shared_s) == bool(schedule)
    for place in simulate(who.captured.gm, made).places:
        spans = [span for span in place.spans if span.kind not in ("action", "send")]
        computes = [(s.begin_s, s.end_s) for s in spans if s.kind in ("compute", "copy")]
        moves = [(s.begin_s, s.end_s) for s in spans if s.kind not in ("compute", "copy")]
        compute_s, exposed_s = _covered(computes), _covered([*computes, *moves]) - _covered(computes)
        assert place.compute_s == pytest.approx(compute_s - (0.0 if schedule else place.optimizer_s))
        assert place.exposed_s == pytest.approx(exposed_s + shared_s)
        assert place.hidden_s == pytest.approx(_covered(moves) - exposed_s)


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds in at least one of the (begin, end) of `spans`."""
    times = sorted({at for span in spans for at in span})
    return sum(b - a for a, b in itertools.pairwise(times) if any(begin <= a and b <= end for begin, end in spans))


@pytest.mark.parametrize(("schedule", "places", "virtual"), [CASES[0], CASES[3], CASES[7], ("", 1, 1)])
def test_memory_over_time_peaks_where_memory_does(schedule: str, places: int, virtual: int) -> None:
    """Of every place, at the bytes that autopar.memory finds; the step begins (while a place waits for its first
    microbatch, too) and ends with what rests."""
    who = subject("hf-gpt2")
    made = (
        by_stages(who, (2,), "zero3", places, 8, schedule, virtual) if schedule else by_recipe(who, (2, 2), "tp_zero3")
    )
    found = simulate(who.captured.gm, made)
    wanted = predict(read(who.captured.gm, made.hints, training=True, device="cpu"), made)
    for place, memory in zip(found.places, wanted.places, strict=True):
        assert place.peak_bytes == pytest.approx(memory.peak_bytes)
        assert all(0 <= at <= found.step_s * (1 + 1e-9) for at, _ in place.memory) and list(place.memory) == sorted(
            place.memory, key=lambda point: point[0]
        )
        assert place.memory[0][0] == 0 and place.memory[0][1] == pytest.approx(
            memory.rest_bytes - memory.rest["gradients"], rel=0.05
        )
        assert place.memory[-1][1] == pytest.approx(memory.rest_bytes, rel=0.05)
    assert found.peak_bytes == pytest.approx(wanted.peak_bytes)


@pytest.mark.parametrize("places", [1, 2])
def test_outputs_of_inference_are_there_at_the_end(places: int) -> None:
    who = subject("gpt", "inference")
    made = by_stages(who, (1,), "single", places, 4, "gpipe")
    found = simulate(who.captured.gm, made)
    for place, memory in zip(found.places, memory_of(who.captured.gm, made).places, strict=True):
        assert place.peak_bytes == pytest.approx(memory.peak_bytes)
        assert place.memory[-1] == (found.step_s, pytest.approx(memory.phases["outputs"]))


def test_sums_of_one_bucket_begin_where_the_last_backward_of_the_first_stage_ends() -> None:
    """It is full with the last gradient; what is copied then is a part of the seconds of the sums."""
    who = subject("gpt")
    made = replace(by_stages(who, (2,), "ddp", 2, 2, "1f1b"), cluster=Cluster.parse("h100:1x4").to_dict())
    place, stages = simulate(who.captured.gm, made).places[0], Stages.of(who.captured.gm, made)
    back_s = max(span.end_s for span in place.spans if span.stream == "actions" and "B stage 0" in span.name)
    assert stages.sums(0).copies_s > 0
    assert [(span.begin_s, span.end_s) for span in place.spans if span.stream == "sums"] == [
        pytest.approx((back_s, back_s + stages.sums(0).left_s))
    ]


def test_more_microbatches_have_a_smaller_bubble() -> None:
    who = subject("hf-gpt2")
    bubbles = [simulate(who.captured.gm, by_stages(who, (2,), "ddp", 2, m, "1f1b")).bubble for m in (2, 4)]
    assert bubbles[1] < bubbles[0]


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_trace_is_one_that_perfetto_opens(tmp_path: Path, pipelined: bool) -> None:
    who = subject("hf-gpt2")
    found = (
        _simulated(who, "1f1b", 2, 1)[0] if pipelined else simulate(who.captured.gm, by_recipe(who, (2, 2), "tp_zero3"))
    )
    found.save_trace(str(tmp_path / "trace.json"))
    made = json.loads((tmp_path / "trace.json").read_text())
    assert made == json.loads(json.dumps(trace(found))) and set(made) == {"traceEvents", "displayTimeUnit", "otherData"}
    named = {(e["pid"], e["tid"]) for e in made["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    slices = [e for e in made["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in made["traceEvents"]} == set(range(len(found.places)))
    for event in slices:
        assert (
            (event["pid"], event["tid"]) in named
            and event["dur"] >= 0
            and event["ts"] >= 0
            and event["name"]
            and event["cat"]
        )
        assert event["ts"] + event["dur"] <= 1e6 * found.step_s * (1 + 1e-9)
    # slices of a track nest or follow each other: what overlaps otherwise Perfetto would draw wrong
    for track in named:
        last = 0.0
        for event in sorted((e for e in slices if (e["pid"], e["tid"]) == track), key=lambda e: e["ts"]):
            assert event["ts"] >= last - 1e-6
            last = event["ts"] + event["dur"]
    streams = {e["args"]["name"] for e in made["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {"compute"} < streams and ({"actions", "sends"} < streams or not pipelined)


def test_as_json_there_is_everything_but_the_spans() -> None:
    who = subject("hf-gpt2")
    found = json.loads(json.dumps(simulate(who.captured.gm, by_recipe(who, (4,), "zero3")).to_dict()))
    assert {"step_s", "mfu", "tokens_s", "bubble", "exposed", "peak_bytes", "places", "predicted_s"} < set(found)
    assert "spans" not in found["places"][0] and found["places"][0]["compute_s"] > 0


def test_forward_only_for_inference() -> None:
    who = subject("mlp", "inference")
    found = simulate(who.captured.gm, by_recipe(who, (4,), "tp"))
    assert found.step_s == pytest.approx(found.predicted_s) and found.places[0].optimizer_s == 0.0
