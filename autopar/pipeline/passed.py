"""A solution under change, by what a step takes pass by pass (problem.passing): near enough to what pipeline.passes makes of it to say which moves are
worth pricing, and as cheap to ask for all moves at once as the Problem's own seconds.

Not seen: links that axes share, and where in a block its gathers are waited for; an even part of its compute is in front of each wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.layout import LEAVES_AHEAD
from autopar.problem.passing import COMPUTE, PASSES, SHOWN, WAITED, Passing
from autopar.search.state import FIXED, State


class Passed(State):
    """A step of one stage and one microbatch (pipeline.alone). Totals are [seconds of updates, bytes, forbidden pairs, quantities of each pass of each scope].
    `limit_bytes` may be set to other room in memory."""

    def __init__(self, passing: Passing, choice: Sequence[int]) -> None:
        self.passing = passing
        self.first = {scope: FIXED + 2 * passing.width * index for index, scope in enumerate(passing.scopes)}
        runs = passing.model.links[0].program.runs
        self.blocks = {scope: runs[scope].count if scope else 1 for scope in passing.scopes}
        super().__init__(passing.model.problem, tuple(choice))

    @property
    def _rows(self) -> int:
        return FIXED + 2 * self.passing.width * len(self.first)

    def seconds(self, totals: np.ndarray) -> np.ndarray:
        """Seconds of each column."""
        width, found = self.passing.width, totals[0].copy()
        for scope, first in self.first.items():
            for way in PASSES:
                found += self._together_s(totals[first + way * width:first + (way + 1) * width], self.blocks[scope])
        return found

    def _together_s(self, of: np.ndarray, blocks: int) -> np.ndarray:
        """Seconds of one pass of a scope (problem.hiding.together_s), of all columns of quantities."""
        passing, axes = self.passing, self.passing.axes
        ahead, behind, leaf, count = (of[begin(0):begin(0) + axes] for begin in (passing.ahead, passing.behind, passing.leaf, passing.count))
        first = np.minimum(1.0, LEAVES_AHEAD / np.maximum(of[passing.buckets], 1e-9))
        shown_s, ahead = of[SHOWN] + ((1.0 - first) * leaf).sum(0), ahead + first * leaf
        if passing.model.prices.overlap == 0.0:
            return np.asarray(shown_s + ahead.sum(0) + behind.sum(0))
        compute_s = of[COMPUTE]
        room_s = np.where(count > 0, compute_s / (count / blocks + 1.0), np.inf)
        hidden = np.minimum(ahead, np.maximum(room_s, 0.0))
        late_s = (ahead - hidden).sum(0)
        waited_s, left = of[WAITED] + late_s, np.sort(hidden + behind, axis=0)
        done, took_s, moved_s = (np.zeros_like(compute_s) for _ in range(3))
        for axis in range(axes):  # until the shortest of them is through
            beside = (left[axis:] > moved_s).sum(0)
            pace_s = compute_s / (1.0 - np.minimum(0.99, passing.model.prices.contention * beside)) + waited_s
            share = np.divide(np.maximum(0.0, left[axis] - moved_s), pace_s, out=np.ones_like(pace_s), where=pace_s > 0)
            share = np.minimum(share, 1.0 - done)
            done, took_s, moved_s = done + share, took_s + share * pace_s, moved_s + share * pace_s
        took_s = took_s + (1.0 - done) * (compute_s + waited_s)
        rest_s = np.maximum(0.0, left[-1] - moved_s) if axes else 0.0
        return np.asarray(shown_s - compute_s - of[WAITED] + took_s + rest_s)

    def _slots(self, t: int) -> slice | np.ndarray:
        return self._of(self.passing.nets[t].scope)

    def _of(self, scope: str) -> np.ndarray:
        """The totals of what belongs to a scope."""
        return np.array([*range(FIXED), *range(self.first[scope], self.first[scope] + 2 * self.passing.width)])

    def _node_features(self, v: int) -> np.ndarray:
        node, table = self.problem.nodes[v], self.passing.nodes[v]
        forbidden, own = np.isinf(node.cost_s), np.zeros((self._rows, len(node.cost_s)))
        own[0], own[1], own[2] = np.where(forbidden, 0.0, self.passing.updates_s[v]), node.memory_bytes, forbidden
        own[self._of(table.scope)[FIXED:]] = _of_passes(table.each)
        return own

    def _net_features(self, t: int) -> np.ndarray:
        net = self.problem.nets[t]
        forbidden = np.isinf(net.cost_s)
        fixed = np.stack([np.zeros(forbidden.shape), np.where(forbidden, 0.0, net.memory_bytes), forbidden.astype(float)])
        return np.concatenate([fixed, _of_passes(self.passing.nets[t].each)])


def _of_passes(each: np.ndarray) -> np.ndarray:
    """[2 passes, ..., quantities] as [quantities of both, ...]."""
    moved = np.moveaxis(each, -1, 1)
    return np.asarray(moved.reshape(-1, *moved.shape[2:]))
