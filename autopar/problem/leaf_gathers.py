"""Gathers of leaves once per step (runtime.leaves): which of them are prefetched, and a bound of that which adds up
over weights.

The leaves of a run of blocks are gathered in buckets, in the order in which the weights are read. At most LEAVES_AHEAD
buckets are in flight before their block begins; the rest is exposed (*late*). So for gathers of L seconds in all, of B
bytes, of which A bytes are in the first buckets, L A / B seconds are prefetched. That is not a sum over weights, but is
bounded by one. With a price p in seconds per byte, and l seconds, b bytes of each weight:

    L A / B <= p A + sum of max(0, l - p b)    since L <= p B + sum of max(0, l - p b), and A <= B
    A       <= most - sum of `less`            one of these holds for any weights that are gathered (`First`):
               most       the most bytes that the first buckets can hold
               less       of a weight that fills a bucket by itself, how many bytes fewer that makes them
                       or, given LEAVES_AHEAD weights in a row of those that may fill a bucket by themselves:
               most       the most bytes of all weights behind these, once for each of them
               less       of each of these, if it fills a bucket, the bytes behind them; of each weight up to the last
                          of these, its bytes, negative
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from autopar.buckets import BUCKET_BYTES
from autopar.prefetching import LEAVES_AHEAD
from autopar.problem.graph import Program

ROWS_AHEAD = 3
"""How many bounds of the second kind there are at most, for those weights that fill most."""

BOUNDS = 1 + ROWS_AHEAD


@dataclass(frozen=True, eq=False)
class First:
    """A bound of the bytes in the first buckets: at most `most` minus the sum of `less` [weights][rows]. `bytes_s`
    [axes] is the price p of a byte."""

    most: float
    less: Sequence[np.ndarray]
    bytes_s: np.ndarray


@dataclass(frozen=True, eq=False)
class Leaves:
    """The leaves of a run of `count` blocks (`in_a_row`). For each weight, in the order in which they are read:
    `nbytes` [rows], 0 where it is not gathered once per step, `seconds` of its gather [rows, columns, axes], and
    whether it `packs` [rows, columns], as it takes gathers alone."""

    nbytes: Sequence[np.ndarray]
    seconds: Sequence[np.ndarray]
    packs: Sequence[np.ndarray]
    count: float

    @property
    def share(self) -> float:
        """The share of blocks whose first buckets can be prefetched: all but the first one, before which nothing
        computes."""
        return 1.0 - 1.0 / self.count

    @cached_property
    def bounds(self) -> list[First]:
        """At most BOUNDS bounds of the bytes in the first buckets."""
        most, less = first_bytes(self.nbytes)
        by_filling = [fewer * fills for fewer, fills in zip(less, self._fills, strict=True)]
        return [First(most, by_filling, self._bytes_s(0)), *map(self._behind, self._in_a_row)]

    @cached_property
    def _fills(self) -> list[np.ndarray]:
        """[weights][rows]: whether a weight fills a bucket by itself."""
        return [each >= BUCKET_BYTES for each in self.nbytes]

    @property
    def _in_a_row(self) -> list[list[int]]:
        """Each LEAVES_AHEAD weights in a row of those that may fill a bucket by themselves, if any weights may be
        gathered behind them; ROWS_AHEAD of these at most."""
        can = [index for index, fills in enumerate(self._fills) if fills.any()]
        rows = [can[at : at + LEAVES_AHEAD] for at in range(len(can) - LEAVES_AHEAD + 1)]
        found = [row for row in rows if self._most_behind(row[-1])]
        found.sort(key=lambda row: -sum(float(self.nbytes[index].max()) for index in row))
        return found[:ROWS_AHEAD]

    def _most_behind(self, last: int) -> float:
        """The most bytes of the weights behind weight number `last`."""
        return sum(float(each.max()) for each in self.nbytes[last + 1 :])

    def _behind(self, row: Sequence[int]) -> First:
        """The bound by which weights are late that are behind those of `row`, if all of these fill a bucket. At its
        price of a byte it is exact where no weight before them is gathered."""
        behind = self._most_behind(row[-1])
        less = [
            behind * fills * (index in row) - nbytes * (index <= row[-1])
            for index, (fills, nbytes) in enumerate(zip(self._fills, self.nbytes, strict=True))
        ]
        return First(behind * len(row), less, self._bytes_s(row[0]))

    def _bytes_s(self, begin: int) -> np.ndarray:
        """[axes] the price p of a byte: L / B where each weight from number `begin` on has the slowest choice of those
        that go in buckets, and no other one is gathered. At it the bound is exact for these choices."""
        whole_s, whole = np.zeros(self.seconds[0].shape[-1]), np.zeros(self.seconds[0].shape[-1])
        for nbytes, seconds, packs in list(zip(self.nbytes, self.seconds, self.packs, strict=True))[begin:]:
            at = np.where(packs[..., None], seconds, 0.0).max(1)  # [rows, axes]
            whole_s += at.max(0)
            whole += np.where(at.max(0) > 0, nbytes[at.argmax(0)], 0.0)
        return np.divide(whole_s, whole, out=np.zeros_like(whole), where=whole > 0)

    @cached_property
    def most_s(self) -> np.ndarray:
        """[BOUNDS, axes] seconds to subtract from the sum of `late_s` over all weights to get a lower bound of what is
        late; 0 where there is no such bound."""
        found = np.zeros((BOUNDS, self.seconds[0].shape[-1]))
        for each, bound in zip(found, self.bounds, strict=False):
            each[:] = self.share * bound.bytes_s * bound.most
        return found

    def late_s(self, index: int) -> np.ndarray:
        """[BOUNDS, rows, columns, axes] seconds of gathers that are not prefetched because of one weight, up to
        `most_s`: of its own gather, and, if it fills a bucket by itself, of other weights."""
        seconds = self.seconds[index]
        found = np.zeros((BOUNDS, *seconds.shape))
        for each, bound in zip(found, self.bounds, strict=False):
            nbytes, less = self.nbytes[index][:, None, None], bound.less[index][:, None, None]
            ahead_s = np.maximum(0.0, seconds - bound.bytes_s * nbytes) - bound.bytes_s * less
            each[:] = seconds - self.share * ahead_s
        return found


def in_a_row(program: Program, scope: str) -> float:
    """How many blocks there are per block that has no compute before it: all of the run of `scope`; infinitely many
    where another run comes before it."""
    return program.runs[scope].count if scope == next(iter(program.runs)) else math.inf


def share_ahead(each: Sequence[float], count: float) -> float:
    """The share of bytes of leaves that are prefetched before their block begins: those in the first LEAVES_AHEAD
    buckets.

    `each`: bytes of the leaves of one block in the order in which they are read (0: not gathered once per step).
    `count`: blocks (`in_a_row`). The leaves of the first block, or of as many small ones as it takes to have half a
    bucket, are exposed.
    """
    whole, filled = sum(each), [0.0]
    for nbytes in each:
        filled[-1] += nbytes
        if filled[-1] >= BUCKET_BYTES:
            filled.append(0.0)
    exposed = max(1, math.ceil(BUCKET_BYTES / 2 / max(1.0, whole))) / count
    return max(0.0, 1.0 - exposed) * sum(filled[:LEAVES_AHEAD]) / whole if whole else 1.0


def first_bytes(options: Sequence[np.ndarray]) -> tuple[float, list[float]]:
    """The most bytes that the first LEAVES_AHEAD buckets can hold, and for each weight how many bytes fewer it is if
    this weight fills a bucket by itself.

    `options`: for each weight, in the order in which they are read, the bytes that it may have.
    """
    can_fill = [index for index, each in enumerate(options) if (each >= BUCKET_BYTES).any()][:LEAVES_AHEAD]
    most, less = _most_bytes(options), [0.0] * len(options)
    most_where: dict[tuple[int, ...], float] = {}  # weights that fill a bucket, the others in `can_fill` do not
    for count in range(1, len(can_fill) + 1):
        for filling in itertools.combinations(can_fill, count):
            own = list(options)
            for index in can_fill:
                own[index] = _options_by_size(options[index], filling=index in filling)
            most_where[filling] = _most_bytes(own)
    for index in can_fill:
        less[index] = min(
            most - nbytes - sum(less[other] for other in filling)
            for filling, nbytes in most_where.items()
            if index in filling
        )
    return most, less


def _options_by_size(each: np.ndarray, *, filling: bool) -> np.ndarray:
    """The options of a weight that fill a bucket by themselves (`filling`), or those that do not."""
    return each[(each >= BUCKET_BYTES) == filling]


def _most_bytes(options: Sequence[np.ndarray]) -> float:
    """The most bytes that the first buckets can hold; -inf where some weight has no option."""
    if not all(len(each) for each in options):
        return -np.inf

    @cache
    def most(first: int, buckets: int) -> float:
        """The most bytes in the next `buckets` buckets, of weights from `first` on. A bucket is closed by the weight
        that makes it full, on top of less than BUCKET_BYTES."""
        found, before = 0.0, 0.0
        for index in range(first, len(options) if buckets else first):
            found = max(found, min(before, BUCKET_BYTES) + float(options[index].max()) + most(index + 1, buckets - 1))
            small = _options_by_size(options[index], filling=False)
            if not len(small):
                break
            before += float(small.max())
        return found

    return most(0, LEAVES_AHEAD)
