"""The State for honing: a solution that local search changes, whose seconds are those of its passes
(problem.pass_tables) instead of the Problem's.

It approximates pipeline.passes well enough to say which moves are worth pricing exactly, and is as cheap to ask for all
moves at once as the Problem's seconds. Left out are that small collectives take less of a link than large ones, and the
separate buckets of gradients with different collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.buckets import BUCKET_BYTES
from autopar.cost.comm import link_shares
from autopar.problem.leaf_gathers import in_a_row, share_ahead
from autopar.problem.pass_quantities import COMPUTE, SHOWN, WAITED
from autopar.problem.pass_tables import PASSES, PassTables
from autopar.problem.types import Problem
from autopar.search.state import BYTES, FIXED, FORBIDDEN, SECONDS, State


@dataclass(frozen=True, eq=False)
class _Leaves:
    """The leaves of a run of `count` blocks (problem.leaf_gathers.in_a_row). For each weight the node that decides its
    layout, and by its choice the bytes that are gathered once per step. The share of them that is prefetched is kept in
    the totals at `row`."""

    nodes: Sequence[int]
    nbytes: Sequence[np.ndarray]
    count: float
    row: int

    def after(self, choice: Sequence[int], v: int = -1) -> np.ndarray:
        """The share of the leaves that is prefetched before their block begins: [1] under `choice`, or [choices] for
        each choice of node `v` with all others unchanged."""
        each = [
            own if w == v else own[choice[w]] * (choice[w] >= 0) for w, own in zip(self.nodes, self.nbytes, strict=True)
        ]
        return np.atleast_1d(share_ahead(np.asarray(sum(each)), self.count))


class HoningState(State):
    """The State of a step of one stage and one microbatch (pipeline.single_stage), or of a pipeline.

    For a pipeline, the step is `times` as long as the passes of one microbatch, plus `own_s` seconds by node and
    choice. Its memory is that of `problem`, which has the nodes of `passing`, and after its nets those of what happens
    once per step. `opening` is, for each run of blocks, the share of blocks that begin a stage: nothing before them
    overlaps their gathers.

    Totals are [seconds beside passes, bytes, forbidden pairs, quantities of each pass of each scope, share of the
    leaves of each run that is prefetched]. The last ones are not sums over nodes, but the change by each single move is
    exact. `limit_bytes` may be set to another memory limit.
    """

    def __init__(
        self,
        passing: PassTables,
        choice: Sequence[int],
        problem: Problem | None = None,
        times: float = 1.0,
        own_s: Sequence[np.ndarray] = (),
        opening: Mapping[str, float] | None = None,
    ) -> None:
        self.passing, self.times, self.opening = passing, times, opening or {}
        self.own_s = own_s or passing.model.updates_s
        self.first = {scope: FIXED + 2 * passing.width * index for index, scope in enumerate(passing.scopes)}
        each = [
            link_shares("all_gather", axis.size * BUCKET_BYTES, axis) if axis.size > 1 else {}
            for axis in passing.model.prices.mesh.axes
        ]
        levels = list(dict.fromkeys(level for shares in each for level in shares)) or [""]
        # [axes, levels]: the share of a level's link that a large gather takes
        self.shares = np.array([[shares.get(level, 0.0) for level in levels] for shares in each])
        self.used = [np.flatnonzero(shares) if shares.any() else np.array([0]) for shares in self.shares]
        read = {} if passing.sums_at_end else {scope: own for scope, own in passing.of_blocks.items() if own}
        self.leaves = {
            scope: self._leaves_of(scope, own, row) for row, (scope, own) in enumerate(read.items(), self._added)
        }
        self.leading: dict[int, list[_Leaves]] = {}  # by node that decides the layout of leaves
        for leaves in self.leaves.values():
            for v in set(leaves.nodes):
                self.leading.setdefault(v, []).append(leaves)
        super().__init__(problem or passing.model.problem, tuple(choice))

    def _leaves_of(self, scope: str, own: Sequence[int], row: int) -> _Leaves:
        links = [self.passing.model.links[index] for index in own]
        return _Leaves(
            [link.producer for link in links],
            [self.passing.gathered(link)[link.row] for link in links],
            in_a_row(self.passing.model.links[0].program, scope),
            row,
        )

    @property
    def _added(self) -> int:
        """The number of totals that are sums over nodes and nets."""
        return FIXED + 2 * self.passing.width * len(self.first)

    @property
    def _rows(self) -> int:
        return self._added + len(self.leaves)

    def reset(self, choice: Sequence[int]) -> None:
        """Take `choice`, and compute the totals anew."""
        self._mark_stale(v for v, c in enumerate(choice) if c != self.choice[v])
        super().reset(tuple(choice))
        for leaves in self.leaves.values():
            self.totals[leaves.row] = leaves.after(self.choice)

    def move(self, v: int, c: int) -> None:
        """Move node `v` to choice `c`."""
        super().move(v, c)
        self._mark_stale([v])

    def _mark_stale(self, moved: Iterable[int]) -> None:
        """Mark as stale the changes by moves of other weights in the same buckets as the `moved` nodes."""
        for leaves in {id(leaves): leaves for v in moved for leaves in self.leading.get(v, ())}.values():
            self._stale.update(leaves.nodes)

    def _count(self, v: int) -> np.ndarray:
        """[totals, choices]: what each choice of node `v` adds, with all others as they are."""
        out = super()._count(v)
        for leaves in self.leading.get(v, ()):
            out[leaves.row] = leaves.after(self.choice, v)
        return out

    def _idle(self, v: int) -> np.ndarray:
        """What the nets and buckets of node `v` cost while it has no choice."""
        out = super()._idle(v)
        for leaves in self.leading.get(v, ()):
            out[leaves.row] = leaves.after(self.choice)
        return out

    def seconds(self, totals: np.ndarray) -> np.ndarray:
        """[columns] seconds of a step, for columns of totals."""
        width, found = self.passing.width, totals[SECONDS].copy()
        for scope, first in self.first.items():
            for way in PASSES:
                ahead = np.clip(totals[self.leaves[scope].row], 0.0, 1.0) if scope in self.leaves else 1.0
                found += self.times * self._together_s(
                    totals[first + way * width : first + (way + 1) * width], self.opening.get(scope, 0.0), ahead
                )
        return found

    def _together_s(self, of: np.ndarray, opening: float = 0.0, first: np.ndarray | float = 1.0) -> np.ndarray:
        """[columns] seconds of one pass of a scope, for columns of its quantities: problem.hiding.together_s for all at
        once. `opening`: the share of prefetched gathers that is exposed. `first`: the share of leaves that is
        prefetched."""
        passing, axes = self.passing, self.passing.axes
        ahead, behind, leaf, waits = (
            of[begin(0) : begin(0) + axes] for begin in (passing.ahead, passing.behind, passing.leaf, passing.waits)
        )
        shown_s = of[SHOWN] + ((1.0 - first) * leaf).sum(0) + opening * ahead.sum(0)
        left = (1.0 - opening) * ahead + behind + first * leaf
        if passing.model.prices.overlap == 0.0 or not axes:
            return np.asarray(shown_s + left.sum(0))
        compute_s = of[COMPUTE]
        took_s, done = np.zeros_like(compute_s), np.zeros_like(compute_s)
        for _ in range(axes):  # each round ends when a background collective or the work is done
            pace_s, moved_s = self._pace(compute_s, waits, left > 0)
            through = np.divide(left, moved_s, out=np.full_like(left, np.inf), where=(left > 0) & (moved_s > 0))
            share = np.minimum(through.min(0), 1.0 - done)
            done, took_s = done + share, took_s + share * pace_s
            left = np.where(through <= share, 0.0, np.maximum(0.0, left - share * moved_s))
        took_s = took_s + (1.0 - done) * (compute_s + waits.sum(0))
        rest_s = np.maximum(left.max(0), (self.shares.T @ left).max(0))  # after the work
        return np.asarray(shown_s - compute_s - of[WAITED] + took_s + rest_s)

    def _pace(self, compute_s: np.ndarray, waits: np.ndarray, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Given the `running` background: [columns] seconds of all of the work beside it, and [axes, columns] seconds
        of background collectives that run meanwhile."""
        taken = self.shares.T @ running  # [levels, columns] of each link
        slower = [np.maximum(1.0, _most(taken, used)) for used in self.used]
        pace_s = compute_s / (1.0 - np.minimum(0.99, self.passing.model.prices.contention * running.sum(0)))
        moved_s = pace_s / slower
        for axis, wait_s in enumerate(waits):
            if not wait_s.any():
                continue
            beside = taken + self.shares[axis][:, None]
            slower = [np.maximum(1.0, _most(beside, used)) for used in self.used]
            seconds = wait_s * slower[axis]
            pace_s = pace_s + seconds
            moved_s += seconds / slower
        return pace_s, moved_s

    def _slots(self, t: int) -> slice | np.ndarray:
        return self._rows_of(self.passing.nets[t].scope) if t < self.passing.model.shared else slice(FIXED)

    def _rows_of(self, scope: str) -> np.ndarray:
        """The rows of totals to which something in a scope adds."""
        return np.array([*range(FIXED), *range(self.first[scope], self.first[scope] + 2 * self.passing.width)])

    def _node_features(self, v: int) -> np.ndarray:
        node, table = self.problem.nodes[v], self.passing.nodes[v]
        forbidden, own = np.isinf(node.cost_s), np.zeros((self._rows, len(node.cost_s)))
        own[SECONDS], own[BYTES], own[FORBIDDEN] = np.where(forbidden, 0.0, self.own_s[v]), node.memory_bytes, forbidden
        own[self._rows_of(table.scope)[FIXED:]] = _of_passes(table.each)
        return own

    def _net_features(self, t: int) -> np.ndarray:
        net = self.problem.nets[t]
        forbidden = np.isinf(net.cost_s)
        once = t >= self.passing.model.shared
        fixed = np.stack(
            [
                np.where(forbidden | (not once), 0.0, net.cost_s),
                np.where(forbidden, 0.0, net.memory_bytes),
                forbidden.astype(float),
            ]
        )
        return fixed if once else np.concatenate([fixed, _of_passes(self.passing.nets[t].each)])


def _most(taken: np.ndarray, used: np.ndarray) -> np.ndarray:
    """[columns] the most that is `taken` [levels, columns] of one of the links `used`."""
    return np.asarray(taken[used[0]] if len(used) == 1 else taken[used].max(0))


def _of_passes(each: np.ndarray) -> np.ndarray:
    """[2 passes, ..., quantities] as [quantities of both, ...]."""
    moved = np.moveaxis(each, -1, 1)
    return np.asarray(moved.reshape(-1, *moved.shape[2:]))
