"""What the memory walk records of a forward (memory.forward) for the backward (memory.backward): values, steps, runs of
blocks; and the part of a program that one walk covers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from autopar.codegen.edges import Reshard
from autopar.memory.local import Local
from autopar.memory.storages import Storage
from autopar.problem.graph import Op, Ref, Run
from autopar.problem.pairs import LayoutPair

Split: TypeAlias = Literal["", "apart", "inputs"]
"""How a backward is divided where the schedule has one action for gradients of inputs and one for those of weights:
"apart" (each part in its own action), "inputs" (all of it in the action for inputs), or "" (the schedule has no such
actions)."""


@dataclass(eq=False, slots=True)
class Value:
    """A value in one pair of layouts, as its readers have it.

    storage     its memory; None where that rests anyway (parameters, buffers, inputs)
    grad_bytes  bytes of its gradient on this rank; 0 where it has none
    slot        the memory of its gradient, as the backward adds it up; None before there is one
    leaf        the parameter that the value is, if it is one
    view        whether it is a view of another value's memory
    """

    ref: Ref
    pair: LayoutPair
    storage: Storage | None
    grad_bytes: float
    slot: Storage | None = None
    leaf: Op | None = None
    view: bool = False


@dataclass(eq=False, slots=True)
class Step:
    """One operator `op` with its bytes `local`, or one change of layout `reshard`; `kept` is what autograd keeps for
    its backward, and is freed after that."""

    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    op: Op | None = None
    local: Local | None = None
    reshard: Reshard | None = None
    kept: list[Storage] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Blocks:
    """A run of `count` blocks, of which only the last one was walked.

    steps       the steps of the walked block
    feeds       the values that come into the run
    ports       the inputs of the walked block
    carried     the values that the walked block hands on
    twins       storage that the last block keeps -> that of the first block in its place
    others      storages for what all blocks between the first and the last keep
    again       whether the first and the last block are run again in the backward
    stored      what a block that is run again keeps for that
    made        what a block that is run again makes again
    """

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
    """The part of a program that one walk covers: all of it, or one stage.

    ops         the operators outside of blocks
    blocks      run -> its instances [first, stop)
    given       sums that are computed once per step, outside of microbatches
    receives    values from the stage before
    sends       values for the next stage
    results     the results of the model that are made here
    again       run -> how many of its first instances are run again in the backward (absent: all, where the plan runs
                them again)
    brought     whether received values come from another place
    leaves      whether sent values go to another place
    """

    ops: frozenset[str]
    blocks: dict[str, tuple[int, int]]
    given: tuple[Ref, ...] = ()
    receives: tuple[Ref, ...] = ()
    sends: tuple[Ref, ...] = ()
    results: frozenset[str] = frozenset()
    again: dict[str, int] = field(default_factory=dict)
    brought: bool = False
    leaves: bool = False
