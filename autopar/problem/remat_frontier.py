"""Which results of a block to keep when it is run again: seconds against bytes, exactly.

An operator whose result is needed again is run again, and then needs its operands, or its result is kept. For a price
of y seconds per byte the cheapest way is a minimum cut:

    needed -> again    capacity y x bytes of the result (infinite where it cannot be kept): needed, and not run again,
                       is kept
    again -> sink      capacity seconds: run again
    again -> needed    of each operand, infinite
    source -> needed   infinite, for what the backward saves

All y together give the lower convex hull of (seconds, bytes); between its corners nothing is better than their line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import networkx as nx

from autopar.problem.graph import Program
from autopar.problem.rerun import keepable, rerun, saves_results


@dataclass(frozen=True, slots=True)
class Point:
    """One way to run a block again: the seconds of the operators that run again, and the results that are `kept`, with
    their bytes."""

    seconds: float
    nbytes: float
    kept: tuple[str, ...]


def point(
    program: Program, scope: str, seconds: Mapping[str, float], nbytes: Mapping[str, float], kept: tuple[str, ...]
) -> Point:
    """The point of one choice; `seconds` and `nbytes` are by operator. Results that turn out not to be needed are not
    kept."""
    about = rerun(program, scope, kept)
    return Point(
        sum(seconds[name] for name in about.again),
        sum(nbytes[name] for name in about.kept),
        tuple(name for name in about.order if name in about.kept),
    )


@dataclass(frozen=True)
class Choices:
    """All that can be kept of the blocks `scope`; `seconds` and `nbytes` are by operator."""

    program: Program
    scope: str
    seconds: Mapping[str, float]
    nbytes: Mapping[str, float]

    def at(self, price: float) -> Point:
        """The best at `price` seconds per byte."""
        return point(
            self.program,
            self.scope,
            self.seconds,
            self.nbytes,
            _cut(self.program, self.scope, self.seconds, self.nbytes, price),
        )

    @property
    def corners(self) -> list[Point]:
        """The corners of the convex hull, from nothing kept to the least seconds."""
        first, *last = self.ends
        return [first, *(corner for end in last for corner in (*self._between(first, end), end))]

    @property
    def ends(self) -> list[Point]:
        """The first and the last of the corners; one where they are the same."""
        return list(dict.fromkeys((self.at(math.inf), self.at(0.0))))

    def fastest(self, fits: Callable[[Point], bool]) -> Point:
        """The last of the corners for which there is room; the first one where there is for none. Where one fits all
        before it do."""
        more, less = self.at(math.inf), self.at(0.0)
        if fits(less):
            return less
        while (found := self.amid(more, less)) is not None:
            more, less = (found, less) if fits(found) else (more, found)
        return more

    def _between(self, more: Point, less: Point) -> list[Point]:
        """The corners between two points, the first of more seconds and less bytes."""
        found = self.amid(more, less)
        return [] if found is None else [*self._between(more, found), found, *self._between(found, less)]

    def amid(self, more: Point, less: Point) -> Point | None:
        """A corner between two of them, the first of more seconds and less bytes; None where there is none."""
        if more.seconds <= less.seconds or less.nbytes <= more.nbytes:
            return None
        price = (more.seconds - less.seconds) / (less.nbytes - more.nbytes)
        found = self.at(price)
        line = more.seconds + price * more.nbytes
        return None if found in (more, less) or found.seconds + price * found.nbytes >= line * (1 - 1e-9) else found


def _cut(
    program: Program, scope: str, seconds: Mapping[str, float], nbytes: Mapping[str, float], price: float
) -> tuple[str, ...]:
    """What to keep at `price` seconds per byte (infinite: nothing)."""
    whole = rerun(program, scope, ())
    graph = nx.DiGraph()
    graph.add_edge("source", "sink", capacity=0.0)
    ops = [program.ops[name] for name in whole.order if program.ops[name].role == "op" and whole.reached(name)]
    for op in ops:
        kept = price * nbytes[op.name] if keepable(op) and math.isfinite(price) else None
        _edge(graph, ("needed", op.name), ("again", op.name), kept)
        _edge(graph, ("again", op.name), "sink", seconds[op.name])
        if saves_results(op):
            _edge(graph, "source", ("needed", op.name), None)
        for index, (name, _) in enumerate(op.operands):
            if program.ops[name].role == "op" and program.ops[name].scope == scope:
                _edge(graph, ("again", op.name), ("needed", name), None)
                if index in op.read_back:
                    _edge(graph, "source", ("needed", name), None)
    _, (near, _) = nx.minimum_cut(graph, "source", "sink")
    return tuple(op.name for op in ops if ("needed", op.name) in near and ("again", op.name) not in near)


def _edge(graph: nx.DiGraph, tail: object, head: object, capacity: float | None) -> None:
    """An edge, without a limit where `capacity` is None."""
    graph.add_edge(tail, head, **({} if capacity is None else {"capacity": capacity}))
