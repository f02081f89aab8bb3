"""Orders of schedules against the closed forms of the papers, and against what torch runs."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import pipelining

from autopar._torch import with_transfers
from autopar.errors import PlanError
from autopar.pipeline.makespan import step_s
from autopar.pipeline.orders import Action, Flying, StageTime, _Stage, actions_of, in_flight, laid_out, orders
from autopar.pipeline.schedules import SCHEDULES

CASES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("looped_bfs", 2),
    ("interleaved_zero_bubble", 1),
    ("interleaved_zero_bubble", 2),
    ("zbv_zero_bubble", 2),
    ("dualpipev", 2),
]


def _places(name: str, places: int, stages: int) -> list[int]:
    return [SCHEDULES[name].place(i, places) for i in range(stages)]


@pytest.mark.parametrize(("name", "virtual"), CASES)
@pytest.mark.parametrize("places", [2, 4])
def test_every_stage_runs_every_microbatch_once_forward_and_backward(name: str, virtual: int, places: int) -> None:
    stages, micro = places * virtual, 2 * places * virtual
    lines = orders(name, places, stages, micro)
    where = _places(name, places, stages)
    for place, line in enumerate(lines):
        assert {a.stage for a in line} == {i for i in range(stages) if where[i] == place}
    every = list(itertools.chain(*lines))
    for stage, m in itertools.product(range(stages), range(micro)):
        kinds = sorted(a.kind for a in every if (a.stage, a.microbatch) == (stage, m))
        assert kinds in (["B", "F"], ["F", "I", "W"]), (name, stage, m, kinds)


@pytest.mark.parametrize(("name", "virtual"), [case for case in CASES if case[0] not in ("gpipe", "1f1b")])
def test_the_order_alone_is_that_of_the_whole_schedule(name: str, virtual: int) -> None:
    """`_torch.order_only` leaves out what torch makes of the order, and with it torch's last checks: they have nothing
    to say. `_torch.with_transfers` adds what torch adds."""
    places = 3
    for micro in (1, 2, 3, 5, 6, 7, 12):
        whole: list[Any] = []
        mine = [
            _Stage(i, places, places * virtual)
            for i in range(places * virtual)
            if SCHEDULES[name].place(i, places) == 0
        ]
        with suppress(ValueError):
            whole.append(
                getattr(pipelining.schedules, SCHEDULES[name].torch_name)(mine, micro, loss_fn=len, scale_grads=False)
            )
        with suppress(PlanError):
            assert orders(name, places, places * virtual, micro) == tuple(
                tuple(actions_of(whole[0].pipeline_order[place])) for place in range(places)
            )
            assert with_transfers(laid_out(name, places, places * virtual, micro)) == whole[0].pipeline_order_with_comms
            whole.clear()
        assert not whole, f"torch can run {micro} microbatches, and the order alone could not be had"


@pytest.mark.parametrize("places", [2, 4, 8])
@pytest.mark.parametrize("micro", [8, 16])
def test_even_stages_take_what_the_papers_say(places: int, micro: int) -> None:
    forward, backward = 1.0, 2.0
    even = [StageTime(forward, backward / 2, backward / 2)] * places
    full = (forward + backward) * micro
    bubble = (forward + backward) * (places - 1)  # GPipe and 1F1B: (p - 1) of (m + p - 1)
    for name in ("gpipe", "1f1b"):
        assert step_s(orders(name, places, places, micro), even, list(range(places))) == pytest.approx(full + bubble)
    halves = [StageTime(forward / 2, backward / 4, backward / 4)] * (2 * places)
    looped = step_s(
        orders("interleaved_1f1b", places, 2 * places, micro), halves, _places("interleaved_1f1b", places, 2 * places)
    )
    assert looped == pytest.approx(full + bubble / 2)  # Narayanan et al. 2021: divided by the stages of a place
    zero = step_s(orders("interleaved_zero_bubble", places, places, micro), even, list(range(places)))
    # ZB-H1: (p - 1)(F + B - W)
    assert zero == pytest.approx(full + (places - 1) * (forward + backward / 2 - backward / 2))


@pytest.mark.parametrize("places", [2, 4])
def test_activations_in_flight(places: int) -> None:
    micro = 4 * places
    assert in_flight(orders("gpipe", places, places, micro), places) == [Flying(micro)] * places
    assert in_flight(orders("1f1b", places, places, micro), places) == [Flying(n) for n in range(places, 0, -1)]


@given(st.lists(st.tuples(st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0, 0.5)), min_size=4, max_size=4))
def test_no_schedule_beats_its_busiest_place(times: list[tuple[float, float, float]]) -> None:
    stages = [StageTime(f, b / 2, b / 2, send) for f, b, send in times]
    for name, places in (("1f1b", 4), ("gpipe", 4), ("interleaved_1f1b", 2), ("zbv_zero_bubble", 2)):
        where = _places(name, places, 4)
        took = step_s(orders(name, places, 4, 8), stages, where)
        busiest = max(
            8 * sum(t.forward_s + t.inputs_s + t.weights_s for t, at in zip(stages, where, strict=True) if at == p)
            for p in range(places)
        )
        chain = sum(t.forward_s + t.inputs_s for t in stages)
        assert took >= max(busiest, chain) - 1e-9


def test_what_waits_for_itself_is_refused() -> None:
    with pytest.raises(PlanError, match="waits for itself"):
        step_s([[Action("B", 0, 0), Action("F", 0, 0)]], [StageTime(1, 1)], [0])


@pytest.mark.parametrize(
    ("name", "places", "stages", "micro", "words"),
    [
        ("1f1b", 4, 4, 2, "cannot run 2 microbatches in 4 stages: it wants at least 4; .*gpipe runs any number"),
        ("interleaved_1f1b", 4, 8, 9, "cannot run 9 microbatches in 8 stages on 4 groups"),
        ("dualpipev", 4, 8, 4, "cannot run 4 microbatches"),
    ],
)
def test_too_few_microbatches_are_refused(name: str, places: int, stages: int, micro: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        orders(name, places, stages, micro)
