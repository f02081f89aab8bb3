"""What the walk over memory records: values, steps, blocks and parts of a program."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.codegen.edges import Reshard
from autopar.memory.local import Local
from autopar.memory.storages import Storage
from autopar.problem.graph import Op, Ref, Run
from autopar.problem.pairs import LayoutPair


@dataclass(eq=False, slots=True)
class Value:
    """A value as its readers have it. `slot` is the gradient that has come so far, `leaf` the parameter that it is;
    `view`: whether it looks at another one's memory."""

    ref: Ref
    pair: LayoutPair
    storage: Storage | None
    grad_bytes: float
    slot: Storage | None = None
    leaf: Op | None = None
    view: bool = False


@dataclass(eq=False, slots=True)
class Step:
    """One operator or change of layout, as the backward needs it: `kept` is let go behind its backward."""

    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    op: Op | None = None
    local: Local | None = None
    reshard: Reshard | None = None
    kept: list[Storage] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Blocks:
    """A run of `count` blocks as it was walked: the steps of one, what goes in and round, and what stands for the other
    blocks: `twins` of the first one by what the last one keeps, and the rest of them together. Where blocks are run
    again in the backward, `stored` is what they keep for it, and `made` what they make again; `again`: whether the
    first one is, and the last."""

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
    """What of a program one walk goes over: top-level operators, and the number of instances of each run of blocks,
    begun earlier or not; values that come in and that go to the next stage; `given` are sums that a step takes once;
    `again`: of how many instances of a run, the first ones, the forward is run again in the backward (absent: of all,
    where the plan runs them again); `brought`: whether what comes in is from another place, `leaves`: whether what is
    sent goes to one."""

    ops: frozenset[str]
    blocks: dict[str, tuple[int, int]]
    given: tuple[Ref, ...] = ()
    receives: tuple[Ref, ...] = ()
    sends: tuple[Ref, ...] = ()
    results: frozenset[str] = frozenset()
    again: dict[str, int] = field(default_factory=dict)
    brought: bool = False
    leaves: bool = False
