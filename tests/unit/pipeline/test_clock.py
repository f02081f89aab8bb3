"""One pass of a rank in program order."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.cost.comm import collective_s
from autopar.pipeline.chains import LeafBucket
from autopar.pipeline.clock import MOST, Leaf, Line, ahead_s, longer_s, waits_s
from autopar.pipeline.pass_clock import Clock, Turn
from autopar.pipeline.stops import Sent, Stop, Sum, in_few, in_one_bucket
from autopar.planner import Planner
from autopar.problem.hiding import Load, together_s
from autopar.problem.settings import Settings
from autopar.recipes import RECIPES
from autopar.request import Request
from autopar.search import SEARCHES


def _on(axis: int, seconds: float, **shares: float) -> Load:
    return Load(axis, seconds, shares, "all_gather")


def _exposed_s(
    turns: list[Turn], contention: float = 0.0, leaves: tuple[LeafBucket, ...] = (), *, gathers_first: bool = False
) -> float:
    return Clock(turns, contention, leaves).run(gathers_first=gathers_first)


@pytest.mark.parametrize("contention", [0.0, 0.15, 0.5])
@pytest.mark.parametrize("computes_s", [0.0, 4.0, 10.0])
@pytest.mark.parametrize("moves_s", [0.5, 5.5, 9.0])
def test_what_moves_beside_operators_slows_what_they_compute(
    moves_s: float, computes_s: float, contention: float
) -> None:
    """Not the collectives that they wait for: all ten seconds were taken for compute, of which half the axis of tensor
    parallelism has."""
    waits = [(0, _on(1, (10.0 - computes_s) / 1000, fast=1.0))]
    small = [Turn(Stop(computes_s / 1000, waits=waits)) for _ in range(1000)]
    last = Turn(Stop(0.0, takes=[(0, Sent([_on(0, moves_s, slow=1.0)], 1.0))]))
    together = together_s(computes_s, [_on(1, 10.0 - computes_s, fast=1.0)], [_on(0, moves_s, slow=1.0)], contention)
    # it begins where the gather before it does: with itself
    assert 10.0 + _exposed_s([*small, last], contention) == pytest.approx(10.0 + moves_s)
    first = Turn(Stop(0.0, takes=[(0, Sent([_on(2, 0.0)], 1.0))]))
    # `together` takes them for infinitely small
    assert 10.0 + _exposed_s([first, *small, last], contention) == pytest.approx(together, abs=10.0 / 1000)


@pytest.mark.parametrize(("taken", "seconds"), [(0.5, 2.0), (1.0, 4.0)])
def test_gathers_of_two_axes_share_their_link(taken: float, seconds: float) -> None:
    """Two gathers of two seconds on axes of their own, which each take `taken` of a link that both use."""
    turns = [Turn(Stop(0.0, takes=[(number, Sent([_on(number, 2.0, link=taken)], 1e9))]), "block") for number in (0, 1)]
    assert _exposed_s(turns) == pytest.approx(seconds)


def test_compute_waits_for_first_collectives_of_the_block_behind() -> None:
    """Their second ones are to begin with the first block, which computes when they have."""
    blocks = [Turn(Stop(10.0, takes=[(0, Sent([_on(0, 1.0), _on(1, 3.0)], 1e9))]), number) for number in range(3)]
    assert _exposed_s(blocks) == pytest.approx(4.0)
    longer = [Turn(Stop(10.0, takes=[(0, Sent([_on(0, 5.0), _on(1, 3.0)], 1e9))]), number) for number in range(3)]
    assert _exposed_s(longer) == pytest.approx(10.0)


@pytest.mark.parametrize(("legs", "seconds"), [(1, 1.0), (2, 3.0)])
def test_a_block_waits_for_the_first_collective_of_three_buckets_of_leaves(legs: int, seconds: float) -> None:
    """Two are on their way; of leaves cut over two axes the first collective of a third, which the second one of each
    follows."""
    leaves = tuple(LeafBucket([_on(axis, 1.0) for axis in range(legs)], True, {number: None}) for number in range(4))
    assert _exposed_s([Turn(Stop(20.0), number) for number in range(4)], 0.0, leaves) == pytest.approx(seconds)


def test_the_sum_of_a_bucket_waits_for_the_scatter_of_its_gradients() -> None:
    """That of the only gradient of a pass is waited for at its end."""
    scatter = Sent([_on(0, 2.0)], 1.0, [1.0])
    stop = Stop(1.0, sends=[scatter], sums=[Sum("key", Sent([], 1.0), scatter)])
    assert _exposed_s([Turn(stop)]) == pytest.approx(2.0)
    assert _exposed_s([Turn(stop), Turn(Stop(5.0))]) == pytest.approx(0.0)


def _summed(megabytes: float, first: Sent | None = None) -> Sum:
    """The sum of a gradient over eight ranks on a slow link, behind the scatter `first`."""
    cluster = Cluster.parse("h100:1x8")
    slow = tuple(dataclasses.replace(level, bandwidth_bytes_s=1e7) for level in cluster.levels)
    axis = Cluster(cluster.name, slow, cluster.device).mesh((8,)).axes[0]
    nbytes = megabytes * 1e6
    load = Load(0, collective_s("all_reduce", nbytes, axis), {}, "all_reduce", nbytes)
    return Sum("key", Sent([load], nbytes, [nbytes], [axis]), first)


def test_a_bucket_is_summed_also_where_another_operator_sends_the_gradient_to_its_leaf() -> None:
    """What is read by several operators is scattered behind one and summed with the gradients of another: then no
    bucket of it may be lost."""
    scatter = Sent([_on(1, 0.5)], 1.0, [1.0])
    stop = Stop(1.0, sums=[_summed(20.0), _summed(20.0, scatter)])
    together = in_one_bucket([one.sent for one in stop.sums])
    exposed_s = _exposed_s([Turn(Stop(1.0, sends=[scatter])), Turn(stop)])
    assert exposed_s == pytest.approx(sum(load.seconds for load in together))


def test_the_bucket_of_each_block_is_put_together_once() -> None:
    """Blocks have the same gradients; those of another block with equal numbers are others."""
    one, other = _summed(20.0), _summed(20.0)
    assert in_one_bucket([one.sent, one.sent]) is in_one_bucket([one.sent, one.sent])
    assert in_one_bucket([one.sent]) is not in_one_bucket([other.sent])
    assert in_one_bucket([one.sent]) == in_one_bucket([other.sent])


def test_a_bucket_waits_for_all_gradients_that_it_has_from_the_beginning() -> None:
    """A small one comes late from its scatter. The one behind it, which came before, does not fill the bucket in its
    place: that one begins the next bucket."""
    scatter = Sent([_on(1, 3.0)], 1.0, [1.0])
    turns = [
        Turn(Stop(1.0, sends=[scatter], sums=[_summed(1.0, scatter), _summed(25.0)]), 1),
        Turn(Stop(1.0, sums=[_summed(25.0)]), 0),
    ]
    buckets = [in_one_bucket([one.sent for one in turn.stop.sums]) for turn in turns]
    # the second one begins when compute ends, the first one follows it; otherwise one of 25 MB would begin a second ago
    assert _exposed_s(turns) == pytest.approx(sum(load.seconds for bucket in buckets for load in bucket))


_LOADS = st.builds(_on, st.integers(0, 1), st.floats(0.1, 4.0), link=st.floats(0.2, 1.0))
_STOPS = st.builds(
    Stop,
    st.floats(0.0, 3.0),
    takes=st.lists(st.tuples(st.just(0), st.builds(Sent, st.lists(_LOADS, min_size=1, max_size=2), st.just(1e7)))),
    waits=st.lists(st.tuples(st.just(1), _LOADS), max_size=1),
    behind=st.lists(_LOADS, max_size=1),
    last=st.lists(_LOADS, max_size=1),
) | st.builds(Stop, st.floats(0.0, 3.0))


@given(st.lists(_STOPS, max_size=12), st.sampled_from([0.0, 0.2]))
def test_compute_with_no_collective_in_between_is_run_through_at_once(stops: list[Stop], contention: float) -> None:
    few = in_few(stops)
    assert sum(stop.compute_s for stop in few) == pytest.approx(sum(stop.compute_s for stop in stops))
    assert all(stop.begins or before.goes_on for before, stop in pairwise(few))
    one, other = (_exposed_s([Turn(stop, "block") for stop in each], contention) for each in (stops, few))
    assert other == pytest.approx(one, abs=1e-9)


@pytest.mark.parametrize("moves_s", [0.5, 2.0, 3.5])
@pytest.mark.parametrize("way", [0, 1])
def test_a_stage_of_many_blocks_waits_as_long_as_if_all_of_them_were_run_through(way: int, moves_s: float) -> None:
    """Gathers in the forward, and in the backward with waits: of three seconds of compute in each block."""
    stops = (
        Stop(1.0, takes=[(0, Sent([_on(0, moves_s)], 1e9))], waits=[(1, _on(1, 0.25 * way))]),
        Stop(2.0, last=[_on(1, 0.25)]),
    )
    block, head = Line(stops, stops[::-1], block=True), Line((Stop(1.0),), (Stop(2.0),), block=False)
    count = 3 * MOST
    turns = [Turn(stop, number) for number in range(count) for stop in (stops[::-1] if way else stops)]
    turns = [Turn(Stop(2.0)), *turns] if way else [*turns, Turn(Stop(1.0))]
    assert waits_s([(block, count), (head, 1)], way, 0.1) == pytest.approx(_exposed_s(turns, 0.1), rel=0.01)


@pytest.mark.parametrize("count", [1, 3, 2 * MOST])
@pytest.mark.parametrize(("ratio", "longer"), [(3.0, 0.1), (1.2, 0.1), (0.5, 0.5)])
def test_leaves_of_blocks_are_gathered_beside_the_block_before(count: int, ratio: float, longer: float) -> None:
    """They take a tenth of the compute units, or as much longer as a block computes shorter (`ratio` times as long as
    its gather). Those of the first block, and of the head, come before the stage, unless it opens the
    step."""
    axis = Cluster.parse("h100:1x8").mesh((8,)).axes[0]
    moves_s = collective_s("all_gather", 1e9, axis)
    sent = Sent([Load(0, moves_s, {}, "all_gather", 1e9)], 1e9, (), [axis])
    stops = (Stop(ratio * moves_s),)
    block = Line(stops, stops, block=True, leaves=(Leaf(sent, "blocks", "w", 0, ahead=True),))
    head = Line(stops, stops, block=False, leaves=(Leaf(sent, "head", "h", 1, ahead=True),))
    assert longer_s([(head, 1)], 0.1, opens=False) == 0.0
    inside_s = longer_s([(block, count), (head, 1)], 0.1, opens=False)
    assert inside_s == pytest.approx((count - 1) * longer * moves_s, rel=0.12)
    assert ahead_s([(block, count), (head, 1)]) == pytest.approx(2 * moves_s)
    opening_s = longer_s([(block, count), (head, 1)], 0.1, opens=True)
    assert opening_s == pytest.approx(inside_s + 2 * moves_s, rel=0.1)


class _Again(nn.Module):
    """One block, called as often as blocks are walked through and more (ALBERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(MOST + 2):
            x = self.block(x)
        return self.head(x).square().sum()


@pytest.mark.parametrize("recipe", ["zero1", "zero3"])
def test_weights_that_blocks_share_are_gathered_once(recipe: str) -> None:
    """Not in every block: zero1 of ALBERT was priced with twelve times the seconds of its gathers."""
    captured = capture(_Again(), (torch.zeros(8, 64),))
    request = Request(Cluster.parse("h100:1x4"), Settings("train"), mesh=(4,))
    planner = Planner.of(captured.gm, captured.hints, request)
    found = planner.candidate((4,), RECIPES[recipe].roles, recipe, partial(SEARCHES["greedy"], time_limit_s=5.0))
    choice, problem = found.solution.choice, found.model.problem
    moved_s = sum(
        net.cost_s[net.row[choice[net.producer]], net.uses[0].column[choice[net.uses[0].node]]] for net in problem.nets
    )
    assert 0 < found.cost.exposed_s <= 1.01 * moved_s
