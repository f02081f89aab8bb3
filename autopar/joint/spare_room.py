"""The room that results of a glance leave: what runs takes more memory than the sum of its pieces (temporaries of a
loss over a vocabulary, gathered weights, sends), and is walked for one result to know how much. Called by
joint.pricing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.joint.place_kinds import Ground
from autopar.joint.staging import Found
from autopar.joint.timetables import Timetable
from autopar.memory import predict


@dataclass(frozen=True)
class Spare:
    """Bytes per device that stay free on the place of the last stage, and on each of the other places."""

    last_bytes: float = 0.0
    other_bytes: float = 0.0

    @staticmethod
    def of(found: Found) -> Spare | None:
        """What `found` takes as it runs beyond what was added up; None where it fits."""
        walked = [place.peak_bytes for place in predict(found.program, found.plan).places]
        if all(nbytes <= limit for nbytes, limit in zip(walked, found.ground.limits, strict=True)):
            return None
        beyond = [max(0.0, nbytes - added) for nbytes, added in zip(walked, found.places_bytes, strict=True)]
        last_bytes = beyond.pop(found.table.at[-1])
        return Spare(last_bytes, max(beyond, default=0.0))

    def mean_bytes(self, places: int) -> float:
        """The mean over all places."""
        return (self.last_bytes + (places - 1) * self.other_bytes) / places

    def left(self, ground: Ground, table: Timetable) -> Ground:
        """The places with that much less memory."""
        last = table.at[-1]
        return replace(
            ground,
            limits=tuple(
                limit - (self.last_bytes if place == last else self.other_bytes)
                for place, limit in enumerate(ground.limits)
            ),
        )
