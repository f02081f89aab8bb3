"""Bounds that hold for all plans: of stacks against every way to deal blocks, of a whole search against its floor and its answer."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster
from autopar.joint import plan
from autopar.joint.inner import Inner
from autopar.joint.prove import Prover, Stack
from autopar.plan import Plan
from autopar.problem.settings import Settings
from autopar.request import Request
from tests.helpers.verify import Subject, subject

SECONDS = st.floats(0.01, 10.0)


@given(st.integers(2, 7), st.integers(2, 4), SECONDS, SECONDS, SECONDS)
def test_some_place_has_one_of_the_shares(count: int, places: int, block_s: float, head_s: float, guess: float) -> None:
    """Whatever the search thinks that a block takes (`guess`), and however blocks and head are dealt."""
    shares = Stack("blocks", count, guess, "head", head_s).shares(places)
    bound_s = min(share["blocks"] * count * block_s / places + share.get("head", 0.0) * head_s / places for share in shares)
    for dealt in itertools.product(range(count + 1), repeat=places):
        if sum(dealt) == count:
            for at in range(places):
                assert max(n * block_s + head_s * (place == at) for place, n in enumerate(dealt)) >= bound_s * (1 - 1e-9)


def _planned(who: Subject, prove: bool) -> Plan:
    request = Request(Cluster.parse("h100:1x2"), Settings("train"), prove=prove)
    return plan(who.captured.gm, {**who.captured.hints, "b": 64}, request, model=who.name, graph_hash=who.captured.graph_hash)


def test_a_plan_is_proven_where_memory_is_not_short() -> None:
    who = subject("gpt")
    floor, proven = _planned(who, prove=False), _planned(who, prove=True)
    assert proven.predicted.step_s == floor.predicted.step_s
    assert floor.predicted.gap > 10 * proven.predicted.gap
    assert 0 <= proven.predicted.gap <= 0.03  # a price sees more of what shows than a Problem


def test_no_shape_is_bound_below_its_work() -> None:
    who = subject("gpt")
    prover = Prover(Inner(who.captured.gm, {**who.captured.hints, "b": 8}, Request(Cluster.parse("cpu:1x4"), Settings("train"))))
    for shape in prover.shapes()[::3]:
        assert prover.bound_s(shape) >= prover.floor_s(shape) * (1 - 1e-9)
