"""Where to cut a model into stages of consecutive pieces: such that the slowest stage and the busiest link are as fast
as possible and each stage fits the memory of its place. Pieces are priced on the device of the stage's place."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from autopar.errors import InfeasibleError
from autopar.pipeline.filling import Cuts, Filling, Links, piece_ranges
from autopar.pipeline.memory_shares import Budgets
from autopar.pipeline.orders import Flying
from autopar.pipeline.stretches import Pieces, Table, memory_bytes
from autopar.text import gibibytes

PRECISION = 1e-6
"""Relative precision of the bisection, in seconds."""

NEAR = 0.1
"""Relative distance to the lower bound below which every second trial asks whether anything is faster than the best cut
at all, which ends the bisection early."""


def balance(
    pieces: Sequence[Pieces],
    in_flight: Sequence[Flying],
    limits: Sequence[float],
    sends_s: Sequence[float] = (),
    barred: Sequence[int] = (),
    at: Sequence[int] = (),
    *,
    needed: Sequence[int] = (),
    by_place: bool = False,
) -> Cuts:
    """The cut whose slowest stage is fastest, by bisection over the time of a stage: for a given time, each stage takes
    as many pieces as that time and its memory allow. As few pieces are run again in the backward as memory requires.

        pieces      per stage: the costs of all pieces on the place of the stage
        in_flight   per stage: the number of microbatches whose activations it keeps at a time
        limits      per stage: the bytes that its place has per device
        at          per stage: its place (empty: each stage on its own)
        sends_s     per piece: seconds to send, in one direction, what crosses a cut in front of it (empty: nothing). A
                    link is not busy, in both directions together, for longer than the slowest stage takes, unless every
                    cut exceeds that
        barred      pieces in front of which no cut is allowed
        needed      pieces (with parameters) of which each place should have one. Where the fastest cut leaves a place
                    without, the first or the last stage of each place is forced to have one, if there is such a cut
        by_place    balance places first and stages second, not the other way round: faster with many microbatches,
                    slower with so few that a microbatch returns to its first place before that is done with the others

    Raises InfeasibleError where no cut fits, with the missing bytes, and without them where there are fewer possible
    cuts than stages want.
    """
    at, count = at or range(len(pieces)), len(pieces[0].costs)
    plain = Links(count, sends_s, barred)
    if plain.count_of_cuts < len(at) - 1:
        raise InfeasibleError(
            f"no cut into {len(at)} stages: {plain.count_of_cuts} of {plain.count - 1} places to cut at are not "
            "between what reads a buffer and what changes it"
        )
    made = _fastest(pieces, in_flight, limits, plain, at, by_place=by_place)
    if made is not None and _lacking(made.cuts, count, needed, at):
        ends = dict.fromkeys((range(len(set(at))), range(len(at) - len(set(at)), len(at))))
        ways = [
            links
            for links in (Links(count, sends_s, barred, needed, whose) for whose in ends)
            if links.last_ends(links.ends(math.inf), len(at))
        ]
        fit = [_fastest(pieces, in_flight, limits, links, at, by_place=by_place) for links in ways]
        made = min((way for way in fit if way is not None), key=Filling.longest_s, default=None if ways else made)
    if made is None:
        raise _too_little(pieces, in_flight, limits, plain, len(set(at)))
    return made.cuts


def _lacking(cuts: Cuts, count: int, needed: Sequence[int], at: Sequence[int]) -> bool:
    """Whether some place has none of the `needed` pieces (False where none are)."""
    return bool(needed) and {
        place
        for place, (first, stop) in zip(at, piece_ranges(cuts.bounds, count), strict=True)
        if bisect_left(needed, first) < bisect_left(needed, stop)
    } != set(at)


def _fastest(
    pieces: Sequence[Pieces],
    in_flight: Sequence[Flying],
    limits: Sequence[float],
    links: Links,
    at: Sequence[int],
    *,
    by_place: bool,
) -> Filling | None:
    """The fastest cut that `links` allow; None where no cut fits in memory."""
    tables, places = [here.table for here in pieces], len(set(at))
    several = len(at) > places
    stages = [*zip(tables, in_flight, strict=True)]
    needs = {(table, flying): table.need(flying) for table, flying in dict.fromkeys(stages)}  # few differ
    budgets = Budgets(at, limits, [needs[stage] for stage in stages])

    def fill(stage_s: float, mean_s: float) -> Filling | None:
        made = Filling(tables, links, in_flight, budgets, stage_s, mean_s)
        return made if made.fill() else None

    # some pieces may be faster where they run again
    stage_s = max(
        links.fullest_s, *(float(table.seconds[-1] + np.maximum(0.0, np.diff(table.more)).sum()) for table in tables)
    )
    mean_s = stage_s if several else math.inf
    best = fill(stage_s, mean_s)
    if best is None:
        return None
    even_s, piece_s = _lower_bounds_s(tables)
    for of_places in sorted({False, several}, reverse=by_place):
        if of_places:
            best = _bisected(partial(fill, stage_s), best, max(even_s, piece_s * places / len(at)), Filling.mean_s)
            mean_s = best.mean_s() * (1 + PRECISION)
        else:
            best = _bisected(partial(fill, mean_s=mean_s), best, max(even_s, piece_s), Filling.longest_s)
            stage_s = best.longest_s() * (1 + PRECISION)
    return best


def _bisected(
    fill: Callable[[float], Filling | None], best: Filling, fastest: float, seconds: Callable[[Filling], float]
) -> Filling:
    """The cut of least `seconds`: bisection (in the logarithm) between those of `best`, a known cut, and the lower
    bound `fastest`. `fill` gives a cut within given seconds, or None."""
    slowest, below = seconds(best), False
    while slowest > fastest * (1 + PRECISION):
        below = not below and slowest <= fastest * (1 + NEAR)
        limit_s = slowest * (1 - PRECISION) if below else math.sqrt(slowest * fastest)
        found = fill(limit_s)
        if found is None:
            fastest = limit_s
        else:
            best, slowest = found, min(limit_s, seconds(found))
    return best


def _lower_bounds_s(tables: Sequence[Table]) -> tuple[float, float]:
    """Two lower bounds in seconds of the slowest stage: an even share of all pieces, and the longest piece. Each piece
    counts where it is fastest, but the first and the last one on the first and the last stage."""
    each = np.min([np.diff(table.seconds) for table in dict.fromkeys(tables)], axis=0)
    return float(each.sum()) / len(tables), float(
        max(each.max(), tables[0].seconds[1], tables[-1].seconds[-1] - tables[-1].seconds[-2])
    )


def _too_little(
    pieces: Sequence[Pieces], in_flight: Sequence[Flying], limits: Sequence[float], links: Links, places: int
) -> InfeasibleError:
    """The error where no cut fits, with the missing bytes: the mean need of places exceeds the mean memory, or a
    stretch of pieces that no cut divides exceeds every place, or no cut is even enough."""
    even, there = memory_bytes((pieces[0].again, max(in_flight))) / places, sum(limits) / len(limits)
    missing, alone, limit = max(
        _shortage(pieces, in_flight, limits, *stretch) for stretch in itertools.pairwise([0, *links.ends(math.inf)])
    )
    if missing > max(0.0, even - there):
        why = f"what no cut takes apart needs {gibibytes(alone)} of one place, {gibibytes(limit)} are there"
    elif even > there:
        why = f"they need about {gibibytes(even)} each, {gibibytes(there)} are there"
    else:
        why = (
            f"even ones would need about {gibibytes(even)} each and {gibibytes(there)} are there, but no cut is even "
            f"enough, with what none takes apart of up to {gibibytes(alone)}"
        )
    return InfeasibleError(
        f"no cut into {len(in_flight)} stages fits: {why}", missing_bytes=max(0.0, missing, even - there)
    )


def _shortage(
    pieces: Sequence[Pieces], in_flight: Sequence[Flying], limits: Sequence[float], first: int, stop: int
) -> tuple[float, float, float]:
    """(missing, needed, available) bytes of a stage of pieces [first, stop) with recomputation, on the place where it
    lacks least; missing is below 0 where it fits."""
    stages = {(here.table, flying, limit) for here, flying, limit in zip(pieces, in_flight, limits, strict=True)}
    needs = [(table.least_bytes(first, stop, flying), limit) for table, flying, limit in stages]
    return min((nbytes - limit, nbytes, limit) for nbytes, limit in needs)
