"""Gathers of weights that begin before they are needed, in the background of what computes.

Every step gathers the same weights in the same order. The `Orders` of a stage are learned in its first step, forward and backward apart, as
torch's FSDP2 learns them, and followed from then on. All that one block gathers is a *unit*, and so is each weight that the model itself gathers.
When a unit begins, the gathers of the unit behind it begin too, and further ones until BUCKET_BYTES are on their way: small ones would hide
nothing. So one unit more is in memory than is used. A pass that does something else than was learned (a parameter was frozen) gathers the rest
when it needs it, and the order is learned anew.

What begins when follows from what runs alone, not from values or from what one rank has, so it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar._torch import at_end_of_backward
from autopar.layout import BUCKET_BYTES, Layout, most_elements, steps
from autopar.runtime.mesh import Mesh
from autopar.runtime.moves import relayout, relayout_later
from autopar.runtime.params import Held
from autopar.runtime.stack import pushed


@dataclass(frozen=True, slots=True)
class Call:
    """One gather, of the leaf of `held` (None: of another tensor, which cannot begin ahead), of `nbytes` on the fullest rank."""

    held: Held | None
    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    nbytes: int
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


class Orders:
    """How the passes over one stage gather, by kind of pass; `held_of` says whose leaf a tensor is."""

    def __init__(self, held_of: Callable[[Tensor], Held | None], mesh: Mesh, ahead_bytes: float = BUCKET_BYTES) -> None:
        self.held_of, self.mesh, self.ahead_bytes = held_of, mesh, ahead_bytes
        self.known: dict[str, tuple[Call, ...]] = {}
        self._first: dict[str, Going] = {}  # pass of this step, by kind

    def step(self) -> None:
        """A step begins: what the first passes of the last one did is what comes next."""
        self.known.update({kind: tuple(going.seen) for kind, going in self._first.items() if going.ended})
        self._first = {}

    def going(self, kind: str) -> Going:
        """A pass of some kind begins."""
        made = Going(self, self.known.get(kind, ()))
        self._first.setdefault(kind, made)
        return made

    def call(self, x: Tensor, src: Layout, dst: Layout, shape: tuple[int, ...], name: str, unit: Any) -> Call:
        """What is known of one gather."""
        moves = any(step.kind == "all_gather" and self.mesh.sizes[step.axis] > 1 for step in steps(src, dst, self.mesh.sizes))
        nbytes = most_elements(shape, dst, self.mesh.sizes) * x.element_size()
        return Call(self.held_of(x) if moves else None, src, dst, shape, nbytes, name, unit)


class Going:
    """One pass in one direction, which follows `plan` as far as it does what that says (empty: it learns)."""

    def __init__(self, orders: Orders, plan: Sequence[Call]) -> None:
        self.orders, self.plan = orders, plan
        self.seen: list[Call] = []
        self.ended = False
        self._upto = 0  # gathers of the plan that have begun
        self._begun: dict[int, tuple[Callable[[], Tensor], int]] = {}  # by number: how to finish, and the version of what is gathered

    def take(self, x: Tensor, src: Layout, dst: Layout, shape: tuple[int, ...], mesh: Mesh, name: str = "", *,
             leaf: Tensor, unit: Any) -> Tensor:
        """As `relayout`, of a gather that may have begun. `leaf` is `x` as autograd has it; the gather belongs to `unit`."""
        if self.ended:
            return relayout(x, src, dst, shape, mesh, name)
        call, at = self.orders.call(leaf, src, dst, shape, name, unit), len(self.seen)
        self.seen.append(call)
        if self.plan and (at >= len(self.plan) or self.plan[at] != call):
            self._leave()
        if self.plan and (at == 0 or self.plan[at - 1].unit != self.plan[at].unit):
            self._begin(reach(self.plan, at, self.orders.ahead_bytes))
        finish, version = self._begun.pop(at, (None, -1))
        whole = finish() if finish is not None else None
        return whole if whole is not None and version == leaf._version else relayout(x, src, dst, shape, mesh, name)

    def begin(self) -> None:
        """The pass comes next: its first gathers begin."""
        if self.plan:
            self._begin(reach(self.plan, 0, self.orders.ahead_bytes))

    def take_back(self, *args: Any, **kwargs: Any) -> Tensor:
        """`take` in a backward, at whose end the pass ends."""
        if not self.seen and not self.ended:
            at_end_of_backward(self.end)
        return self.take(*args, **kwargs)

    def end(self) -> None:
        """The pass is over."""
        self._leave()
        self.ended = True

    def _leave(self) -> None:
        """Follow the plan no longer; what has begun is waited for, since all ranks take part in it."""
        for finish, _ in self._begun.values():
            finish()
        self._begun, self.plan = {}, ()

    @torch.no_grad()
    def _begin(self, upto: int) -> None:
        for number in range(self._upto, upto):
            call = self.plan[number]
            if call.held is not None:
                if call.held.ready is not None:
                    call.held.ready()
                leaf = call.held.leaf
                finish = relayout_later(leaf.detach(), call.src, call.dst, call.shape, self.orders.mesh, call.name)
                self._begun[number] = finish, leaf._version
        self._upto = max(self._upto, upto)


def reach(plan: Sequence[Part], at: int, ahead_bytes: float) -> int:
    """Where the gathers of `plan` end that are to have begun when number `at` begins its unit."""
    end, ahead = _unit_end(plan, at), 0.0
    while end < len(plan) and ahead < ahead_bytes:
        start, end = end, _unit_end(plan, end)
        ahead += sum(part.nbytes for part in plan[start:end])
    return end


def _unit_end(plan: Sequence[Part], at: int) -> int:
    return next((i for i in range(at, len(plan)) if plan[i].unit != plan[at].unit), len(plan))


_units: list[Any] = []  # blocks that are running, innermost last


def within(unit: Any) -> AbstractContextManager[None]:
    """Where what is gathered belongs to `unit`."""
    return pushed(_units, unit)


def unit_here() -> Any:
    """The block that is running; outside of blocks a unit of its own."""
    return _units[-1] if _units else object()
