"""Bytes of values, gradients and parameters on one rank, for one microbatch. Used by all of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.codegen.edges import options
from autopar.layout import Layout, is_placed, is_shard, most_elements, placed_on
from autopar.memory.habits import EMITTED, Habits
from autopar.plan import Plan
from autopar.problem.graph import Op, Program, Ref
from autopar.problem.pairs import LayoutPair
from autopar.rules.language import Option


@dataclass(eq=False)
class Shares:
    """The bytes of one rank of a place: the one that holds the first shard of everything that is split, which is the
    largest of uneven shards. `coord` is its coordinate on the axes on which values are placed; values placed elsewhere
    take none of its memory. `habits` say how the software holds memory."""

    program: Program
    plan: Plan
    coord: Mapping[int, int] = field(default_factory=dict)
    habits: Habits = EMITTED
    _pairs: dict[str, LayoutPair] = field(default_factory=dict)

    def pair(self, text: str) -> LayoutPair:
        """Layouts of a value and of its gradient, from their text in a plan."""
        if text not in self._pairs:
            self._pairs[text] = LayoutPair.of(text)
        return self._pairs[text]

    def asked(self, name: str, operand: int) -> LayoutPair:
        """The layouts in which node `name` asks for an operand."""
        return self.pair(self.plan.nodes[name].ins[operand])

    def lies(self, ref: Ref) -> LayoutPair:
        """The layouts in which a value is made."""
        return self.pair(self.plan.nodes[ref[0]].outs[ref[1]])

    def elements(self, sizes: tuple[int, ...], layout: Layout) -> int:
        """Elements of a tensor of `sizes` on this rank."""
        if any(is_placed(e) and placed_on(e) != self.coord.get(axis, 0) for axis, e in enumerate(layout)):
            return 0
        return most_elements(sizes, layout, self.plan.mesh)

    def value(self, ref: Ref, layout: Layout) -> float:
        """Bytes of a value in a layout, for one microbatch."""
        op = self.program.ops[ref[0]]
        return self.elements(op.call.outs[ref[1]].sizes, layout) * op.out_dtypes[ref[1]].itemsize / self.cuts(ref)

    def gradient(self, ref: Ref, pair: LayoutPair) -> float:
        """Bytes of the gradient of a value, 0 where it has none."""
        return self.value(ref, pair.grad) if pair.has_grad else 0.0

    def cuts(self, ref: Ref) -> int:
        """Into how many parts microbatches cut a value."""
        micro = self.plan.nodes[ref[0]].micro
        return self.plan.microbatches if micro and is_shard(micro[ref[1]]) else 1

    def scale(self, op: Op) -> float:
        """The share of an operator's work that one microbatch has."""
        return 1.0 / max((self.cuts((op.name, i)) for i in range(len(op.call.outs))), default=1)

    def options(self, op: Op) -> tuple[Option, ...]:
        """The options of `op` in the plan, one per mesh axis, as rules and prices have them."""
        return options(self.plan.nodes[op.name])

    @property
    def on_cpu(self) -> bool:
        """Whether the plan's devices are CPUs: gloo's reduce-scatter sums in a copy."""
        return self.plan.device_kind == "cpu"

    @property
    def placed_axes(self) -> tuple[int, ...]:
        """The axes on which values are placed."""
        uses = [
            pair.partition("|")[0].split(",") for node in self.plan.nodes.values() for pair in (*node.ins, *node.outs)
        ]
        return tuple(
            axis
            for axis in range(len(self.plan.mesh))
            if any(entries[axis][:1] == "O" for entries in uses if axis < len(entries))
        )


def named(op: Op) -> str:
    """The name of an operator for users: of a parameter or buffer its name in the model, of others that of the node."""
    if not op.fqn or op.role not in ("param", "buffer", "constant"):
        return op.name
    return f"{op.scope}: {op.fqn}" if op.scope else op.fqn
