"""How much of the leaves of a run of blocks that are gathered once per step is on its way before its block begins, at most: what the first few buckets of a block hold, in
the order in which its weights are read (pipeline.passes has it exactly; runtime.leaves does it). What is not is late, as seconds that add up over weights:

    of seconds L, with l of each weight and b bytes of it, the share A / B is ahead, with A the bytes of the first buckets and B those of all
    L A / B <= price A + sum of max(0, l - price b)     for any price of a byte, as A <= B
    A       <= most - sum of less                       of the weights that fill a bucket by themselves
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from autopar.layout import BUCKET_BYTES, LEAVES_AHEAD
from autopar.problem.graph import Program


@dataclass(frozen=True, eq=False)
class Leaves:
    """Of a run of `count` blocks (`in_a_row`), by weight in that order: its `nbytes` [rows], which are none where it is not gathered once per step, and its `seconds` [rows, columns, axes]."""

    nbytes: Sequence[np.ndarray]
    seconds: Sequence[np.ndarray]
    count: float

    @property
    def share(self) -> float:
        """Of what the first buckets hold: the first block has nothing in front of it."""
        return 1.0 - 1.0 / self.count

    @cached_property
    def bytes_s(self) -> np.ndarray:
        """[axes] seconds of a byte: at these the choices that take longest are late by as much as they are."""
        whole_s, whole = np.zeros(self.seconds[0].shape[-1]), np.zeros(self.seconds[0].shape[-1])
        for nbytes, seconds in zip(self.nbytes, self.seconds, strict=True):
            at = seconds.max(1)  # [rows, axes]
            whole_s += at.max(0)
            whole += np.where(at.max(0) > 0, nbytes[at.argmax(0)], 0.0)
        return np.divide(whole_s, whole, out=np.zeros_like(whole), where=whole > 0)

    @cached_property
    def first(self) -> tuple[float, list[float]]:
        """The most bytes of the first buckets, and how many less they are with a weight that fills one by itself."""
        return first_bytes(self.nbytes)

    @property
    def most_s(self) -> np.ndarray:
        """[axes] seconds by which all that is late together is less than the sum of `late_s`."""
        return self.share * self.bytes_s * self.first[0]

    def late_s(self, index: int) -> np.ndarray:
        """[rows, columns, axes] seconds of one weight that are late, and what it makes others late by filling a bucket."""
        nbytes, seconds = self.nbytes[index][:, None, None], self.seconds[index]
        ahead_s = np.maximum(0.0, seconds - self.bytes_s * nbytes) - self.bytes_s * self.first[1][index] * (nbytes >= BUCKET_BYTES)
        return np.asarray(seconds - self.share * ahead_s)


def in_a_row(program: Program, scope: str) -> float:
    """How many blocks run one after the other, the first with nothing in front of it: all of the run of `scope`; infinitely many where it has another run in front of it."""
    return program.runs[scope].count if scope == next(iter(program.runs)) else math.inf


def share_ahead(each: Sequence[float], count: float) -> float:
    """Of the leaves of each of `count` blocks (`in_a_row`), so many bytes each in the order in which they are read (0: not gathered once per step), the share that is on its way before its
    block begins: that of the first buckets, which the first block has nothing in front of."""
    whole, filled = sum(each), [0.0]
    for nbytes in each:
        filled[-1] += nbytes
        if filled[-1] >= BUCKET_BYTES:
            filled.append(0.0)
    bare = max(1, math.ceil(BUCKET_BYTES / 2 / max(1.0, whole))) / count
    return max(0.0, 1.0 - bare) * sum(filled[:LEAVES_AHEAD]) / whole if whole else 1.0


def first_bytes(options: Sequence[np.ndarray]) -> tuple[float, list[float]]:
    """Of weights in the order in which they are read, each with one of so many bytes: what the first LEAVES_AHEAD buckets hold at most, and what of that they do not, of
    each weight that fills a bucket by itself."""
    fills = [index for index, each in enumerate(options) if (each >= BUCKET_BYTES).any()][:LEAVES_AHEAD]
    most, less = _most_bytes(options), [0.0] * len(options)
    among = {those: _most_bytes([_of(each, index in those) if index in fills else each for index, each in enumerate(options)])
             for count in range(1, len(fills) + 1) for those in itertools.combinations(fills, count)}
    for index in fills:
        less[index] = min(most - nbytes - sum(less[other] for other in those) for those, nbytes in among.items() if index in those)
    return most, less


def _of(each: np.ndarray, filling: bool) -> np.ndarray:
    """Those bytes of a weight that fill a bucket, or the others."""
    return each[(each >= BUCKET_BYTES) == filling]


def _most_bytes(options: Sequence[np.ndarray]) -> float:
    """What the first buckets hold at most; negative where some weight has nothing to choose from."""
    if not all(len(each) for each in options):
        return -np.inf

    @cache
    def most(first: int, buckets: int) -> float:
        """Of so many buckets that begin with the weight `first`, each closed by one on top of less than it holds."""
        found, before = 0.0, 0.0
        for index in range(first, len(options) if buckets else first):
            found = max(found, min(before, BUCKET_BYTES) + float(options[index].max()) + most(index + 1, buckets - 1))
            small = _of(options[index], False)
            if not len(small):
                break
            before += float(small.max())
        return found

    return most(0, LEAVES_AHEAD)
