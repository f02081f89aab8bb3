"""The costs of the pieces of a model, and time and memory of any *stretch* (consecutive pieces, as in one pipeline
stage)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.pipeline.clock import Line, ahead_s, longer_s, waits_s
from autopar.pipeline.gathering import Gathering
from autopar.pipeline.memory_shares import Need
from autopar.pipeline.once_per_step import Sums, each_s
from autopar.pipeline.orders import Flying, StageTime
from autopar.pipeline.summing import NOTHING, Summing


@dataclass(frozen=True, slots=True)
class Cost:
    """What one piece of a model (pipeline.units) costs on a place, in seconds and in bytes per device.

    micro_s, forward_s      one microbatch, forward and backward; its forward alone
    inputs_s, weights_s     the two parts of a backward that is split (gradients of inputs, gradients of weights)
    both_s                  the backward under such a schedule where the two parts run at once
    once_s, update_s        once per step, after all actions; the part of it that is the optimizer's
    leaves_s                by which its first forward takes longer as leaves are gathered; of those in its `line` only
                            what copies take
    kept_bytes              kept per microbatch in flight
    halfway_bytes           more, per microbatch between the two parts of a split backward (gradients that wait for
                            the second part)
    rest_bytes              parameters, their gradients and state
    live_bytes              there only while the piece runs
    block                   whether it is a block whose collectives overlap its compute
    sums                    sums of gradients once per step that run beside other work (pipeline.summing)
    summed_s, copies_s      their seconds as shares of full buckets, and those of the copies around them
    beside_s                seconds by which a whole backward takes longer that overlaps them
    each, each_s            sums after every microbatch; their exposed seconds in the backward, in the part for
                            weights, and in `both_s`
    contention              seconds that an overlapped collective adds to the compute beside it, per second
    adds                    weights outside of blocks that other pieces read too, each with the seconds of adding its
                            gradient to those of earlier microbatches, once per stage
    line, work_s            its operators in program order (None where nothing overlaps), and the seconds of their work
                            in the forward and in the backward
    """

    micro_s: float = 0.0
    once_s: float = 0.0
    kept_bytes: float = 0.0
    halfway_bytes: float = 0.0
    rest_bytes: float = 0.0
    live_bytes: float = 0.0
    forward_s: float = 0.0
    inputs_s: float = 0.0
    weights_s: float = 0.0
    both_s: float = 0.0
    block: bool = False
    update_s: float = 0.0
    leaves_s: float = 0.0
    sums: tuple[Sums, ...] = ()
    summed_s: float = 0.0
    copies_s: float = 0.0
    beside_s: float = 0.0
    each: tuple[Sums, ...] = ()
    each_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    contention: float = 1.0
    adds: tuple[tuple[str, float], ...] = ()
    line: Line | None = None
    work_s: tuple[float, float] = (0.0, 0.0)


def memory_bytes(*stages: tuple[Sequence[Cost], Flying]) -> float:
    """Bytes per device of a place with these stages, each given by its pieces and the microbatches that it keeps.
    `live_bytes` count for one piece at a time."""
    return sum(held_bytes(*stage) for stage in stages) + max(
        (c.live_bytes for costs, _ in stages for c in costs), default=0.0
    )


def held_bytes(part: Sequence[Cost], flying: Flying) -> float:
    """Bytes per device of a stage of these pieces: parameters and their state, and what the microbatches in flight
    keep."""
    return sum(c.rest_bytes + flying.kept * c.kept_bytes + flying.halfway * c.halfway_bytes for c in part)


def stage_time(
    part: Sequence[Cost],
    send_s: float,
    *,
    split: bool,
    training: bool,
    opens: bool = False,
    action_s: float = 0.0,
) -> StageTime:
    """The times of a stage of these pieces, with `action_s` added to each action; `split`: the schedule splits its
    backward in two; `opens`: nothing computes before it."""
    in_order, twice_s = all(c.line for c in part), _added_twice_s(part)
    forward_s = _in_order_s(part, 0) if in_order else sum(c.forward_s for c in part)
    gathers = _gathering(part, opens=opens)
    if split and training:
        weights_s = sum(c.weights_s for c in part) - twice_s + _each_s(part, [c.weights_s for c in part], 1)
        both_s = _both_s(part) - twice_s
        return StageTime(
            forward_s + action_s,
            sum(c.inputs_s for c in part) + action_s,
            weights_s + action_s,
            send_s,
            both_s + action_s,
            _summing(part, both_s),
            gathers,
        )
    if in_order:
        back_s = _in_order_s(part, 1) - twice_s if training else 0.0
    else:
        seconds = sum(c.micro_s for c in part) - twice_s
        seconds += _each_s(part, [c.micro_s - c.forward_s for c in part], 0)
        back_s = max(0.0, seconds - forward_s) if training else 0.0
        forward_s = seconds - back_s
    summing = _summing(part, back_s) if training else NOTHING
    return StageTime(forward_s + action_s, back_s + action_s, 0.0, send_s, summing=summing, gathering=gathers)


def _both_s(part: Sequence[Cost]) -> float:
    """Seconds of both parts of a split backward at once. They are a whole backward in program order, but for scatters
    of gathered weights, which this one waits for."""
    seconds = sum(c.both_s for c in part)
    if not any(c.each for c in part):
        return seconds
    if all(c.line and not any(stop.sends for stop in c.line.backward) for c in part):
        return max(seconds, _in_order_s(part, 1))
    return seconds + _each_s(part, [c.both_s for c in part], 2)


def _gathering(part: Sequence[Cost], *, opens: bool) -> Gathering:
    """What gathers of leaves once per step take beside the first forward of a stage, and before it; `opens` as in
    pipeline.clock.longer_s."""
    copies_s = sum(c.leaves_s for c in part)
    if not all(c.line for c in part):
        return Gathering(copies_s)
    rows, contention = _in_a_row(part), part[0].contention
    last = next((index for index in reversed(range(len(part))) if part[index].block), 0)
    return Gathering(
        copies_s + longer_s(rows, contention, opens=opens),
        0.0 if opens else ahead_s(rows),
        sum(c.forward_s for c in part[last:]),
        contention,
    )


def _in_a_row(part: Sequence[Cost]) -> tuple[tuple[Line, int], ...]:
    """The lines of the pieces of a stage, each with how many times it follows itself."""
    rows = [(line, len(list(same))) for line, same in itertools.groupby(c.line for c in part)]
    return tuple([(line, count) for line, count in rows if line is not None])


def _summing(part: Sequence[Cost], backward_s: float) -> Summing:
    """The sums of a stage once per step, whose last backward takes `backward_s`."""
    summed_s, copies_s, beside_s = (
        sum(getattr(c, name) for c in part) for name in ("summed_s", "copies_s", "beside_s")
    )
    sums, contention = (one for c in part for one in c.sums), part[0].contention
    return Summing.of(sums, summed_s, copies_s, backward_s, beside_s, contention)


def _added_twice_s(part: Sequence[Cost]) -> float:
    """Seconds that the pieces of one stage have too many of together in their backwards: each is priced with the
    addition of the gradient of a weight that several of them read, which happens once per stage."""
    adds = [each for c in part for each in c.adds]
    return sum(seconds for _, seconds in adds) - sum(dict(adds).values())


def _in_order_s(part: Sequence[Cost], way: int) -> float:
    """Seconds of a pass over a stage in program order; no less than with the collectives of each run of blocks
    overlapped by all compute of the run, and all others hidden, so that bounds hold (problem.pass_tables)."""
    least_s = sum((c.micro_s - c.forward_s if way else c.forward_s) if c.block else c.work_s[way] for c in part)
    return max(least_s, sum(c.work_s[way] for c in part) + waits_s(_in_a_row(part), way, part[0].contention))


def _each_s(part: Sequence[Cost], took_s: Sequence[float], way: int) -> float:
    """Seconds by which the sums after a microbatch take longer in this stage (once_per_step.each_s) than the prices of
    its pieces say.

    `took_s`: seconds of the backward of each piece. `way`: the index into `Cost.each_s`.
    """
    if not any(c.each for c in part):
        return 0.0
    priced_s = sum(c.each_s[way] for c in part)
    backward = [(max(0.0, own_s - c.each_s[way]), c.each) for own_s, c in zip(took_s, part, strict=True)][::-1]
    return max(0.0, each_s(backward, part[0].contention) - priced_s)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The costs of all pieces of a model on one kind of place, and their costs where their forward runs `again` in the
    backward."""

    costs: Sequence[Cost]
    again: Sequence[Cost]

    @cached_property
    def table(self) -> Table:
        """Time and memory of any stretch of them."""
        return Table(self.costs, self.again)


class Table:
    """Prefix sums over the pieces, from which time and memory of any stretch `[first, stop)` follow in constant
    time."""

    def __init__(self, costs: Sequence[Cost], again: Sequence[Cost]) -> None:
        self.count = len(costs)
        self.seconds = _sums([c.micro_s for c in costs])
        self.more = _sums([b.micro_s - a.micro_s for a, b in zip(costs, again, strict=True)])
        rest, kept, halfway = (
            _sums([getattr(c, name) for c in costs]) for name in ("rest_bytes", "kept_bytes", "halfway_bytes")
        )
        self.freed = _sums([max(0.0, a.kept_bytes - b.kept_bytes) for a, b in zip(costs, again, strict=True)])
        live = np.array([c.live_bytes for c in costs])
        self.live_again = np.array([c.live_bytes for c in again])
        self._most = [live.tolist()]  # [n][i]: the maximum over the 2^n pieces from i on
        while 2 ** len(self._most) <= self.count:
            last, half = self._most[-1], 2 ** (len(self._most) - 1)
            self._most.append([max(pair) for pair in zip(last, last[half:], strict=False)])
        self._most_live = float(live.max())
        self._slower = bool((np.diff(self.more) >= 0).all())  # no piece is faster where it runs again
        # lists: faster to read one by one
        self._seconds, self._more, self._rest, self._kept, self._halfway, self._freed = (
            sums.tolist() for sums in (self.seconds, self.more, rest, kept, halfway, self.freed)
        )
        self._live_again = [c.live_bytes for c in again]

    def again(self, first: int, stop: int, flying: Flying, limit_bytes: float, spare_bytes: float = 0.0) -> int | None:
        """How many of the first pieces of `[first, stop)` must run again for the stage to fit into `limit_bytes`; None
        where running all of them again is not enough. `spare_bytes`: the least that is reserved for what exists only
        while a piece runs."""
        held = self.held(first, stop, flying)
        if (
            held + max(self._most_live, spare_bytes) <= limit_bytes
            or held + (live := max(spare_bytes, self.live(first, stop))) <= limit_bytes
        ):
            return 0
        rerun = self._rerun_bytes(first, stop, flying, live)
        return next((again for again, nbytes in enumerate(rerun, 1) if nbytes <= limit_bytes), None)

    def rest(self, first: int, stop: int) -> float:
        """Bytes of parameters and their state in `[first, stop)`."""
        return self._rest[stop] - self._rest[first]

    def kept(self, first: int, stop: int) -> float:
        """Bytes that `[first, stop)` keeps of a microbatch in flight, with nothing run again."""
        return self._kept[stop] - self._kept[first]

    def halfway(self, first: int, stop: int) -> float:
        """Bytes that `[first, stop)` keeps more of a microbatch between the two parts of its backward."""
        return self._halfway[stop] - self._halfway[first]

    def held(self, first: int, stop: int, flying: Flying) -> float:
        """Bytes of parameters and their state in `[first, stop)`, and of what the microbatches in flight keep."""
        return (
            self.rest(first, stop) + flying.kept * self.kept(first, stop) + flying.halfway * self.halfway(first, stop)
        )

    def saved(self, first: int, stop: int, flying: Flying) -> float:
        """Bytes that the microbatches in flight keep less where `[first, stop)` runs again."""
        return flying.kept * (self._freed[stop] - self._freed[first])

    def least_bytes(self, first: int, stop: int, flying: Flying) -> float:
        """The fewest bytes of a stage of `[first, stop)`, over all numbers of its first pieces that run again."""
        live = self.live(first, stop)
        return min(self.held(first, stop, flying) + live, *self._rerun_bytes(first, stop, flying, live))

    def _rerun_bytes(self, first: int, stop: int, flying: Flying, live: float) -> Iterator[float]:
        """Bytes of a stage of `[first, stop)` with its first piece run again, its first two, ...; `live`: the least
        bytes of what exists only while a piece runs."""
        held, freed = self.held(first, stop, flying), self._freed
        for piece in range(first, stop):
            live = max(live, self._live_again[piece])
            yield held + live - flying.kept * (freed[piece + 1] - freed[first])

    def need(self, flying: Flying, first: int = 0, stop: int | None = None) -> Need:
        """The memory that a stage of `[first, stop)`, or of all pieces, needs. Of what exists only while a piece runs,
        the median over the pieces."""
        stop = self.count if stop is None else stop
        live, live_again = (float(np.median(each[first:stop])) for each in (self._most[0], self.live_again))
        return Need(self.held(first, stop, flying), self.saved(first, stop, flying), live, live_again)

    def live(self, first: int, stop: int, again: int = 0) -> float:
        """The most bytes in `[first, stop)` that exist only while a piece runs, where the first `again` run again: the
        maximum over two stretches of 2^n pieces that cover it, and over those."""
        power = (stop - first).bit_length() - 1
        most = max(self._most[power][first], self._most[power][stop - 2**power])
        return max([most, *self._live_again[first : first + again]])

    def slow(self, first: int, stop: int, limit_s: float) -> bool:
        """Whether a stage takes longer than `limit_s` however many of its pieces run again."""
        return self._slower and self._seconds[stop] - self._seconds[first] > limit_s

    def time_s(self, first: int, stop: int, again: int) -> float:
        """Seconds of one microbatch in a stage whose first `again` pieces run again."""
        return self._seconds[stop] - self._seconds[first] + self._more[first + again] - self._more[first]


def _sums(values: Sequence[float]) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(values)])
