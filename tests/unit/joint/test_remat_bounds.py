"""Seconds and bytes of blocks that are run again: no choice, and nothing that is kept, takes less of both than is
said."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autopar.joint.remat_bounds import Again, agains
from autopar.joint.shape_bounds import Alone
from autopar.problem.remat import rematerialised
from autopar.problem.rerun import keepable
from tests.unit.joint.test_relaxed import alone_on, solutions, thrifty

ON = [
    ("hf-gpt2", "h100:1x4", (4,)),
    pytest.param("hf-llama", "h100:2x4", (2, 4), marks=pytest.mark.slow),
    ("hf-mixtral", "l4:1x4", (4,)),
    pytest.param("hf-t5", "h100:1x4", (2, 2), marks=pytest.mark.slow),
    ("hf-bert", "h100:1x2", (2,)),
]


def kept_sets(here: Alone, count: int) -> list[dict[str, list[str]]]:
    """Some of the results that can be kept, few and many, and all."""
    program, rng = here.whole.program, random.Random(0)
    named = [op.name for op in program.ops.values() if keepable(op)]
    shares = [0.0, 1.0, *(rng.random() for _ in range(count))]
    return [
        {scope: [n for n in named if program.ops[n].scope == scope and rng.random() < share] for scope in program.runs}
        for share in shares
    ]


def least(each: Again, price: float) -> float:
    """Seconds and bytes at so many seconds per byte."""
    return sum(min(seconds + price * nbytes for seconds, nbytes in pairs) for pairs in each.corners.values())


@pytest.mark.parametrize(("name", "cluster", "mesh"), ON)
def test_nothing_that_is_kept_takes_less(name: str, cluster: str, mesh: tuple[int, ...]) -> None:
    here, plain = alone_on(name, cluster, mesh)[0], alone_on(name, cluster, mesh)[0].plain
    told, seen, tight = list(agains(plain, here.forward)), 0, 0.0
    full, most = (rematerialised(plain, here.forward, each) for each in kept_sets(here, 0))
    choices = [*solutions(full.problem, 3), thrifty(full.problem)]
    ends = [(most.problem.price(choice).time_s, full.problem.price(choice).memory_bytes) for choice in choices]
    for wanted in kept_sets(here, 6):
        way = rematerialised(plain, here.forward, wanted)
        for choice, (least_s, least_bytes) in zip(choices, ends, strict=True):
            cost = way.problem.price(choice)
            more_s, more_bytes = cost.time_s - least_s, cost.memory_bytes - least_bytes
            of = [each for each in told if not any(mask[c] for mask, c in zip(each.barred, choice, strict=True))]
            assert of, "each choice is among those of one"
            for price in (0.0, *np.geomspace(1e-15, 1e-9, 7)):
                said_s = min(least(each, float(price)) for each in of)
                took_s = more_s + price * more_bytes
                assert said_s <= took_s + 1e-9 * abs(cost.time_s)
                tight = max(tight, said_s / took_s) if took_s > 0 else tight
                seen += said_s > 0
    assert seen and tight > 0.3


def test_operators_with_algorithms_are_told_apart() -> None:
    """Attention in a ring is run again whatever is kept: choices with it keep its results for nothing, the others do
    not."""
    here = alone_on("hf-llama", "h100:2x4", (2, 4))[0]
    told = list(agains(here.plain, here.forward))
    assert len(told) > 1
    price = 1e-12
    assert all(least(told[0], price) >= least(each, price) for each in told[1:])
    for masks in zip(*(each.barred for each in told), strict=True):
        assert not np.logical_and.reduce(masks).any(), "no choice is in none"
