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

    def sent(self, nbytes: float) -> list[tuple[str, MeshAxis, float]]:
        """The collectives of gradients of `nbytes`: kind, axis and bytes of a group before it. A scatter leaves those
        behind it one part of what it was given."""
        found = list[tuple[str, MeshAxis, float]]()
        for kind, axis, _ in self.moves:
            found.append((kind, axis, nbytes))
            nbytes /= axis.size if kind == "reduce_scatter" else 1
        return found

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
        if one.nbytes < one.full_bytes:
            full_s, own_s = (
                [collective_s(kind, nbytes, axis) for kind, axis, nbytes in one.sent(size)]
                for size in (one.full_bytes, one.nbytes)
            )
            for (_, _, seconds), full, own in zip(one.moves, full_s, own_s, strict=True):
                found += seconds * max(0.0, own / one.nbytes * one.full_bytes / full - 1.0)
    return found


def each_s(stage: Iterable[tuple[float, Sequence[Sums]]], contention: float) -> float:
    """Seconds by which sums after a microbatch make the backward of a stage longer.

    `stage`: its pieces in the order of the backward, each with its seconds without such sums, which are spent on its
    gradients in proportion to their bytes, as products of weights take. A bucket is summed when it is full or the
    backward is done. Seconds that overlap the backward count `contention` times (1: nothing overlaps).
    """
    buckets = _Buckets()
    for number, (seconds, sums) in enumerate(stage):
        buckets.piece = number
        gradients = [(one, nbytes) for one in sums for nbytes in reversed(one.each_bytes)]
        all_bytes = sum(nbytes for _, nbytes in gradients)
        buckets.now_s += 0.0 if all_bytes else seconds
        for one, nbytes in gradients:
            buckets.now_s += seconds * nbytes / all_bytes if all_bytes else 0.0
            buckets.add(one, nbytes)
    buckets.finish()
    shown_s = max([0.0, *(until_s - buckets.now_s for until_s in buckets.until_s.values())])
    return shown_s + contention * max(0.0, buckets.moved_s - shown_s)


@dataclass(eq=False)
class _Chain:
    """The collectives of a bucket that are `left`, of gradients that end with `piece`; those before end at `end_s`."""

    piece: int
    end_s: float
    left: list[tuple[str, MeshAxis, float]]


@dataclass(eq=False)
class _Buckets:
    """The buckets of a stage during its backward (runtime.gradsync), in seconds since its begin: `now_s`, when the last
    collective of each axis ends (`until_s`), the seconds of all collectives so far (`moved_s`), and by kinds the bucket
    that is being filled, with its bytes. `piece`: the number of the one that runs. Of a sum over several axes the next
    collective begins when a bucket is full behind its piece (pipeline.chains): `chains` wait for that."""

    now_s: float = 0.0
    moved_s: float = 0.0
    piece: int = 0
    until_s: dict[MeshAxis, float] = field(default_factory=dict)
    filled: dict[Hashable, tuple[Sums, float]] = field(default_factory=dict)
    chains: list[_Chain] = field(default_factory=list)

    def add(self, one: Sums, nbytes: float) -> None:
        """A gradient of `nbytes` is ready: put it into its bucket."""
        _, before = self.filled.get(one.kinds, (one, 0.0))
        self.filled[one.kinds] = one, before + nbytes
        if before + nbytes >= one.full_bytes:
            self._send(one.kinds)

    def finish(self) -> None:
        """Send what is left."""
        for kinds in [*self.filled]:
            self._send(kinds)
        while self.chains:
            self._go_on(self.chains)

    def _send(self, kinds: Hashable) -> None:
        """Begin to sum a bucket; the chains of other pieces go on."""
        one, nbytes = self.filled.pop(kinds)
        self._go_on([chain for chain in self.chains if chain.piece != self.piece])
        self.chains.append(_Chain(self.piece, self.now_s, one.sent(nbytes)))
        self._go_on(self.chains[-1:])

    def _go_on(self, chains: Sequence[_Chain]) -> None:
        """Begin the next collective of each of these chains."""
        for chain in chains:
            if chain.left:
                kind, axis, nbytes = chain.left.pop(0)
                seconds = collective_s(kind, nbytes, axis)
                begin_s = max(self.now_s, chain.end_s, self.until_s.get(axis, 0.0))
                chain.end_s = self.until_s[axis] = begin_s + seconds
                self.moved_s += seconds
        self.chains = [chain for chain in self.chains if chain.left]
