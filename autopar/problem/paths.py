"""The ways between layouts on one mesh, as numbers: found once for all the tensors that take them.

    Paths.ids       which way leads from each source to each target
    Paths.seconds   what each way costs for a tensor of some size
    Paths.gathers   whether an all-gather is among its steps
    Paths.held      the share of the tensor that the last new tensor on the way is, NaN where no memory is taken
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from autopar.cluster import Mesh
from autopar.cost.comm import step_s
from autopar.layout import Entry, Layout, Step, dim_of, fraction, is_placed, is_shard, sections_of, shard, steps


class Paths:
    """All the ways that were asked for so far, numbered in that order."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.sizes = mesh, tuple(mesh.sizes)
        self._ids: dict[Layout, dict[Layout, int]] = {}
        self._alike: dict[tuple[Layout, Layout], int] = {}  # by ends whose dims are renamed: their ways cost the same
        self._steps: dict[Step, int] = {}
        self._order: list[Step] = []
        self._way: list[list[int]] = []  # of each way: its steps by number
        self._gathers: list[bool] = []
        self._held: list[float] = []
        self._step_s: dict[float, dict[int, float]] = {}  # size in bytes -> seconds of steps by number

    def ids(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
        """int[sources, targets]: the number of each way."""
        found = np.empty((len(sources), len(targets)), int)
        for i, source in enumerate(sources):
            known = self._ids.setdefault(source, {})
            found[i] = [known[t] if t in known else self._find(known, source, t) for t in targets]
        return found

    def number(self, source: Layout, target: Layout) -> int:
        """The number of one way."""
        known = self._ids.setdefault(source, {})
        return known[target] if target in known else self._find(known, source, target)

    def seconds(self, ids: np.ndarray, size_bytes: float) -> np.ndarray:
        """Seconds of each way for a tensor of `size_bytes`."""
        distinct, where = np.unique(ids, return_inverse=True)
        prices = self._step_s.setdefault(size_bytes, {})
        ways = [self._way[i] for i in distinct]
        for index in set().union(*ways) - prices.keys():
            prices[index] = step_s(self._order[index], size_bytes, self.mesh)
        return np.array([sum([prices[i] for i in way]) for way in ways])[where].reshape(ids.shape)

    def gathers(self, ids: np.ndarray) -> np.ndarray:
        """bool: whether the way has an all-gather."""
        return _picked(self._gathers, ids)

    def held(self, ids: np.ndarray) -> np.ndarray:
        """The share of the whole tensor that a rank gets memory for, NaN where it gets none: the last step on the way that makes a tensor."""
        return _picked(self._held, ids)

    def _find(self, known: dict[Layout, int], source: Layout, target: Layout) -> int:
        ends = renamed(source, target)
        number = known[target] = self._alike.setdefault(ends, len(self._way))
        if number < len(self._way):
            return number
        path = steps(*ends, self.sizes)
        self._way.append([self._number(step) for step in path])
        self._gathers.append(any(step.kind == "all_gather" for step in path))
        made = [s.after for s in path if not is_placed(s.after[s.axis])]
        self._held.append(fraction(made[-1], self.sizes) if made else math.nan)
        return number

    def _number(self, step: Step) -> int:
        if step not in self._steps:
            self._steps[step] = len(self._order)
            self._order.append(step)
        return self._steps[step]


def renamed(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """Both layouts with tensor dims numbered in the order in which they are met: `layout.steps` treats all dims alike, and prices all but
    the first, which needs no copies; so the way between them is the same but for their names."""
    dims = {0: 0}
    for entry in (*source, *target):
        if is_shard(entry):
            dims.setdefault(dim_of(entry), len(dims))
    if all(dim == number for dim, number in dims.items()):
        return source, target
    first, second = (tuple(_on(dims[dim_of(e)], e) if is_shard(e) else e for e in layout) for layout in (source, target))
    return first, second


@cache
def _on(dim: int, entry: Entry) -> Entry:
    """`entry`, cutting another dim."""
    return shard(dim, sections_of(entry))


def _picked(values: Sequence[float], ids: np.ndarray) -> np.ndarray:
    """`values` at `ids`, looked up once for each distinct one."""
    distinct, where = np.unique(ids, return_inverse=True)
    return np.array([values[i] for i in distinct])[where].reshape(ids.shape)
