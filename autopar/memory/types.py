"""The result of `predict`: the peak of each place of a plan, and the tensors that are alive then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

KINDS = (
    "weights",
    "gradients",
    "optimizer",
    "master",
    "buffers",
    "inputs",
    "activations",
    "gathered weights",
    "whole gradients",
    "gradients of activations",
    "reshards",
    "temporaries",
    "gradient sums",
    "pipeline buffers",
)
"""What bytes are for. The kinds from "weights" to "inputs" are allocated for the whole step, the others come and go
with microbatches."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Bytes that are alive at the peak: `kind` (one of KINDS); `node` (an operator or parameter); bytes of `count`
    tensors together (instances of a block, microbatches); and the operators of the walk at which they are allocated
    (`since`) and freed (`until`)."""

    kind: str
    node: str
    where: str
    nbytes: float
    count: int = 1
    since: str = ""
    until: str = ""


@dataclass(frozen=True)
class Place:
    """One place of a pipeline (the only one of a plan without): bytes on its fullest rank.

    `when` is the moment of the peak, and `entries` what is alive then, largest first. `rest` are the bytes by kind at
    the end of the last backward of a training step: of whole gradients those that several microbatches added up, which
    are gone when they are scattered. `kept_bytes` is what one microbatch keeps for its backward in each of `stages`,
    and `in_flight` of how many microbatches a stage keeps that when the place keeps most. `phases` are the peaks of the
    parts of a step: forward, backward, update. `host_bytes` is what one rank has in host memory."""

    number: int
    stages: tuple[int, ...]
    when: str
    entries: tuple[Entry, ...]
    rest: Mapping[str, float]
    kept_bytes: tuple[float, ...]
    in_flight: tuple[int, ...]
    phases: Mapping[str, float]
    host_bytes: float = 0.0

    @property
    def peak_bytes(self) -> float:
        """The most bytes that are alive at once."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def rest_bytes(self) -> float:
        """Bytes of weights, gradients, optimizer state, buffers and inputs."""
        return sum(nbytes for kind, nbytes in self.rest.items() if kind != "whole gradients")

    @property
    def activations_bytes(self) -> float:
        """Bytes kept for the backward by all microbatches in flight."""
        return sum(n * kept for n, kept in zip(self.in_flight, self.kept_bytes, strict=True))

    def by_kind(self) -> dict[str, float]:
        """Bytes alive at the peak by kind."""
        found = dict.fromkeys(KINDS, 0.0)
        for entry in self.entries:
            found[entry.kind] += entry.nbytes
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}


@dataclass(frozen=True)
class Prediction:
    """The places of a plan."""

    places: tuple[Place, ...]

    @property
    def fullest(self) -> Place:
        """The place with the highest peak."""
        return max(self.places, key=lambda place: place.peak_bytes)

    @property
    def peak_bytes(self) -> float:
        """Bytes at the peak of the fullest rank of all."""
        return self.fullest.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "peak_bytes": self.peak_bytes,
            "fullest": self.fullest.number,
            "places": [{**asdict(p), "peak_bytes": p.peak_bytes, "by_kind": p.by_kind()} for p in self.places],
        }
