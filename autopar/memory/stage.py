"""The profile of one microbatch in one stage: bytes at each time of its forward and backward, and what is kept between
them. Made by memory.predict, read by memory.place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.codegen.edges import Edges
from autopar.memory.backward import Backward
from autopar.memory.forward import Forward
from autopar.memory.shares import Shares
from autopar.memory.storages import Book, Storage
from autopar.memory.types import Entry
from autopar.memory.walked import Part, Split
from autopar.pipeline.transit import Kind
from autopar.problem.graph import Op


@dataclass(eq=False)
class Profile:
    """The storages of one microbatch in one stage.

    turn            the time at which the forward ends
    gradients       the gradients of parameters that this backward makes and that stay
    transit_bytes   by kind, bytes of one microbatch on its way to the stage or from it
    whole           the profile of microbatches whose backward is one action, where that of others is divided

    Of a backward in two parts, for inputs and for weights:
    waiting_bytes   gradients of activations that exist between the two parts
    early           what the forward kept and the part for inputs frees
    weights_bytes   what the part for weights allocates
    """

    book: Book
    turn: int
    gradients: list[Storage]
    waiting_bytes: float = 0.0
    early: Sequence[Storage] = ()
    weights_bytes: float = 0.0
    transit_bytes: Mapping[Kind, float] = field(default_factory=dict)
    whole: Profile | None = None

    def walked(self, kind: str) -> Profile:
        """The profile of an action of that kind."""
        return self.whole if kind == "B" and self.whole is not None else self

    @cached_property
    def totals(self) -> np.ndarray:
        """Bytes alive at each time."""
        return self.book.totals()

    @cached_property
    def kept(self) -> list[Storage]:
        """What is alive between forward and backward."""
        return [s for s in self.book.storages if s.nbytes and s.born <= self.turn < s.last]

    @cached_property
    def kept_bytes(self) -> float:
        """Bytes that a microbatch in flight keeps."""
        return sum(s.total for s in self.kept)

    @cached_property
    def halfway_bytes(self) -> float:
        """Bytes by which a microbatch that waits for the part for weights holds more than one in flight."""
        return self.waiting_bytes - sum(s.total for s in self.early)

    def peak(self, *, forward: bool) -> tuple[float, int]:
        """The most bytes of one direction, and when."""
        start, stop = (0, self.turn + 1) if forward else (self.turn + 1, len(self.totals))
        if start >= stop:
            return 0.0, self.turn
        time = start + int(np.argmax(self.totals[start:stop]))
        return float(self.totals[time]), time

    def share(self, time: int, *, forward: bool) -> float:
        """When in its direction a time is, from 0 to 1."""
        start, stop = (0, self.turn) if forward else (self.turn + 1, len(self.totals) - 1)
        return min(1.0, max(0.0, (time - start) / (stop - start))) if stop > start else 0.5

    def entries(self, time: int) -> list[Entry]:
        """What is alive at a time."""
        return [self.book.entry(s) for s in self.book.storages if s.nbytes and s.alive(time)]


def profile(
    shares: Shares,
    edges: Edges,
    extra_bytes: Callable[[Op], float],
    part: Part,
    *,
    training: bool,
    stay: bool,
    split: Split = "",
) -> Profile:
    """Walk one microbatch through `part`, forward and, in training, backward. `stay`: it is the only microbatch, so its
    backward makes the gradients of parameters. `split`: how its backward is taken apart."""
    forward = Forward(shares, edges, extra_bytes, Book(), part)
    forward.walk()
    turn = forward.book.now
    if not training:
        _stay(forward)
        return Profile(forward.book, turn, [])
    backward = Backward(forward, stay=stay, split=split)
    backward.walk()
    received = [forward.values[ref] for ref in part.receives]
    transit: dict[Kind, float] = {
        "activation": sum(shares.value(value.ref, shares.lies(value.ref).value) for value in received),
        "gradient": sum(value.grad_bytes for value in forward.sent),
        "sent activation": sum(shares.value(value.ref, value.pair.value) for value in forward.sent),
        "sent gradient": sum(value.grad_bytes for value in received),
    }
    made = Profile(forward.book, turn, backward.final, transit_bytes=transit if shares.habits.keeps_sent else {})
    if split == "inputs":
        made.early = made.kept
    else:
        made.waiting_bytes, made.early = backward.waiting_bytes, backward.early()
        made.weights_bytes = backward.weights.bytes_beside(made.kept_bytes + made.halfway_bytes)
    return made


def _stay(forward: Forward) -> None:
    """Without a backward a place has the results of all microbatches, and what it sends of them, until its last forward
    has ended (runtime.stepping.run_forward)."""
    forward.book.step("the other microbatches")
    for value in (*forward.sent, *itertools.chain(*forward.results.values())):
        forward.book.use(value.storage)
