"""Prefetching: gathers of weights that start before they are needed and run in the background of compute.

Every step gathers the same weights in the same order. The `Orders` of a stage are recorded in its first step,
separately for forward and backward, as torch's FSDP2 does, and followed from then on. A *unit* is all that one block
gathers, or one weight that the model itself gathers. When a unit begins, the gathers of the next unit start, and those
of further units until BUCKET_BYTES are on their way, since small gathers hide nothing. So memory holds one unit more
than is in use.

A gather over several axes is a chain of collectives, each on the result of the one before. The last one starts one unit
before the weight is needed, each earlier one a unit before its successor, so that each has the time of a unit to run
(`prefetching.timetable`). Until the last one, only a fraction of the weight is in memory.

A pass that deviates from the recorded order (a parameter was frozen) gathers the rest on demand, and the order is
recorded again. What starts when depends only on which gathers run, not on values or on one rank's shards, so it is the
same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import proxy

import torch
from torch import Tensor

from autopar._torch import at_end_of_backward
from autopar.buckets import BUCKET_BYTES
from autopar.layout import Layout, most_elements, moving, steps
from autopar.prefetching import timetable
from autopar.runtime.mesh import Mesh
from autopar.runtime.moves import Chain, relayout
from autopar.runtime.params import Held
from autopar.runtime.stack import pushed
from autopar.runtime.turns import Turn


@dataclass(frozen=True, slots=True)
class Fetch:
    """How a weight of whole `shape` is gathered: its shard as `turn` makes it, from layout `src` to `dst`. The gather
    belongs to `unit`; `name` is for runtime.count."""

    turn: Turn
    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    mesh: Mesh = field(compare=False)
    name: str = field(compare=False)
    unit: Any = field(compare=False)

    def at_once(self, x: Tensor) -> Tensor:
        """The weight, gathered now of the shard `x`."""
        return relayout(self.turn.of(x), self.src, self.dst, self.shape, self.mesh, self.name)

    def ahead(self, x: Tensor) -> Chain:
        """The gather of the shard `x` in the background, not begun yet."""
        return Chain(self.turn.of(x), self.src, self.dst, self.shape, self.mesh, self.name, behind=True)


@dataclass(frozen=True, slots=True)
class Call:
    """One gather, of the leaf of `held` (None: of another tensor, which cannot begin ahead), of `nbytes` on the fullest
    rank, in so many collectives."""

    held: Held | None
    fetch: Fetch
    nbytes: int
    legs: int

    @property
    def unit(self) -> Any:
        """What the gather belongs to."""
        return self.fetch.unit


@dataclass(frozen=True)
class Learned:
    """The recorded gathers of one kind of pass, in order; and for each gather the numbers of those that start a
    collective before it is used (`prefetching.timetable`)."""

    calls: tuple[Call, ...]
    due: Mapping[int, tuple[int, ...]]


NOTHING = Learned((), {})  # of a pass that has not been recorded yet


class Orders:
    """The recorded orders of the passes over one stage, by kind of pass ("forward", "backward", "evaluation");
    `held_of` maps a leaf to its parameter."""

    def __init__(self, held_of: Callable[[Tensor], Held | None], mesh: Mesh, ahead_bytes: float = BUCKET_BYTES) -> None:
        self.held_of, self.mesh, self.ahead_bytes = held_of, mesh, ahead_bytes
        self.known: dict[str, Learned] = {}
        self._first: dict[str, Going] = {}  # pass of this step, by kind
        self._open: dict[Going, None] = {}

    def step(self) -> None:
        """Begin a step: from now on follow the orders that the first pass of each kind recorded in the last step, and
        drop passes that an error left open."""
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
        """Begin a pass of this kind."""
        made = Going(self, self.known.get(kind, NOTHING))
        self._first.setdefault(kind, made)
        self._open[made] = None
        return made

    def over(self, going: Going) -> None:
        """End a pass."""
        self._open.pop(going, None)

    def call(self, leaf: Tensor, fetch: Fetch) -> Call:
        """The Call of one gather."""
        sizes = self.mesh.sizes
        way = moving(steps(fetch.src, fetch.dst, sizes), sizes)
        gathers = any(step.kind == "all_gather" for step in way)
        dtype = fetch.turn.casts[-1] if fetch.turn.casts else leaf.dtype
        nbytes = most_elements(fetch.shape, fetch.dst, sizes) * dtype.itemsize
        return Call(self.held_of(leaf) if gathers else None, fetch, nbytes, len(way))


class Going:
    """One running pass in one direction. It records its gathers, and prefetches by `learned` as long as these agree
    with it."""

    def __init__(self, orders: Orders, learned: Learned) -> None:
        self.orders, self.plan = proxy(orders), learned.calls  # weak: `orders` hold this pass until the next step
        self.seen: list[Call] = []
        self.ended = False
        self._due = dict(learned.due)
        self._begun: dict[int, tuple[Chain, int]] = {}  # by number, with the version of what is gathered

    def take(self, x: Tensor, fetch: Fetch, leaf: Tensor) -> Tensor:
        """Gather a weight of its shard `x`, which may have begun already. `leaf` is `x` as autograd sees it."""
        if self.ended:
            return fetch.at_once(x)
        call, at = self.orders.call(leaf, fetch), len(self.seen)
        self.seen.append(call)
        if self.plan and (at >= len(self.plan) or self.plan[at] != call):
            self.leave()
        self._go_on(at)
        chain, version = self._begun.pop(at, (None, -1))
        whole = chain.finish() if chain is not None else None
        return whole if whole is not None and version == leaf._version else fetch.at_once(x)

    def begin(self) -> None:
        """Start the gathers that are due before the first one is used."""
        self._go_on(0)

    def take_back(self, x: Tensor, fetch: Fetch, leaf: Tensor) -> Tensor:
        """`take` in a backward; the pass ends when the backward does."""
        if not self.seen and not self.ended:
            at_end_of_backward(self.end)
        return self.take(x, fetch, leaf)

    def end(self) -> None:
        """End the pass."""
        self.leave()
        self.ended = True
        self.orders.over(self)

    def leave(self) -> None:
        """Stop following the recorded order."""
        self.drop()
        self.plan, self._due = (), {}

    def drop(self) -> None:
        """Discard the gathers that have started; running collectives are waited for, since all ranks take part in
        them."""
        for chain, _ in self._begun.values():
            chain.wait()
        self._begun = {}

    @torch.no_grad()
    def _go_on(self, at: int) -> None:
        """Start the collectives that are due before gather number `at`, the next one, is used."""
        for number in self._due.pop(at, ()):
            held = self.plan[number].held
            if held is not None:
                if number not in self._begun:
                    self._begun[number] = self._chain(self.plan[number], held)
                self._begun[number][0].go_on()

    def _chain(self, call: Call, held: Held) -> tuple[Chain, int]:
        if held.ready is not None:
            held.ready()
        return call.fetch.ahead(held.leaf.detach()), held.leaf._version


_units: list[Any] = []  # blocks that are running, innermost last


def within(unit: Any) -> AbstractContextManager[None]:
    """A context in which gathers belong to `unit`."""
    return pushed(_units, unit)


def unit_here() -> Any:
    """The running block; outside of blocks a new unit."""
    return _units[-1] if _units else object()
