"""What a step does once on a place, at the end of its backward or backwards: sums of gradients in buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster import Mesh
from autopar.codegen.edges import Edges, out_pair
from autopar.cost.comm import collective_s, group_bytes, step_s
from autopar.layout import BUCKET_BYTES, Step, most_elements
from autopar.pipeline.views import View
from autopar.plan import Plan
from autopar.problem.graph import Op, Program
from autopar.problem.prices import Prices
from autopar.simulate.pieces import Piece
from autopar.simulate.rank import Bucket
from autopar.simulate.work import Turn

Member = tuple[str, int]  # (name of a parameter's Op, instance)


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a parameter takes once per step: the steps that sum its gradient, and those that gather its leaf."""

    member: Member
    sums: tuple[Step, ...]
    gathers: tuple[Step, ...]
    each: bool


@dataclass(frozen=True)
class Sync:
    """Makes them for one plan on the mesh of a place."""

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
        held += [(op.name, i) for op in ops.values() if op.role == "param" and op.scope in view.blocks for i in range(*view.blocks[op.scope])]
        first: dict[Member, int] = {}
        for index, turn in enumerate(turns):
            for name in turn.item.reads:
                first.setdefault((name, turn.instance if ops[name].scope else -1), index)
        return sorted((m for m in held if ops[m[0]].call.outs[0].grad), key=lambda member: first.get(member, 0))

    def buckets(self, view: View, turns: Sequence[Turn], limit_bytes: float = BUCKET_BYTES) -> list[Bucket]:
        """The buckets of a stage, as runtime.gradsync fills them: parameters in reverse order of use, apart by collectives and dtype."""
        filling: dict[tuple[object, ...], list[_Entry]] = {}
        found: list[Bucket] = []
        ways = {r.ref: r for r in self.edges.reshards if r.role == "sync"}
        for member in reversed(self.members(view, turns)):
            op, way = self.program.ops[member[0]], ways.get((member[0], 0))
            if way is None:
                continue
            entry = _Entry(member, self._several(way.backward(self.mesh.sizes)), self._several(way.forward(self.mesh.sizes)), way.each)
            key = tuple(tuple((step.kind, step.axis) for step in steps) for steps in (entry.sums, entry.gathers))
            entries = filling.setdefault((key, op.dtype, way.each), [])
            entries.append(entry)
            if sum(self.local_bytes(self.program.ops[e.member[0]]) for e in entries) >= limit_bytes:
                found.append(self._bucket(entries))
                entries.clear()
        return found + [self._bucket(entries) for entries in filling.values() if entries]

    def _several(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """The steps over several ranks."""
        return tuple(step for step in steps if self.mesh.sizes[step.axis] > 1)

    def _bucket(self, entries: Sequence[_Entry]) -> Bucket:
        """One bucket: each collective runs once, over the bytes of all members together."""
        sums = [self._together(entries, steps, gradients=True) for steps in zip(*(e.sums for e in entries), strict=True)]
        gathers = [self._together(entries, steps, gradients=False) for steps in zip(*(e.gathers for e in entries), strict=True)]
        return Bucket(tuple(e.member for e in entries), tuple(sums), tuple(gathers), entries[0].each)

    def _together(self, entries: Sequence[_Entry], steps: Sequence[Step], *, gradients: bool) -> Piece:
        """The same step of all members, or of their gradients, at once, with the copies around it."""
        ops = [self.program.ops[e.member[0]] for e in entries]
        first, last = ops[0].name, ops[-1].name
        full = [self.program.bytes_of((op.name, 0)) for op in ops]
        full = [self.prices.gradient_bytes(op, size) for op, size in zip(ops, full, strict=True)] if gradients else full
        nbytes = sum(group_bytes(step, size, self.mesh.sizes) for step, size in zip(steps, full, strict=True))
        copies = sum(step_s(step, size, self.mesh) - collective_s(step.kind, group_bytes(step, size, self.mesh.sizes), self.mesh.axes[step.axis])
                     for step, size in zip(steps, full, strict=True))
        seconds = collective_s(steps[0].kind, nbytes, self.mesh.axes[steps[0].axis]) + copies
        return Piece(first if first == last else f"{first} ... {last}", steps[0].kind, steps[0].axis, seconds, nbytes)

    def local_bytes(self, op: Op) -> float:
        """Bytes of one instance of a parameter's leaf on the rank that holds most of it."""
        return float(most_elements(op.call.outs[0].sizes, out_pair(self.plan, (op.name, 0)).value, self.mesh.sizes) * op.out_dtypes[0].itemsize)
