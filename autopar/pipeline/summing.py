"""When the gradients of a stage are summed over ranks that are summed once per step (runtime.stages): the sums begin
after the last backward of the stage, or after its part for weights, and run beside all that its place does then. The
first stage, for which no other one waits, begins them in its last backward.

With the sums of the first stage of W seconds, of which the share f is the first bucket and l the last one, and its
whole backward of B seconds, in which gradients come evenly, and which takes X seconds longer if it overlaps all sums:

    seconds of them after that backward   max(l W, W - (1 - f) B, X), at most W

The sums of a place run one after the other. As long as they do, compute has the share 1 - contention of the device. A
place is done when its actions, the copies around sums, and the sums are. On a device that overlaps nothing, sums come
after the actions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autopar.pipeline.once_per_step import Sums, begun_s, merged


@dataclass(frozen=True, slots=True)
class Summing:
    """The sums of a stage.

    whole_s      seconds of all of them
    left_s       seconds of them after the end of the last backward, of the first stage
    late_s       seconds for them after all actions: of the copies around them, or of all where nothing overlaps
    contention   the share of the device that they take from compute
    """

    whole_s: float = 0.0
    left_s: float = 0.0
    late_s: float = 0.0
    contention: float = 0.0

    @staticmethod
    def of(
        sums: Iterable[Sums],
        summed_s: float,
        copies_s: float,
        backward_s: float,
        beside_s: float,
        contention: float,
    ) -> Summing:
        """Of a stage with these `sums`, which take `summed_s` as shares of full buckets; `backward_s` is B, `beside_s`
        X."""
        together = merged(sums)
        if not together:
            return NOTHING
        whole_s = summed_s + begun_s(together, contention)
        if contention >= 1.0:
            return Summing(late_s=whole_s)
        all_s = sum(one.seconds for one in together) or 1.0
        first, last = (sum(one.seconds * one.buckets[at] / one.nbytes for one in together) / all_s for at in (0, -1))
        left_s = min(whole_s, max(last * whole_s, whole_s - (1.0 - first) * backward_s, beside_s))
        return Summing(whole_s, left_s, copies_s, contention)


NOTHING = Summing()


def slower_s(took_s: float, left_s: float, contention: float) -> float:
    """Seconds by which an action of `took_s` takes longer while sums run for `left_s` from its begin on."""
    return max(0.0, min(took_s * contention / (1.0 - contention), contention * left_s))


def slower_all_s(most_s: np.ndarray, left_s: np.ndarray, contention: float) -> np.ndarray:
    """`slower_s` of many actions, given the most that they can be slower (`most_slower_s`)."""
    return np.maximum(0.0, np.minimum(most_s, contention * left_s))


def most_slower_s(took_s: np.ndarray, contention: float) -> np.ndarray:
    """Seconds by which actions of `took_s` take longer if sums run all the time."""
    return took_s * (contention / (1.0 - contention))
