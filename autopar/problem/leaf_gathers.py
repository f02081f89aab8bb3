"""Gathers of leaves once per step (runtime.leaves): which of them are prefetched, and a bound of that which adds up
over weights.

The leaves of a run of blocks are gathered in buckets, in the order in which the weights are read. At most LEAVES_AHEAD
buckets are in flight before their block begins; the rest is exposed (*late*). So for gathers of L seconds in all, of B
bytes, of which A bytes are in the first buckets, L A / B seconds are prefetched. That is not a sum over weights, but is
bounded by one. With a price p in seconds per byte, and l seconds, b bytes of each weight:

    L A / B <= p A + sum of max(0, l - p b)    since L <= p B + sum of max(0, l - p b), and A <= B
    A       <= most - sum of `less`            `most`: the most bytes that the first buckets can hold; `less` of each
                                               weight that fills a bucket by itself
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
    def bytes_s(self) -> np.ndarray:
        """[axes] the price p of a byte: L / B where each weight has the slowest choice of those that go in buckets. At
        it the bound is exact for these choices."""
        whole_s, whole = np.zeros(self.seconds[0].shape[-1]), np.zeros(self.seconds[0].shape[-1])
        for nbytes, seconds, packs in zip(self.nbytes, self.seconds, self.packs, strict=True):
            at = np.where(packs[..., None], seconds, 0.0).max(1)  # [rows, axes]
            whole_s += at.max(0)
            whole += np.where(at.max(0) > 0, nbytes[at.argmax(0)], 0.0)
        return np.divide(whole_s, whole, out=np.zeros_like(whole), where=whole > 0)

    @cached_property
    def first(self) -> tuple[float, list[float]]:
        """`first_bytes` of these weights."""
        return first_bytes(self.nbytes)

    @property
    def most_s(self) -> np.ndarray:
        """[axes] seconds to subtract from the sum of `late_s` over all weights to get a lower bound of what is late."""
        return self.share * self.bytes_s * self.first[0]

    def late_s(self, index: int) -> np.ndarray:
        """[rows, columns, axes] seconds of gathers that are not prefetched because of one weight, up to `most_s`: of
        its own gather, and, if it fills a bucket by itself, of other weights."""
        nbytes, seconds = self.nbytes[index][:, None, None], self.seconds[index]
        ahead_s = np.maximum(0.0, seconds - self.bytes_s * nbytes) - self.bytes_s * self.first[1][index] * (
            nbytes >= BUCKET_BYTES
        )
        return np.asarray(seconds - self.share * ahead_s)


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
