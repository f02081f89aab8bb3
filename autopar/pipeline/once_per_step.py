"""Corrections to the price of a pipeline's place, which is otherwise the sum of the prices of its pieces
(pipeline.costs).

    updates    Each piece is priced with the optimizer's step of every weight that it reads, as if it were alone on its
               place. A place with several readers of one weight has that weight once, and steps it once
               (`Update.too_many_s`); each of its stages still sums a gradient.
    sums       A piece is priced with its share of full buckets. A stage with less than one bucket starts a collective
               all the same (`begun_s`).
    each       Sums after every microbatch are priced as if the model were one stage. A stage with less than one bucket
               overlaps none of them with its backward (`each_s`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cluster import MeshAxis
from autopar.cost.comm import collective_s
from autopar.pipeline.units import homes, units
from autopar.problem.build import Model


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's step of one weight that several `pieces` read: the price of each of them contains its
    `seconds`."""

    pieces: Mapping[str, None]
    seconds: float

    def too_many_s(self, place: Sequence[str]) -> float:
        """Seconds by which the prices of the pieces of one place are too high, as the place takes this step once."""
        return self.seconds * max(0, sum(name in self.pieces for name in place) - 1)


def shared_updates(once: Model, choice: Sequence[int]) -> list[Update]:
    """The updates of weights outside of blocks that several pieces read, under the solution `choice` of `once`
    (problem.step_shares)."""
    program = once.links[0].program
    shared = [
        op
        for op in program.ops.values()
        if op.role == "param" and not op.scope and len(program.readers.get((op.name, 0), ())) > 1
    ]
    home, at = (
        homes(program, units(program)) if shared else {},
        {cluster.members[0].name: index for index, cluster in enumerate(once.clusters)},
    )
    found = []
    for op in shared:
        pieces = {home[reader.name]: None for reader, _ in program.readers[op.name, 0]}
        alone = {name: None for name in pieces if name not in program.runs}
        found.append(Update(alone, once.update_s(at[op.name], choice[at[op.name]])))
    return [update for update in found if len(update.pieces) > 1]


@dataclass(frozen=True, slots=True)
class Sums:
    """The gradients of a piece that are summed by the same collectives (`kinds`) as others of their stage, in the same
    buckets.

        each_bytes    bytes of each on a rank, in the order of use
        full_bytes    of a full bucket
        moves         the collectives of a sum: kind, axis, and seconds as the piece's share of full buckets
        behind_s      the part of those seconds that is priced as in the background
        copies_s      seconds of the copies around the collectives, and around those that gather the weights' leaves
    """

    kinds: Hashable
    each_bytes: tuple[float, ...]
    full_bytes: float
    moves: tuple[tuple[str, MeshAxis, float], ...]
    behind_s: float = 0.0
    copies_s: float = 0.0

    @property
    def nbytes(self) -> float:
        """Bytes on a rank of all these gradients."""
        return sum(self.each_bytes)

    @property
    def seconds(self) -> float:
        """Seconds of all collectives."""
        return sum(seconds for *_, seconds in self.moves)

    @property
    def buckets(self) -> list[float]:
        """Bytes of each bucket, in the order in which they are sent: the last gradients in the order of use, until it
        is full, and so on. It is larger than a full bucket by as much as its last gradient, which may travel by
        itself."""
        found, filled = list[float](), 0.0
        for nbytes in reversed(self.each_bytes):
            filled += nbytes
            if filled >= self.full_bytes:
                found.append(filled)
                filled = 0.0
        return [*found, filled] if filled else found


def merged(sums: Iterable[Sums]) -> tuple[Sums, ...]:
    """Sums by the same collectives together as one, in the order in which they come first."""
    together: dict[Hashable, list[Sums]] = {}
    for one in sums:
        if one.nbytes > 0.0:
            together.setdefault(one.kinds, []).append(one)
    return tuple([_as_one(found) for found in together.values()])


def _as_one(sums: Sequence[Sums]) -> Sums:
    """Sums by the same collectives as one: bytes and seconds added up."""
    moves = []
    for same in zip(*(one.moves for one in sums), strict=True):
        kind, axis, _ = same[0]
        moves.append((kind, axis, sum(seconds for *_, seconds in same)))
    each_bytes = tuple([nbytes for one in sums for nbytes in one.each_bytes])
    behind_s, copies_s = sum(one.behind_s for one in sums), sum(one.copies_s for one in sums)
    return Sums(sums[0].kinds, each_bytes, sums[0].full_bytes, tuple(moves), behind_s, copies_s)


def begun_s(stage: Iterable[Sums], contention: float) -> float:
    """Seconds by which the sums of one stage take longer than its pieces' shares of full buckets.

    For gradients of n bytes in all, less than the b bytes of a full bucket, a piece is priced with a share of the time
    t(b), but the stage takes t(n): its seconds times (t(n) / n) / (t(b) / b) - 1, at least 0. Pieces are priced with
    copies that overlap collectives (work.Did.summed_s), which those of the first bucket do not; `contention`: the share
    of seconds in the background that pieces are priced with.
    """
    found = 0.0
    for one in merged(stage):
        found += (1.0 - contention) * one.copies_s * one.buckets[0] / one.nbytes
        for kind, axis, seconds in one.moves if one.nbytes < one.full_bytes else ():
            full_s, own_s = (collective_s(kind, size, axis) for size in (one.full_bytes, one.nbytes))
            found += seconds * max(0.0, own_s / one.nbytes * one.full_bytes / full_s - 1.0)
    return found


def each_s(stage: Iterable[tuple[float, Sequence[Sums]]], contention: float) -> float:
    """Seconds by which sums after a microbatch make the backward of a stage longer.

    `stage`: its pieces in the order of the backward, each with its seconds without such sums. Gradients come evenly
    spread over a piece; a bucket is summed when it is full or the backward is done. Seconds that overlap the backward
    count `contention` times (1: nothing overlaps).
    """
    buckets = _Buckets()
    for seconds, sums in stage:
        gradients = [(one, nbytes) for one in sums for nbytes in reversed(one.each_bytes)]
        for one, nbytes in gradients or ((None, 0.0),):
            buckets.now_s += seconds / max(1, len(gradients))
            if one is not None:
                buckets.add(one, nbytes)
    for kinds in [*buckets.filled]:
        buckets.send(kinds)
    shown_s = max([0.0, *(until_s - buckets.now_s for until_s in buckets.until_s.values())])
    return shown_s + contention * max(0.0, buckets.moved_s - shown_s)


@dataclass(eq=False)
class _Buckets:
    """The buckets of a stage during its backward (runtime.gradsync), in seconds since its begin: `now_s`, when the last
    collective of each axis ends (`until_s`), the seconds of all collectives so far (`moved_s`), and by kinds the bucket
    that is being filled, with its bytes."""

    now_s: float = 0.0
    moved_s: float = 0.0
    until_s: dict[MeshAxis, float] = field(default_factory=dict)
    filled: dict[Hashable, tuple[Sums, float]] = field(default_factory=dict)

    def add(self, one: Sums, nbytes: float) -> None:
        """A gradient of `nbytes` is ready: put it into its bucket."""
        _, before = self.filled.get(one.kinds, (one, 0.0))
        self.filled[one.kinds] = one, before + nbytes
        if before + nbytes >= one.full_bytes:
            self.send(one.kinds)

    def send(self, kinds: Hashable) -> None:
        """Begin the collectives of a bucket, one after the other."""
        one, nbytes = self.filled.pop(kinds)
        end_s = self.now_s
        for kind, axis, _ in one.moves:
            seconds = collective_s(kind, nbytes, axis)
            end_s = self.until_s[axis] = max(end_s, self.until_s.get(axis, 0.0)) + seconds
            self.moved_s += seconds
