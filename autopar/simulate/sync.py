"""What a step does once on a place, at the end of its backward or backwards: sums of gradients in buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster import Mesh
from autopar.codegen.edges import Edges, out_pair
from autopar.cost.comm import collective_s, group_bytes
from autopar.layout import Step, most_elements
from autopar.pipeline.views import View
from autopar.plan import Plan
from autopar.problem.graph import Op, Program, Ref
from autopar.runtime.gradsync import BUCKET_BYTES
from autopar.simulate.pieces import Piece
from autopar.simulate.rank import Bucket
from autopar.simulate.work import Turn

Member = tuple[str, int]  # (name of a parameter's Op, instance)


@dataclass(frozen=True)
class Sync:
    """Makes them for one plan on the mesh of a place."""

    program: Program
    plan: Plan
    edges: Edges
    mesh: Mesh

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
        """The buckets of a stage, as runtime.gradsync fills them: parameters in reverse order of use, apart by axes and dtype."""
        filling: dict[tuple[tuple[int, ...], str], list[tuple[Member, tuple[Step, ...], float]]] = {}
        found: list[Bucket] = []
        ways = self._ways()
        for member in reversed(self.members(view, turns)):
            op, way = self.program.ops[member[0]], ways.get((member[0], 0))
            if way is None:
                continue
            entries = filling.setdefault((tuple(step.axis for step in way), op.dtype), [])
            entries.append((member, way, self.local_bytes(op)))
            if sum(nbytes for _, _, nbytes in entries) >= limit_bytes:
                found.append(self._bucket(entries))
                entries.clear()
        return found + [self._bucket(entries) for entries in filling.values() if entries]

    def _ways(self) -> dict[Ref, tuple[Step, ...]]:
        """The sums of each parameter's gradient over the axes on which it is summed in buckets."""
        return {r.ref: tuple(s for s in r.backward(self.mesh.sizes) if self.mesh.sizes[s.axis] > 1) for r in self.edges.reshards if r.role == "sync"}

    def _bucket(self, entries: Sequence[tuple[Member, tuple[Step, ...], float]]) -> Bucket:
        """One bucket: each sum runs once, over the bytes of all members together."""
        sums = []
        for index, step in enumerate(entries[0][1]):
            nbytes = sum(group_bytes(way[index], self.program.bytes_of((member[0], 0)), self.mesh.sizes) for member, way, _ in entries)
            name = f"{entries[0][0][0]} ... {entries[-1][0][0]}" if len(entries) > 1 else entries[0][0][0]
            sums.append(Piece(name, step.kind, step.axis, collective_s(step.kind, nbytes, self.mesh.axes[step.axis]), nbytes))
        return Bucket(tuple(member for member, _, _ in entries), tuple(sums))

    def local_bytes(self, op: Op) -> float:
        """Bytes of one instance of a parameter on the rank that holds most of it."""
        return float(most_elements(op.call.outs[0].sizes, out_pair(self.plan, (op.name, 0)).value, self.mesh.sizes) * op.out_dtypes[0].itemsize)
