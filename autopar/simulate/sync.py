"""What a step does once on a place, after (or at the end of) its backwards: sums of gradients in buckets, gradients of weights that
several places hold, the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cluster import Mesh, MeshAxis
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
    """Makes these for one plan on the mesh of a place; `line` is the pipeline axis (None: there is none)."""

    program: Program
    plan: Plan
    edges: Edges
    mesh: Mesh
    line: MeshAxis | None = None

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

    def shared(self, views: Sequence[View]) -> list[Shared]:
        """The weights that several places hold, by these places: their gradients are summed over them at the end."""
        places: dict[str, dict[int, None]] = {}
        for view, stage in zip(views, self.plan.stages, strict=True):
            for name in view.held:
                if self.program.ops[name].role == "param" and self.program.ops[name].call.outs[0].grad:
                    places.setdefault(name, {})[stage.place] = None
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, where in places.items():
            if len(where) > 1 and self.line is not None:
                groups.setdefault(tuple(sorted(where)), []).append(name)
        return [self._shared(names, where) for where, names in groups.items()]

    def _shared(self, names: Sequence[str], places: tuple[int, ...]) -> Shared:
        assert self.line is not None, "several places have a pipeline axis"
        sizes, axis = [self.local_bytes(self.program.ops[name]) for name in names], _part(self.line, len(places))
        return Shared(tuple(names), places, sum(collective_s("all_reduce", nbytes, axis) for nbytes in sizes), sum(sizes))


@dataclass(frozen=True, slots=True)
class Shared:
    """Weights that `places` hold: seconds of the sums of their gradients, one after the other, and the bytes of all."""

    names: tuple[str, ...]
    places: tuple[int, ...]
    seconds: float
    nbytes: float


def _part(line: MeshAxis, count: int) -> MeshAxis:
    """`count` places of a pipeline axis, over its outermost level."""
    return line if count == line.size else replace(line, size=count, spans=(replace(line.spans[0], size=count),))
