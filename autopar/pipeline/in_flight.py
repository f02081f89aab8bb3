"""How many microbatches each stage of a place has in flight, at every moment of a step at which the place may be
fullest.

    1F1B, interleaved: 4 places of 2 stages, 8 microbatches; of the second place    stage 1    stage 5
                                                                                        8          1
                                                                                        7          2
                                                                                        6          3
                                                                                        5          4

Each row is a moment, with the microbatches in flight of both stages. If both stages keep equally many bytes per
microbatch, the place is equally full at all of them. If one keeps more, because fewer of its blocks run again, it is
fullest at one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.pipeline.orders import Action, Flying, changed
from autopar.pipeline.stretches import Cost


@dataclass(frozen=True, eq=False)
class InFlight:
    """The microbatches in flight of a place: `kept` [moments, stages] of how many each of its stages, in order, keeps
    activations; `halfway` [moments, stages] for how many it keeps gradients between the two parts of a split backward.
    Moments at which another has as many in every stage are left out."""

    kept: np.ndarray
    halfway: np.ndarray

    @staticmethod
    def of(line: Sequence[Action], stages: Sequence[int]) -> InFlight:
        """Of a place with these `stages` that runs `line`."""
        now, peaks, grown = {stage: Flying(0) for stage in stages}, dict[tuple[Flying, ...], None](), False
        for stage, more in changed(line):
            grows = more.kept + more.halfway > 0
            if grown and not grows:
                peaks[tuple(now.values())] = None
            kept, halfway = now[stage]
            now[stage], grown = Flying(kept + more.kept, halfway + more.halfway), grows
        found = np.array([*peaks] or [tuple(now.values())], float).reshape(-1, 2 * len(stages))
        most = found[
            [not (np.all(found >= each, axis=1) & np.any(found > each, axis=1)).any() for each in found]
        ].reshape(-1, len(stages), 2)
        return InFlight(most[..., 0], most[..., 1])

    def peak_bytes(self, kept_bytes: np.ndarray, halfway_bytes: np.ndarray) -> np.ndarray:
        """[ways] the most bytes that microbatches in flight take at once, given what each keeps [stages, ways], and
        more between the two parts of its backward."""
        return np.asarray((self.kept @ kept_bytes + self.halfway @ halfway_bytes).max(0))

    def fullest(self, kept_bytes: np.ndarray, halfway_bytes: np.ndarray) -> list[Flying]:
        """The microbatches in flight of each stage when these take most, given what each keeps [stages], and more
        between the two parts of its backward."""
        at = int((self.kept @ kept_bytes + self.halfway @ halfway_bytes).argmax())
        return [Flying(int(kept), int(halfway)) for kept, halfway in zip(self.kept[at], self.halfway[at], strict=True)]


def per_microbatch(stages: Sequence[Sequence[Cost]]) -> tuple[np.ndarray, np.ndarray]:
    """[stages] bytes that a microbatch in flight keeps, and more between the two parts of its backward, of stages of
    these pieces."""
    return np.array([sum(c.kept_bytes for c in part) for part in stages]), np.array(
        [sum(c.halfway_bytes for c in part) for part in stages]
    )


def place_bytes(stages: Sequence[Sequence[Cost]], flying: InFlight) -> float:
    """Bytes per device of a place with stages of these pieces, at the moment at which it is fullest. `live_bytes` count
    for one piece at a time."""
    rest = sum(c.rest_bytes for part in stages for c in part)
    return (
        rest
        + float(flying.peak_bytes(*per_microbatch(stages)))
        + max((c.live_bytes for part in stages for c in part), default=0.0)
    )
