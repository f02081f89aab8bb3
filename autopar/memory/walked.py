"""What the memory walk records: values, steps, blocks and parts of a program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from autopar.codegen.edges import Reshard
from autopar.memory.local import Local
from autopar.memory.storages import Storage
from autopar.problem.graph import Op, Ref, Run
from autopar.problem.pairs import LayoutPair

Split: TypeAlias = Literal["", "apart", "inputs"]
"""What runs where of a backward with two actions, one for inputs and one for weights: each part in its own (`apart`),
or the whole backward in that for inputs; empty where the schedule has no such actions."""


@dataclass(eq=False, slots=True)
class Value:
    """A value as its readers have it. `slot` is its gradient so far, `leaf` the parameter that it is, if it is one;
    `view`: whether it is a view of another value's memory."""

    ref: Ref
    pair: LayoutPair
    storage: Storage | None
    grad_bytes: float
    slot: Storage | None = None
    leaf: Op | None = None
    view: bool = False


@dataclass(eq=False, slots=True)
class Step:
    """One operator or change of layout, as the backward needs it; `kept` is freed after its backward."""

    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    op: Op | None = None
    local: Local | None = None
    reshard: Reshard | None = None
    kept: list[Storage] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Blocks:
    """A run of `count` blocks as it was walked: the steps of one, its inputs and carried values, and stand-ins for the
    other blocks: `twins` has, for what the last block keeps, the same of the first block; `others` are those of the
    blocks between together. Where blocks are run again in the backward, `stored` is what they keep for it and `made`
    what they make again; `again` says whether the first and the last one are."""

    run: Run
    count: int
    steps: list[Step]
    feeds: list[Value]
    ports: list[Value]
    carried: list[Value]
    twins: dict[Storage, Storage | None]
    others: list[Storage]
    again: tuple[bool, bool] = (False, False)
    stored: dict[Storage, None] = field(default_factory=dict)
    made: list[Storage] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """The part of a program that one walk covers: top-level operators, and the number of instances of each run of
    blocks, whether begun before or not; values that come in and that go to the next stage. `given` are sums that a step
    takes once. `again`: run -> how many of its first instances are run again in the backward (absent: all, where the
    plan runs them again). `brought`: what comes in is from another place; `leaves`: what is sent goes to one."""

    ops: frozenset[str]
    blocks: dict[str, tuple[int, int]]
    given: tuple[Ref, ...] = ()
    receives: tuple[Ref, ...] = ()
    sends: tuple[Ref, ...] = ()
    results: frozenset[str] = frozenset()
    again: dict[str, int] = field(default_factory=dict)
    brought: bool = False
    leaves: bool = False
