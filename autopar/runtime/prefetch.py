"""Gathers of weights that begin before they are needed, in the background of what computes.

Every step gathers the same weights in the same order. The `Orders` of a stage are learned in its first step, forward and backward apart, as
torch's FSDP2 learns them, and followed from then on. All that one block gathers is a *unit*, and so is each weight that the model itself gathers.
When a unit begins, the gathers of the unit behind it begin too, and further ones until BUCKET_BYTES are on their way: small ones would hide
nothing. So one unit more is in memory than is used. A gather over several axes is a chain of collectives, each of what the one before it has
brought: its first one begins as far ahead, its last one with the unit before, and each of the others one unit earlier than the one behind it, so that
all of them have a unit's time (`prefetching.ends`, `timetable`). What has come so far is a fraction of the weight. A pass that does something else than was
learned (a parameter was frozen) gathers the rest when it needs it, and the order is learned anew.

What begins when follows from what runs alone, not from values or from what one rank has, so it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import proxy

import torch
from torch import Tensor

from autopar._torch import at_end_of_backward
from autopar.layout import BUCKET_BYTES, Layout, most_elements, moving, steps
from autopar.prefetching import ends
from autopar.runtime.mesh import Mesh
from autopar.runtime.moves import Chain, relayout
from autopar.runtime.params import Held
from autopar.runtime.stack import pushed
from autopar.runtime.turns import Turn


@dataclass(frozen=True, slots=True)
class Call:
    """One gather, of the leaf of `held` (None: of another tensor, which cannot begin ahead) as `turn` makes it, of `nbytes` on the fullest
    rank, in so many collectives."""

    held: Held | None
    turn: Turn
    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    nbytes: int
    legs: int
    name: str = field(compare=False)
    unit: Any = field(compare=False)


class Part(Protocol):
    """What is to know of a gather in a plan."""

    @property
    def unit(self) -> Any:
        """What it belongs to."""

    @property
    def nbytes(self) -> float:
        """Bytes of the result on the fullest rank."""

    @property
    def legs(self) -> int:
        """Collectives, one after the other."""


@dataclass(frozen=True)
class Learned:
    """What a kind of pass gathers, in order, and what of it goes on when (`timetable`)."""

    calls: tuple[Call, ...]
    due: Mapping[int, tuple[int, ...]]


NOTHING = Learned((), {})


class Orders:
    """How the passes over one stage gather, by kind of pass; `held_of` says whose leaf a tensor is."""

    def __init__(self, held_of: Callable[[Tensor], Held | None], mesh: Mesh, ahead_bytes: float = BUCKET_BYTES) -> None:
        self.held_of, self.mesh, self.ahead_bytes = held_of, mesh, ahead_bytes
        self.known: dict[str, Learned] = {}
        self._first: dict[str, Going] = {}  # pass of this step, by kind
        self._open: dict[Going, None] = {}

    def step(self) -> None:
        """A step begins: what the first passes of the last one did is what comes next. Passes that an error has left end."""
        for going in self._open:
            going.drop()
        for kind, going in self._first.items():
            calls = tuple(going.seen)
            if going.ended and calls != self._calls(kind):
                self.known[kind] = Learned(calls, timetable(calls, self.ahead_bytes))
        self._first, self._open = {}, {}

    def _calls(self, kind: str) -> tuple[Call, ...]:
        return self.known.get(kind, NOTHING).calls

    def going(self, kind: str) -> Going:
        """A pass of some kind begins."""
        made = Going(self, self.known.get(kind, NOTHING))
        self._first.setdefault(kind, made)
        self._open[made] = None
        return made

    def over(self, going: Going) -> None:
        """A pass has ended."""
        self._open.pop(going, None)

    def call(self, x: Tensor, turn: Turn, src: Layout, dst: Layout, shape: tuple[int, ...], name: str, unit: Any) -> Call:
        """What is known of one gather."""
        way = moving(steps(src, dst, self.mesh.sizes), self.mesh.sizes)
        gathers = any(step.kind == "all_gather" for step in way)
        nbytes = most_elements(shape, dst, self.mesh.sizes) * (turn.casts[-1] if turn.casts else x.dtype).itemsize
        return Call(self.held_of(x) if gathers else None, turn, src, dst, shape, nbytes, len(way), name, unit)


class Going:
    """One pass in one direction, which follows what was learned as far as it does that (nothing: it learns)."""

    def __init__(self, orders: Orders, learned: Learned) -> None:
        self.orders, self.plan = proxy(orders), learned.calls  # which hold it until the next step
        self.seen: list[Call] = []
        self.ended = False
        self._due = dict(learned.due)
        self._begun: dict[int, tuple[Chain, int]] = {}  # by number, with the version of what is gathered

    def take(self, x: Tensor, src: Layout, dst: Layout, shape: tuple[int, ...], mesh: Mesh, name: str = "", *,
             leaf: Tensor, turn: Turn, unit: Any) -> Tensor:
        """As `relayout` of `x` as `turn` makes it, of a gather that may have begun. `leaf` is `x` as autograd has it; the gather belongs to `unit`."""
        if self.ended:
            return relayout(turn.of(x), src, dst, shape, mesh, name)
        call, at = self.orders.call(leaf, turn, src, dst, shape, name, unit), len(self.seen)
        self.seen.append(call)
        if self.plan and (at >= len(self.plan) or self.plan[at] != call):
            self.leave()
        self._go_on(at)
        chain, version = self._begun.pop(at, (None, -1))
        whole = chain.finish() if chain is not None else None
        return whole if whole is not None and version == leaf._version else relayout(turn.of(x), src, dst, shape, mesh, name)

    def begin(self) -> None:
        """The pass comes next: its first gathers begin."""
        self._go_on(0)

    def take_back(self, *args: Any, **kwargs: Any) -> Tensor:
        """`take` in a backward, at whose end the pass ends."""
        if not self.seen and not self.ended:
            at_end_of_backward(self.end)
        return self.take(*args, **kwargs)

    def end(self) -> None:
        """The pass is over."""
        self.leave()
        self.ended = True
        self.orders.over(self)

    def leave(self) -> None:
        """Follow the plan no longer."""
        self.drop()
        self.plan, self._due = (), {}

    def drop(self) -> None:
        """What has begun is not wanted; what of it runs is waited for, since all ranks take part in it."""
        for chain, _ in self._begun.values():
            chain.wait()
        self._begun = {}

    @torch.no_grad()
    def _go_on(self, at: int) -> None:
        """Number `at` is next; where it begins its unit, gathers begin and go on."""
        for number in self._due.pop(at, ()):
            held = self.plan[number].held
            if held is not None:
                if number not in self._begun:
                    self._begun[number] = self._chain(self.plan[number], held)
                self._begun[number][0].go_on()

    def _chain(self, call: Call, held: Held) -> tuple[Chain, int]:
        if held.ready is not None:
            held.ready()
        return Chain(call.turn.of(held.leaf.detach()), call.src, call.dst, call.shape, self.orders.mesh, call.name, behind=True), held.leaf._version


def timetable(plan: Sequence[Part], ahead_bytes: float) -> dict[int, tuple[int, ...]]:
    """By the number of each gather of `plan` that begins a unit: the gathers that go on then, each by one collective, in this order (`prefetching.ends`).

    What the unit itself needs has begun all of its collectives before others begin, which would be in front of it on an axis of theirs.
    """
    starts = [at for at, part in enumerate(plan) if not at or plan[at - 1].unit != part.unit]
    stops = [*starts, len(plan)][1:]  # where each unit ends
    nbytes = [sum(part.nbytes for part in plan[at:stop]) for at, stop in zip(starts, stops, strict=True)]
    ways = {part.legs for part in plan}
    begun, due = [0] * len(plan), {}
    for unit, at in enumerate(starts):
        until = {legs: [stops[end - 1] for end in ends(nbytes, unit, legs, ahead_bytes)] for legs in ways}
        reached = max(stop for each in until.values() for stop in (at, *each))
        wanted = {number: sum(number < stop for stop in until[plan[number].legs]) for number in range(at, reached)}
        rounds = [[number for number, legs in wanted.items() if (number < stops[unit]) == own and begun[number] <= leg < legs] for own in (True, False) for leg in range(max(ways))]
        due[at] = tuple(number for here in rounds for number in here)
        for number in due[at]:
            begun[number] += 1
    return due


_units: list[Any] = []  # blocks that are running, innermost last


def within(unit: Any) -> AbstractContextManager[None]:
    """Where what is gathered belongs to `unit`."""
    return pushed(_units, unit)


def unit_here() -> Any:
    """The block that is running; outside of blocks a unit of its own."""
    return _units[-1] if _units else object()
