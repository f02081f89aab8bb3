"""What running blocks again takes at least, whatever is kept of them, on one stage and one microbatch: seconds against bytes (problem.remat_frontier), with every operator as fast as any
way makes it and every result cut over all ranks, so that it holds for all choices.

    seconds   beside what runs again though all is kept that can be, which is known by choice (problem.remat)
    bytes     beside what is held where nothing is kept. Of as many instances as the run has but one, which is there while it has been run again. What a block hands on, to the
              next one or to what follows, may be kept anyway

What an algorithm of the runtime works on is run again even where its result is to be kept, and takes no bytes: choices without such ways, with results that do, are told from
those with one, where there are few operators that have any.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.problem.build import Model
from autopar.problem.cluster_members import Member
from autopar.problem.remat_frontier import Choices
from autopar.problem.rerun import keepable, rerun
from autopar.problem.saved import kept
from autopar.problem.step_shares import ForwardPrices

FEW = 3
"""Operators of all blocks with algorithms that are told apart."""

Corner = tuple[float, float]
"""Seconds in the backward, and bytes."""


@dataclass(frozen=True, eq=False)
class Again:
    """Of the choices that are not `barred` [nodes][choices], by scope of blocks: the corners of what running them again takes at least."""

    corners: Mapping[str, Sequence[Corner]]
    barred: Sequence[np.ndarray]


def agains(model: Model, forward: ForwardPrices) -> Iterator[Again]:
    """All choices of `model`, a Problem in which nothing is run again, told apart; `forward` are the prices of the forward on the same mesh."""
    blocks = _Blocks(model, forward)
    none = [np.zeros(len(node.cost_s), bool) for node in model.problem.nodes]
    if not blocks.worked or len(blocks.worked) > FEW:
        yield Again(blocks.corners(free=blocks.worked), none)
        return
    without, each = list(none), list[Again]()
    for name in blocks.worked:
        index, runs = blocks.runs(name)
        without[index] = without[index] | runs
        each.append(Again(blocks.corners(free=blocks.worked), [~runs if v == index else mask for v, mask in enumerate(none)]))
    yield Again(blocks.corners(free=()), without)
    yield from each


class _Blocks:
    """The operators of all blocks of a Problem in which nothing is run again; `worked`: those whose results can be kept and that have algorithms in some way."""

    def __init__(self, model: Model, forward: ForwardPrices) -> None:
        self.model, self.forward, self.program = model, forward, model.links[0].program
        self.at: dict[str, tuple[int, Member]] = {member.op.name: (index, member) for index, members in enumerate(model.members) for member in members
                                                 if member.op.scope in self.program.runs and member.op.role == "op"}
        self.worked = [name for name, (_, member) in self.at.items() if keepable(member.op) and any(member.runs)]

    def runs(self, name: str) -> tuple[int, np.ndarray]:
        """The node of an operator, and of each of its choices whether an algorithm of the runtime works on it."""
        index, member = self.at[name]
        return index, np.array(member.runs, bool)[member.at]

    def corners(self, free: Collection[str]) -> dict[str, list[Corner]]:
        """Of all scopes; to keep the results of `free` takes nothing."""
        return {scope: self._corners(scope, free) for scope in self.program.runs}

    def _corners(self, scope: str, free: Collection[str]) -> list[Corner]:
        names = [name for name, (_, member) in self.at.items() if member.op.scope == scope]
        always = rerun(self.program, scope, [name for name in names if keepable(self.program.ops[name])]).again
        seconds = {op.name: 0.0 for op in self.program.ops.values() if op.scope == scope}
        nbytes = dict(seconds)
        seconds.update({name: self._least_s(name) for name in names if name not in always})
        nbytes.update({name: self._least_bytes(name) for name in names if name not in free})
        return [(point.seconds, point.nbytes) for point in Choices(self.program, scope, seconds, nbytes).corners]

    def _least_s(self, name: str) -> float:
        """Seconds of its kernels, all instances one after the other, in the way that is fastest."""
        member = self.at[name][1]
        if member.op.free:
            return 0.0
        sizes, kernels = self.forward.sizes, self.forward.kernels
        return member.op.count * min(kernels.seconds(member.op, way, sizes)[0] for way in member.ways)

    def _least_bytes(self, name: str) -> float:
        """Bytes of its results on a rank."""
        op, run = self.at[name][1].op, self.program.runs[self.at[name][1].op.scope]
        made = [(name, output) for output in range(len(op.call.outs))]
        own = sum(self.program.bytes_of(ref) for ref in made if ref not in self._handed)
        return own * op.count * (1.0 - 1.0 / run.count) / math.prod(self.forward.sizes)

    @cached_property
    def _handed(self) -> Collection[tuple[str, int]]:
        """What blocks hand on, to the next one or to what follows."""
        owners = kept(self.model.clusters, self.program)
        inside = [ref for run in self.program.runs.values() for ref in run.carried]
        read = [ref for op in self.program.ops.values() for ref in op.operands if self.program.ops[ref[0]].scope not in ("", op.scope)]
        return {owners.root(ref) for ref in (*inside, *read)}
