"""What hides: the closed formula is what the event engine does with the same work in small pieces."""

from __future__ import annotations

import random

import pytest

from autopar.problem.hiding import Load, merged, together_s
from autopar.simulate.engine import Task, run

CONTENTION = 0.15


def _engine_s(compute_s: float, waited: list[Load], behind: list[Load], pieces: int = 200) -> float:
    """The same as tasks: the work in so many pieces, each of some compute and of some of all that is waited for."""
    tasks: list[Task] = []
    last: tuple[int, ...] = ()

    def add(load: Load, stream: str, seconds: float, after: tuple[int, ...]) -> tuple[int, ...]:
        tasks.append(
            Task(stream, stream, seconds, after, tuple(load.shares), "device", CONTENTION, tuple(load.shares.values()))
        )
        return (len(tasks) - 1,)

    for load in behind:
        add(load, f"behind on {load.axis}", load.seconds, ())
    for _ in range(pieces):
        tasks.append(Task("compute", "compute", compute_s / pieces, last, units="device"))
        last = (len(tasks) - 1,)
        for load in waited:
            last = add(load, f"waited on {load.axis}", load.seconds / pieces, last)
    return run(tasks).length_s


def test_what_hides_costs_its_share_of_compute_units() -> None:
    load = Load(0, 2.0, {"gpu": 1.0})
    assert together_s(10.0, [], [load], CONTENTION) == pytest.approx(10.0 + CONTENTION * 2.0)
    assert together_s(1.0, [], [load], CONTENTION) == pytest.approx(2.0)
    assert together_s(10.0, [Load(1, 3.0, {"gpu": 1.0})], [], CONTENTION) == pytest.approx(13.0)
    assert together_s(0.0, [], [load, Load(1, 2.0, {"node": 1.0})], CONTENTION) == pytest.approx(2.0)  # side by side
    assert together_s(0.0, [], [load, Load(1, 2.0, {"gpu": 1.0})], CONTENTION) == pytest.approx(4.0)  # on one link


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_event_engine(seed: int) -> None:
    rng = random.Random(seed)

    def load(axis: int) -> Load:
        return Load(
            axis,
            rng.uniform(0.2, 4.0),
            {level: rng.uniform(0.2, 1.0) for level in ("node", "gpu")[: rng.randint(1, 2)]},
        )

    compute_s, waited, behind = (
        rng.uniform(1.0, 6.0),
        [load(0)][: rng.randint(0, 1)],
        [load(axis) for axis in range(1, rng.randint(2, 3))],
    )
    assert together_s(compute_s, waited, behind, CONTENTION) == pytest.approx(
        _engine_s(compute_s, waited, behind), rel=0.02
    )


def test_loads_of_an_axis_are_one() -> None:
    (one,) = merged([Load(0, 1.0, {"gpu": 1.0}), Load(0, 3.0, {"gpu": 0.5, "node": 1.0})])
    assert (one.seconds, one.shares) == (4.0, {"gpu": 2.5 / 4, "node": 3 / 4})


def test_two_that_end_at_once_take_as_long_as_nearly_at_once() -> None:
    one, other = (
        [Load(0, 1.0, {"node": 1.0}), Load(1, seconds, {"gpu": 1.0}), Load(2, seconds, {"gpu": 1.0})]
        for seconds in (0.5, 0.5000001)
    )
    assert together_s(1.0, [], one, 0.15) == pytest.approx(together_s(1.0, [], other, 0.15), rel=1e-6)
