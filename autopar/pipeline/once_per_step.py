"""What a place does once per step that is not the sum of what its pieces do.

    updates    of weights that several pieces read: pieces are priced as if each were on a place of its own (pipeline.costs), but a place has such a
               weight once, though each of its stages sums a gradient of its own (runtime.pipeline)
    sums       of gradients: pieces are priced with their shares of full buckets, but what a place has less than one begins a collective all the same
    each       of those that are summed after every microbatch pieces are priced as if the model had one stage: of a stage that has less than one bucket nothing hides
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
    """The optimizer's step of one weight: its `seconds`, which the prices of all `pieces` have."""

    pieces: Mapping[str, None]
    seconds: float

    def too_many_s(self, place: Sequence[str]) -> float:
        """Seconds that the prices of the pieces of one place have too many."""
        return self.seconds * max(0, sum(name in self.pieces for name in place) - 1)


def shared_updates(once: Model, choice: Sequence[int]) -> list[Update]:
    """Those of weights of the model itself that several pieces outside of blocks read; `once` says what a step costs once, `choice` is a solution of it."""
    program = once.links[0].program
    shared = [op for op in program.ops.values() if op.role == "param" and not op.scope and len(program.readers.get((op.name, 0), ())) > 1]
    home, at = homes(program, units(program)) if shared else {}, {cluster.members[0].name: index for index, cluster in enumerate(once.clusters)}
    found = []
    for op in shared:
        pieces = {home[reader.name]: None for reader, _ in program.readers[op.name, 0]}
        alone = {name: None for name in pieces if name not in program.runs}
        found.append(Update(alone, once.update_s(at[op.name], choice[at[op.name]])))
    return [update for update in found if len(update.pieces) > 1]


@dataclass(frozen=True, slots=True)
class Sums:
    """Gradients of a piece that travel with all others of the same `kinds`: bytes of each on a rank (`each_bytes`, in the order of use), in buckets of `full_bytes`; the collectives
    in a row, on which axis, each with the seconds that the piece has of full ones, of which `behind_s` are priced as if they were in the background."""

    kinds: Hashable
    each_bytes: tuple[float, ...]
    full_bytes: float
    moves: tuple[tuple[str, MeshAxis, float], ...]
    behind_s: float = 0.0

    @property
    def nbytes(self) -> float:
        """Bytes of all of them."""
        return sum(self.each_bytes)

    @property
    def seconds(self) -> float:
        """Seconds of all collectives."""
        return sum(seconds for *_, seconds in self.moves)


def merged(sums: Iterable[Sums]) -> tuple[Sums, ...]:
    """Those of the same kinds as one."""
    together: dict[Hashable, list[Sums]] = {}
    for one in sums:
        if one.nbytes > 0.0:
            together.setdefault(one.kinds, []).append(one)
    return tuple([Sums(kinds, tuple([nbytes for one in found for nbytes in one.each_bytes]), found[0].full_bytes,
                       tuple([(*moves[0][:2], sum(seconds for *_, seconds in moves)) for moves in zip(*(one.moves for one in found), strict=True)]), sum(one.behind_s for one in found))
                  for kinds, found in together.items()])


def begun_s(place: Iterable[Sums]) -> float:
    """Seconds that the sums of one place take longer than its pieces' shares of full buckets."""
    found = 0.0
    for one in merged(place):
        for kind, axis, seconds in one.moves if one.nbytes < one.full_bytes else ():
            full_s, own_s = (collective_s(kind, size, axis) for size in (one.full_bytes, one.nbytes))
            found += seconds * max(0.0, own_s / one.nbytes * one.full_bytes / full_s - 1.0)
    return found


def each_s(stage: Iterable[tuple[float, Sequence[Sums]]], contention: float) -> float:
    """Seconds by which sums after a microbatch make the backward of a stage longer: of its pieces in the order of the backward, each with its seconds but for them. A bucket begins
    when it is full, or when all is done; what hides takes its share `contention` of the compute units (1: nothing hides)."""
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
    """Those of a stage as its backward fills them (runtime.gradsync): how far that has come, until when each axis is busy, seconds of all collectives so far, and by kinds what is filled."""

    now_s: float = 0.0
    moved_s: float = 0.0
    until_s: dict[MeshAxis, float] = field(default_factory=dict)
    filled: dict[Hashable, tuple[Sums, float]] = field(default_factory=dict)

    def add(self, one: Sums, nbytes: float) -> None:
        """A gradient of so many bytes is there."""
        _, before = self.filled.get(one.kinds, (one, 0.0))
        self.filled[one.kinds] = one, before + nbytes
        if before + nbytes >= one.full_bytes:
            self.send(one.kinds)

    def send(self, kinds: Hashable) -> None:
        """Begin the sum of a bucket, one collective after the other."""
        one, nbytes = self.filled.pop(kinds)
        end_s = self.now_s
        for kind, axis, _ in one.moves:
            seconds = collective_s(kind, nbytes, axis)
            end_s = self.until_s[axis] = max(end_s, self.until_s.get(axis, 0.0)) + seconds
            self.moved_s += seconds
