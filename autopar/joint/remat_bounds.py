"""Lower bounds of what running blocks again costs, whatever they keep, for a step of one stage and one microbatch.
Called by shape_bounds and memory_bounds.

A block that runs again may keep results: the more bytes it keeps, the fewer seconds its second run takes. The lower
convex hull of (seconds, bytes) is found exactly for given costs of each operator (problem.remat_frontier). Here these
costs are lower bounds over all choices, so that the hull holds for all of them: every operator takes as long as its
fastest option, and every result is sharded over all ranks.

    seconds   beyond what runs again even if all results are kept that can be; that part is known by choice
              (problem.remat)
    bytes     beyond what is held if nothing is kept. Results of all instances of a run but one: the one that runs has
              all of its results anyway. What a block hands to the next one, or to what follows, counts nothing, as it
              may be kept in any case

An operator that uses a runtime algorithm always runs again; its result takes no bytes. Where at most
MOST_WITH_ALGORITHMS operators have such options, the choices without any of them and those with each of them get bounds
of their own, because those without may have to keep more bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.problem.build import Model
from autopar.problem.cluster_members import Member
from autopar.problem.clusters import Cluster as OpCluster
from autopar.problem.graph import Op, Program
from autopar.problem.remat_frontier import Choices
from autopar.problem.rerun import keepable, rerun
from autopar.problem.saved import kept
from autopar.problem.step_shares import ForwardPrices

MOST_WITH_ALGORITHMS = 3
"""The most operators with runtime algorithms in all blocks for which choices with and without them get bounds of their
own."""

Corner = tuple[float, float]
"""(seconds in the backward, bytes per device) of one way to keep results."""


@dataclass(frozen=True, eq=False)
class Again:
    """For all choices that are not `barred` [nodes][choices]: by scope of blocks, the corners of the lower convex hull
    of what running them again costs."""

    corners: Mapping[str, Sequence[Corner]]
    barred: Sequence[np.ndarray]


def agains(model: Model, forward: ForwardPrices) -> Iterator[Again]:
    """Bounds that together cover all choices of `model`, a Problem in which nothing runs again. `forward`: prices of a
    forward alone on the same mesh."""
    blocks = _Blocks(model, forward)
    none = [np.zeros(len(node.cost_s), bool) for node in model.problem.nodes]
    if not blocks.with_algorithms or len(blocks.with_algorithms) > MOST_WITH_ALGORITHMS:
        yield Again(blocks.corners(free=blocks.with_algorithms), none)
        return
    without, each = list(none), list[Again]()
    for name in blocks.with_algorithms:
        index, runs = blocks.runs(name)
        without[index] = without[index] | runs
        each.append(
            Again(
                blocks.corners(free=blocks.with_algorithms),
                [~runs if v == index else mask for v, mask in enumerate(none)],
            )
        )
    yield Again(blocks.corners(free=()), without)
    yield from each


class _Blocks:
    """The operators of all blocks of a Problem in which nothing runs again. `with_algorithms`: those whose results can
    be kept, with a runtime algorithm in some option."""

    def __init__(self, model: Model, forward: ForwardPrices) -> None:
        self.forward, program = forward, model.links[0].program
        self.at: dict[str, tuple[int, Member]] = {
            member.op.name: (index, member)
            for index, members in enumerate(model.members)
            for member in members
            if member.op.scope in program.runs and member.op.role == "op"
        }
        self.with_algorithms = algorithms(model)
        self.hulls = Hulls(program, model.clusters, self._least_s)

    def runs(self, name: str) -> tuple[int, np.ndarray]:
        """The node of an operator, and [choices] whether it uses a runtime algorithm."""
        index, member = self.at[name]
        return index, np.array(member.runs, bool)[member.at]

    def corners(self, free: Collection[str]) -> dict[str, list[Corner]]:
        """The corners of each scope. Keeping the results of operators in `free` takes no bytes."""
        ranks = math.prod(self.forward.sizes)
        return {scope: [(s, b / ranks) for s, b in corners] for scope, corners in self.hulls.corners(free).items()}

    def _least_s(self, op: Op) -> float:
        """The least seconds of an operator's forward kernels over all its options."""
        sizes, kernels = self.forward.sizes, self.forward.kernels
        return min(kernels.seconds(op, way, sizes)[0] for way in self.at[op.name][1].ways)


def algorithms(model: Model) -> list[str]:
    """The operators of blocks whose results can be kept, with a runtime algorithm in some option."""
    runs = model.links[0].program.runs
    return [
        member.op.name
        for members in model.members
        for member in members
        if member.op.scope in runs and member.op.role == "op" and keepable(member.op) and any(member.runs)
    ]


@dataclass(frozen=True, eq=False)
class Hulls:
    """What blocks of `program` may keep that run again. `least_s`: the least seconds of the forward of one instance of
    an operator."""

    program: Program
    clusters: list[OpCluster]
    least_s: Callable[[Op], float]

    def corners(self, free: Collection[str]) -> dict[str, list[Corner]]:
        """The corners of each scope, in bytes of all ranks together. Keeping the results of operators in `free` takes
        no bytes."""
        return {scope: self._corners(scope, free) for scope in self.program.runs}

    def _corners(self, scope: str, free: Collection[str]) -> list[Corner]:
        """The corners of one scope."""
        ops = {op.name: op for op in self.program.ops.values() if op.scope == scope}
        names = [name for name, op in ops.items() if op.role == "op"]
        always = rerun(self.program, scope, [name for name in names if keepable(ops[name])]).again
        seconds = dict.fromkeys(ops, 0.0)
        nbytes = dict(seconds)
        seconds.update(
            {
                name: ops[name].count * self.least_s(ops[name])
                for name in names
                if name not in always and not ops[name].free
            }
        )
        nbytes.update({name: self._bytes(ops[name]) for name in names if name not in free})
        return [(point.seconds, point.nbytes) for point in Choices(self.program, scope, seconds, nbytes).corners]

    def _bytes(self, op: Op) -> float:
        """The bytes of an operator's results, for all instances of its run but one."""
        own = sum(
            self.program.bytes_of(ref)
            for ref in ((op.name, output) for output in range(len(op.call.outs)))
            if ref not in self._handed
        )
        return own * op.count * (1.0 - 1.0 / self.program.runs[op.scope].count)

    @cached_property
    def _handed(self) -> Collection[tuple[str, int]]:
        """The values that blocks hand to the next block, or to what follows the run."""
        keeps = kept(self.clusters, self.program)
        inside = [ref for run in self.program.runs.values() for ref in run.carried]
        read = [
            ref
            for op in self.program.ops.values()
            for ref in op.operands
            if self.program.ops[ref[0]].scope not in ("", op.scope)
        ]
        return {keeps.owner(ref) for ref in (*inside, *read)}
