"""The buckets of a place: gathers of leaves at the beginning of a step (runtime.leaves), and reductions of gradients
(runtime.gradsync)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from autopar.buckets import BUCKET_BYTES, PACKED, gradient_buckets, leaf_buckets, travels_alone
from autopar.cluster import Mesh
from autopar.codegen.edges import Edges, out_pair
from autopar.layout import LOCAL, Step, most_elements
from autopar.pipeline.chains import LeafBucket
from autopar.pipeline.stage_views import View
from autopar.plan import Plan
from autopar.problem.graph import Op, Program
from autopar.problem.prices import Prices
from autopar.simulate.pieces import Piece, together
from autopar.simulate.work import Turn

Member = tuple[str, int]  # (name of a parameter's Op, instance)


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients that are reduced together.

    members  (parameter, instance of its block) of each
    sums     the collectives, one after the other, and the copies around them
    held     bytes on the rank before each collective
    each     whether they run after every microbatch
    block    the block whose backward fills the bucket; None outside of blocks
    """

    members: tuple[Member, ...]
    sums: tuple[Piece, ...]
    held: tuple[float, ...]
    each: bool = False
    block: Hashable = None


@dataclass(frozen=True, slots=True)
class _Entry:
    """One parameter in a bucket: the steps that reduce its gradient, and whether they run after every microbatch."""

    member: Member
    sums: tuple[Step, ...]
    each: bool


@dataclass(frozen=True)
class Sync:
    """Makes the buckets of one plan on the mesh of a place."""

    program: Program
    plan: Plan
    edges: Edges
    prices: Prices

    @property
    def mesh(self) -> Mesh:
        """The mesh of a place."""
        return self.prices.mesh

    def members(self, view: View, turns: Sequence[Turn]) -> list[Member]:
        """The trained parameters that a stage holds, in order of their first use."""
        ops = self.program.ops
        held = [(name, -1) for name in view.held if ops[name].role == "param"]
        held += [
            (op.name, i)
            for op in ops.values()
            if op.role == "param" and op.scope in view.blocks
            for i in range(*view.blocks[op.scope])
        ]
        first: dict[Member, int] = {}
        for index, turn in enumerate(turns):
            for name in turn.item.reads:
                first.setdefault((name, turn.instance if ops[name].scope else -1), index)
        return sorted((m for m in held if ops[m[0]].call.outs[0].grad), key=lambda member: first.get(member, 0))

    def gradient_buckets(
        self, view: View, turns: Sequence[Turn], limit_bytes: float = BUCKET_BYTES
    ) -> list[GradientBucket]:
        """The gradient buckets of a stage, as in runtime.gradient_buckets: parameters into which it sends gradients, in
        reverse order of use, those of a bucket with the same collectives and dtype."""
        ways = {r.ref: r for r in self.edges.reshards if r.role == "sync"}
        found = gradient_buckets(
            [
                _Entry(member, self._several(way.backward(self.mesh.sizes)), way.each)
                for member in reversed(self.members(view, turns))
                if (way := ways.get((member[0], 0))) is not None and view.grades(self.program.ops[member[0]])
            ],
            alike=lambda entry: (
                tuple((step.kind, step.axis) for step in entry.sums),
                self.program.ops[entry.member[0]].dtype,
                entry.each,
            ),
            nbytes=lambda entry: self._gradient_bytes(entry.member),
            limit_bytes=limit_bytes,
        )
        return [self._gradient_bucket(entries) for entries in found]

    def _several(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """The steps on axes of two or more ranks."""
        return tuple(step for step in steps if self.mesh.sizes[step.axis] > 1)

    def _gradient_bucket(self, entries: Sequence[_Entry]) -> GradientBucket:
        """One bucket: each collective runs once over all small members together, and once for each large one."""
        rows = list(zip(*(e.sums for e in entries), strict=True))
        members, packed = [e.member for e in entries], all(step.kind in PACKED for step in entries[0].sums)
        sums = [piece for steps in rows for piece in self._together(members, steps, gradients=True, packed=packed)]
        held = [
            sum(self._held_bytes(e.member, step) for e, step in zip(entries, steps, strict=True))
            for steps in rows
            if steps[0].kind not in LOCAL
        ]
        name, instance = entries[-1].member
        block = (self.program.ops[name].scope, instance) if instance >= 0 else None
        return GradientBucket(tuple(members), tuple(sums), tuple(held), entries[0].each, block)

    def _gradient_bytes(self, member: Member) -> float:
        """Bytes of the gradient of a leaf on the rank that has most of it, in the dtype in which it is summed."""
        op = self.program.ops[member[0]]
        return self.prices.gradient_bytes(op, self.local_bytes(op))

    def _leaf_bytes(self, member: Member) -> float:
        """Bytes of a leaf on the rank that has most of it."""
        return self.local_bytes(self.program.ops[member[0]])

    def _held_bytes(self, member: Member, step: Step) -> float:
        """Bytes of a gradient on the rank before a step."""
        op = self.program.ops[member[0]]
        return self.prices.local_bytes(self.prices.gradient_bytes(op, self.program.bytes_of((op.name, 0))), step.before)

    def leaf_buckets(self, view: View, turns: Sequence[Turn], limit_bytes: float = BUCKET_BYTES) -> list[LeafBucket]:
        """The buckets of the leaves of a stage, as in runtime.leaves: in the order of the blocks, those of a bucket
        with the same axes and dtype."""
        ways = {r.ref: r for r in self.edges.reshards if r.role == "sync"}
        blocks = list(dict.fromkeys((turn.unit, turn.instance) for turn in turns if turn.instance >= 0))
        first = {
            member: blocks.index((self.program.ops[member[0]].scope, member[1])) if member[1] >= 0 else -1
            for member in self.members(view, turns)
        }
        moved = {
            member: self._several(way.forward(self.mesh.sizes))
            for member in sorted(first, key=first.__getitem__)
            if (way := ways.get((member[0], 0))) is not None
        }

        def reader(member: Member) -> tuple[str, int] | None:
            return blocks[first[member]] if first[member] >= 0 else None

        found = leaf_buckets(
            [member for member, steps in moved.items() if steps],
            alike=lambda member: self._key(member, moved),
            reader=reader,
            nbytes=self._leaf_bytes,
            limit_bytes=limit_bytes,
        )
        return [self._leaf_bucket(members, moved, [reader(member) for member in members]) for members in found]

    def _key(self, member: Member, moved: Mapping[Member, tuple[Step, ...]]) -> tuple[tuple[int, ...], str] | None:
        """The key that all leaves of a bucket share: axes and dtype; None for leaves that are resharded by
        themselves."""
        steps = moved[member]
        return (
            (tuple(step.axis for step in steps), self.program.ops[member[0]].dtype)
            if all(step.kind == "all_gather" for step in steps)
            else None
        )

    def _leaf_bucket(
        self,
        members: Sequence[Member],
        moved: Mapping[Member, tuple[Step, ...]],
        readers: Sequence[tuple[str, int] | None],
    ) -> LeafBucket:
        """One bucket of leaves: `moved` are the steps of each, `readers` the blocks that read them first."""
        pieces: list[Piece] = []
        bucketed = self._key(members[0], moved) is not None
        if bucketed:  # each step is one collective for all
            for steps in zip(*(moved[m] for m in members), strict=True):
                pieces += self._together(members, steps, gradients=False)
        else:
            for member in members:
                for step in moved[member]:
                    pieces += self._together([member], [step], gradients=False, packed=False)
        return LeafBucket(tuple(pieces), bucketed, (*dict.fromkeys(readers),))

    def _together(
        self, members: Sequence[Member], steps: Sequence[Step], *, gradients: bool, packed: bool = True
    ) -> list[Piece]:
        """The same step of all members (or of their gradients) with the copies around its collectives; `packed`: small
        ones in one buffer. The copies run on the compute stream, as in runtime.coalesced. A local step is a copy."""
        ops = [self.program.ops[name] for name, _ in members]
        full = [self.program.bytes_of((op.name, 0)) for op in ops]
        full = [self.prices.gradient_bytes(op, size) for op, size in zip(ops, full, strict=True)] if gradients else full
        first, last = ops[0].name, ops[-1].name
        nbytes_of = self._gradient_bytes if gradients else self._leaf_bytes
        small = [number for number, one in enumerate(members) if not travels_alone(nbytes_of(one))] if packed else None
        return together(steps, full, small, self.mesh, first if first == last else f"{first} ... {last}")

    def local_bytes(self, op: Op) -> float:
        """Bytes of one instance of a parameter's leaf on the rank that holds most of it."""
        return float(
            most_elements(op.call.outs[0].sizes, out_pair(self.plan, (op.name, 0)).value, self.mesh.sizes)
            * op.out_dtypes[0].itemsize
        )
