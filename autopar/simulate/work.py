"""The work of one rank in the forward and the backward of one stage, in the order of the emitted code.

The order is that of `codegen.scope`: operators in graph order (placed ones as `codegen.placements` orders them), each
reshard before the first operator that reads its result, blocks instance by instance. The backward is in reverse order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from autopar.codegen.edges import Edges, Reshard, Spot, in_pair, spot_of
from autopar.codegen.placements import in_order
from autopar.layout import moving
from autopar.pipeline.stage_views import View
from autopar.plan import Plan
from autopar.problem.graph import Op, Program, Ref
from autopar.problem.pairs import LayoutPair
from autopar.simulate.pieces import Piece, Pieces


@dataclass(eq=False, slots=True)
class Item:
    """One operator or reshard.

        again       weights that its backward gathers first, each with its bytes on the rank
        replay      the part of its forward that is recomputed with its block
        weights     the share of its backward that computes gradients of weights (1 for a reshard of a weight)
        lane        the (axis, coordinate) on which alone it runs; None where all ranks run it
        reads       the parameters that it reads, themselves or transposed or cast, by the names of their Ops

    Of a reshard of a weight:

        fetches     it is a gather that can be prefetched
        later       its backward runs in the background
        full_bytes  bytes of the gathered weight on the rank
        held_bytes  bytes of its gradient on the rank before each collective
    """

    name: str
    forward: tuple[Piece, ...] = ()
    backward: tuple[Piece, ...] = ()
    again: tuple[tuple[tuple[Piece, ...], float], ...] = ()
    replay: tuple[Piece, ...] = ()
    weights: float = 0.0
    lane: Spot | None = None
    fetches: bool = False
    later: bool = False
    full_bytes: float = 0.0
    held_bytes: tuple[float, ...] = ()
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of an item: `unit` is the operator of the top-level graph or the run of blocks that it belongs to, and
    `instance` the number of the block, -1 outside of blocks."""

    item: Item
    unit: str
    instance: int = -1


@dataclass(eq=False)
class Walk:
    """Lists the work of the stages of a plan; the Ops of `program` have the sizes of one microbatch. `splits`: the
    schedule splits backwards (zero bubble)."""

    gm: fx.GraphModule
    program: Program
    plan: Plan
    edges: Edges
    pieces: Pieces
    splits: bool = False
    _bodies: dict[tuple[str, bool, bool, bool], list[Item]] = field(default_factory=dict)
    _again: bool = False  # whether the present blocks are recomputed
    _first: bool = False  # whether the present block is the first of its run
    _apart: bool = False  # whether the backward of the present stage is split

    def stage(self, view: View) -> list[Turn]:
        """All that runs in the forward of `view`, in order."""
        found: list[Turn] = []
        resharded: dict[tuple[Ref, str], None] = {}
        self._apart = self.splits and view.separable
        for node in in_order(self.gm, "", self.program, self.plan):
            if node.op == "call_module" and str(node.target) in view.blocks:
                scope, (start, stop) = str(node.target), view.blocks[str(node.target)]
                again = self.plan.again(self.plan.stages[view.index], scope, stop - start)
                found += self._run(scope, (start, stop), resharded, start + again)
            elif (
                (op := self.program.op_of(node, "")) is not None
                and op.role == "op"
                and view.runs(op.name)
                and not self._given(op, view)
            ):
                found += [Turn(item, op.name) for item in self._operator(op, "", resharded)]
        for _, op in view.results:
            found += [Turn(item, op.name) for item in self._operands(op, "", resharded)]
        return found

    def _given(self, op: Op, view: View) -> bool:
        return bool(view.given) and all((op.name, i) in view.given for i in range(len(op.call.outs)))

    def _run(
        self, scope: str, instances: tuple[int, int], resharded: dict[tuple[Ref, str], None], again: int
    ) -> Iterator[Turn]:
        """The blocks `instances` = [first, stop) of a run, with the reshards of what is fed to them and carried between
        them; blocks before number `again` are recomputed."""
        run, (first, stop), unit = self.program.runs[scope], instances, scope
        for index, (port, ref) in enumerate(zip(run.ports, run.feeds, strict=True)):
            if first == 0 or index >= len(run.carried):
                yield from (
                    Turn(item, unit, first)
                    for item in self._asked(ref, in_pair(self.plan, port, 0), "feed", None, resharded)
                )
        for instance in range(first, stop):
            if instance > 0:
                yield from (Turn(item, unit, instance) for item in self._carried(scope, of_first=instance == 1))
            yield from (
                Turn(item, unit, instance) for item in self._body(scope, again=instance < again, first=instance == 0)
            )

    def _carried(self, scope: str, *, of_first: bool) -> list[Item]:
        """The reshards of carried values between two blocks; `of_first`: the values are those of the first block."""
        run, (before, self._first) = self.program.runs[scope], (self._first, of_first)
        found = [
            item
            for port, ref in zip(run.ports, run.carried, strict=False)
            for item in self._asked(ref, in_pair(self.plan, port, 0), "carry", None, {})
        ]
        self._first = before
        return found

    def _body(self, scope: str, *, again: bool, first: bool) -> list[Item]:
        key = scope, again, first, self._apart
        if key not in self._bodies:
            before, (self._again, self._first) = (self._again, self._first), (again, first)
            self._bodies[key] = list(self._inside(scope))
            self._again, self._first = before
        return self._bodies[key]

    def _inside(self, scope: str) -> Iterator[Item]:
        """The items of one block of a run."""
        gm, resharded = self.gm.get_submodule(scope), dict[tuple[Ref, str], None]()
        assert isinstance(gm, fx.GraphModule)
        for node in in_order(gm, scope, self.program, self.plan):
            if node.op == "call_module":
                inner = self.program.runs[str(node.target)]
                yield from (
                    turn.item
                    for turn in self._run(inner.scope, (0, inner.count), resharded, inner.count if self._again else 0)
                )
            elif (op := self.program.op_of(node, scope)) is not None and op.role == "op":
                yield from self._operator(op, scope, resharded)
        for name in self.program.runs[scope].mutated:
            yield from self._operands(self.program.ops[name], scope, resharded)

    def _operator(self, op: Op, scope: str, resharded: dict[tuple[Ref, str], None]) -> list[Item]:
        """The items of an operator: the reshards that it is the first to need, and itself."""
        node = self.plan.nodes[op.name]
        forward, backward = self.pieces.operator(op, node)
        again = tuple(
            (pieces, self._full_bytes(reshard))
            for reshard in self._gathered_again(op)
            if (pieces := self._way(reshard, "again"))
        )
        reads = (
            tuple(self.program.source(ref) for ref in op.operands if self.program.is_weight(ref))
            if op.name not in self.program.following
            else ()
        )
        replay = forward if self._again and self.edges.runs_again(op) else ()
        mine = Item(op.name, forward, backward, again, replay, op.weights_share, spot_of(node), reads=reads)
        return [*self._operands(op, scope, resharded), mine]

    def _operands(self, op: Op, scope: str, resharded: dict[tuple[Ref, str], None]) -> list[Item]:
        """The reshards that `op` needs and no operator before it has needed."""
        return [
            item
            for index, ref in enumerate(op.operands)
            for item in self._asked(ref, in_pair(self.plan, op.name, index), "edge", scope, resharded)
        ]

    def _asked(
        self, ref: Ref, dst: LayoutPair, role: str, scope: str | None, resharded: dict[tuple[Ref, str], None]
    ) -> list[Item]:
        reshard, key = self._between(ref, dst, role, scope), (ref, f"{role} {dst}")
        if reshard is None or key in resharded:
            return []
        resharded[key] = None
        return [self._reshard(reshard)]

    def _between(self, ref: Ref, dst: LayoutPair, role: str, scope: str | None) -> Reshard | None:
        found = next(
            (r for r in self._of_ref.get(ref, ()) if r.role == role and r.dst == dst and scope in (None, r.scope)), None
        )
        if found is None:
            return None
        found = found.in_first if self._first else found
        return found if self._again or not found.replay else replace(found, replay="")

    @cached_property
    def _of_ref(self) -> Mapping[Ref, list[Reshard]]:
        found: dict[Ref, list[Reshard]] = {}
        for reshard in self.edges.reshards:
            found.setdefault(reshard.ref, []).append(reshard)
        return found

    def _reshard(self, reshard: Reshard) -> Item:
        """The item of a reshard."""
        forward, backward = self._way(reshard, "forward"), self._way(reshard, "backward")
        ref = reshard.ref
        fetches = reshard.fetches(self.plan.mesh) and bool(forward)
        sunk = fetches and not self._apart
        moved = moving(reshard.backward(self.plan.mesh), self.plan.mesh)
        held = tuple(self.pieces.prices.local_bytes(self.gradient_bytes(ref), step.before) for step in moved)
        return Item(
            f"{ref[0]} -> {','.join(reshard.dst.value)}",
            forward,
            backward,
            replay=self._way(reshard, "again") if reshard.replay == "again" else (),
            weights=float(reshard.weight),
            fetches=fetches,
            later=sunk and any(piece.axis >= 0 for piece in backward),
            full_bytes=self._full_bytes(reshard),
            held_bytes=held,
            reads=(self.program.source(ref),) if self.program.is_weight(ref) else (),
        )

    def _full_bytes(self, reshard: Reshard) -> float:
        return self.pieces.prices.local_bytes(self.bytes_of(reshard.ref), reshard.dst.value)

    def _way(self, reshard: Reshard, way: str) -> tuple[Piece, ...]:
        name = f"{reshard.ref[0]}{ {'forward': '', 'backward': ' gradient', 'again': ' again'}[way] }"
        steps = reshard.backward(self.plan.mesh) if way == "backward" else reshard.forward(self.plan.mesh)
        return self.pieces.steps(
            steps, self.gradient_bytes(reshard.ref) if way == "backward" else self.bytes_of(reshard.ref), name
        )

    def bytes_of(self, ref: Ref) -> float:
        """Bytes of a value of one microbatch on one device."""
        return self.program.bytes_of(ref)

    def gradient_bytes(self, ref: Ref) -> float:
        """Bytes of the gradient of a value of one microbatch on one device; a weight's has the dtype that the weight
        rests in."""
        size = self.bytes_of(ref)
        return (
            self.pieces.prices.gradient_bytes(self.program.ops[ref[0]], size) if self.program.is_weight(ref) else size
        )

    def _gathered_again(self, op: Op) -> list[Reshard]:
        """The gathered weights whose last reader is `op`: its backward is the first that needs them, and gathers them
        again."""
        found = []
        for index, ref in enumerate(op.operands):
            reshard = self._between(ref, in_pair(self.plan, op.name, index), "edge", op.scope)
            if (
                reshard is not None
                and reshard.regathers(self.plan.mesh)
                and self._last_saved(reshard) == op.name
                and reshard not in found
            ):
                found.append(reshard)
        return found

    def _last_saved(self, reshard: Reshard) -> str:
        ops = self.program.ops
        saving = [
            name
            for name in reshard.readers
            if any(ref == reshard.ref and ops[name].needs_again(i) for i, ref in enumerate(ops[name].operands))
        ]
        return saving[-1] if saving else ""
