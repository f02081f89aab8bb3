"""The event engine on random tasks: never faster than a chain, never slower than all in a row, and what sharing
does."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.simulate.engine import Task, run

SECONDS = st.floats(0.0, 10.0)
FEW = settings(max_examples=50, deadline=None)


@st.composite
def programs(draw: st.DrawFn, *, sharing: bool = True) -> list[Task]:
    """Random tasks that wait for earlier ones."""
    tasks = []
    for index in range(draw(st.integers(1, 12))):
        after = draw(st.lists(st.integers(0, index - 1), unique=True, max_size=3)) if index else []
        units = draw(st.sampled_from(["", "gpu"])) if sharing else ""
        takes = draw(st.sampled_from([0.0, 0.25])) if units else 0.0
        computes = bool(units) and not takes
        links = draw(st.lists(st.sampled_from(["a", "b"]), unique=True, max_size=2)) if sharing and not computes else []
        uses = tuple(draw(st.sampled_from([0.1, 0.5, 1.0])) for _ in links) if draw(st.booleans()) else ()
        tasks.append(
            Task(
                f"t{index}",
                draw(st.sampled_from(["x", "y", "z"])),
                draw(SECONDS),
                tuple(after),
                tuple(links),
                units,
                takes,
                uses,
            )
        )
    return tasks


def chain_s(tasks: list[Task]) -> float:
    """The longest chain of tasks that wait for each other, on a stream or by name."""
    ends: list[float] = []
    last: dict[str, int] = {}
    for index, task in enumerate(tasks):
        before = [*task.after, *([last[task.stream]] if task.stream in last else [])]
        ends.append(max((ends[i] for i in before), default=0.0) + task.work_s)
        last[task.stream] = index
    return max(ends)


@FEW
@given(programs())
def test_between_the_longest_chain_and_all_in_a_row(tasks: list[Task]) -> None:
    found = run(tasks)
    total = sum(task.work_s for task in tasks)
    assert chain_s(tasks) - 1e-9 <= found.length_s <= total + 1e-9
    for index, task in enumerate(tasks):
        assert found.end_s[index] >= found.begin_s[index] + task.work_s - 1e-9
        assert all(found.begin_s[index] >= found.end_s[before] - 1e-9 for before in task.after)
    for stream in {task.stream for task in tasks}:
        mine = [i for i, task in enumerate(tasks) if task.stream == stream]
        assert all(found.end_s[a] <= found.begin_s[b] + 1e-9 for a, b in itertools.pairwise(mine))


@FEW
@given(programs(sharing=False), st.data())
def test_without_sharing_it_is_the_longest_chain_and_longer_tasks_never_end_earlier(
    tasks: list[Task], data: st.DataObject
) -> None:
    assert run(tasks).length_s == pytest.approx(chain_s(tasks))
    index = data.draw(st.integers(0, len(tasks) - 1))
    longer = [replace(t, work_s=t.work_s + (i == index) * data.draw(SECONDS)) for i, t in enumerate(tasks)]
    assert all(b >= a - 1e-9 for a, b in zip(run(tasks).end_s, run(longer).end_s, strict=True))


@FEW
@given(programs(), st.floats(0.1, 10.0))
def test_time_has_no_unit(tasks: list[Task], factor: float) -> None:
    scaled = [replace(task, work_s=factor * task.work_s) for task in tasks]
    assert run(scaled).length_s == pytest.approx(factor * run(tasks).length_s)


def test_two_on_a_link_have_half_of_it_each() -> None:
    found = run([Task("long", "a", 3.0, links=("l",)), Task("short", "b", 1.0, links=("l",))])
    assert found.end_s == (4.0, 2.0)


@pytest.mark.parametrize(
    ("first", "second", "ends"), [(0.25, 0.75, (3.0, 1.0)), (0.5, 1.0, (3.5, 1.5)), (1.0, 1.0, (4.0, 2.0))]
)
def test_on_a_link_that_is_not_full_nothing_is_slower(first: float, second: float, ends: tuple[float, float]) -> None:
    found = run(
        [Task("long", "a", 3.0, links=("l",), uses=(first,)), Task("short", "b", 1.0, links=("l",), uses=(second,))]
    )
    assert found.end_s == pytest.approx(ends)


def test_what_a_collective_takes_is_what_the_search_charges_for_it() -> None:
    """Hidden under compute it costs its share of the units, behind it all of its time (problem.types)."""
    share = 0.25
    under = run([Task("matmul", "compute", 10.0, units="gpu"), Task("gather", "axis", 4.0, units="gpu", takes=share)])
    assert under.length_s == pytest.approx(10.0 + share * 4.0)
    over = run([Task("matmul", "compute", 3.0, units="gpu"), Task("gather", "axis", 12.0, units="gpu", takes=share)])
    assert over.length_s == pytest.approx(12.0) and over.end_s[0] == pytest.approx(3.0 / (1 - share))


def test_what_waits_for_itself_is_refused() -> None:
    with pytest.raises(PlanError, match="2 of 2 tasks wait for each other: a, b"):
        run([Task("a", "s", 1.0, (1,)), Task("b", "t", 1.0, (0,))])
