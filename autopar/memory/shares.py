"""Bytes of values, gradients and parameters on one rank, for one microbatch. Used by all of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.codegen.edges import options
from autopar.layout import Layout, is_placed, is_shard, most_elements, placed_on
from autopar.memory.habits import EMITTED, Habits
from autopar.memory.habitual import in_fewer_bits, of_losses
from autopar.plan import Plan
from autopar.problem.graph import Op, Program, Ref
from autopar.problem.pairs import LayoutPair
from autopar.rules.language import Option

WHOLE = (1.0, 1.0)


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
        return self._whole(ref, layout) * self.of_losses.get(ref[0], WHOLE)[0]

    def _whole(self, ref: Ref, layout: Layout) -> float:
        op = self.program.ops[ref[0]]
        return self.elements(op.call.outs[ref[1]].sizes, layout) * op.out_dtypes[ref[1]].itemsize / self.cuts(ref)

    @cached_property
    def outputs_bytes(self) -> float:
        """Bytes of the outputs over the whole batch."""
        outputs = [op for op in self.program.ops.values() if op.role == "output"]
        each = [self.value(op.operands[0], self.asked(op.name, 0).value) for op in outputs]
        return self.plan.microbatches * sum(each)

    def gradient(self, ref: Ref, pair: LayoutPair) -> float:
        """Bytes of the gradient of a value, 0 where it has none."""
        return self._whole(ref, pair.grad) * self.of_losses.get(ref[0], WHOLE)[1] if pair.has_grad else 0.0

    def resting(self, ref: Ref) -> float:
        """The bytes that a weight rests in over those that it is computed with, where habits hold it in fewer bits."""
        op = self.program.ops[ref[0]]
        few = self.habits.frozen_bytes and in_fewer_bits(op)
        return self.habits.frozen_bytes / op.out_dtypes[0].itemsize if few else 1.0

    def read(self, ref: Ref) -> int:
        """Elements of a weight on this rank as its readers have it."""
        sizes = self.program.ops[ref[0]].call.outs[ref[1]].sizes
        return max((self.elements(sizes, pair.value) for pair in self._asked.get(ref, ())), default=0)

    @cached_property
    def _asked(self) -> dict[Ref, list[LayoutPair]]:
        found: dict[Ref, list[LayoutPair]] = {}
        for op in self.program.ops.values():
            for index, ref in enumerate(op.operands if op.role == "op" else ()):
                found.setdefault(ref, []).append(self.asked(op.name, index))
        return found

    @cached_property
    def trained(self) -> frozenset[str]:
        """The runs of blocks that have weights with gradients."""
        ops = self.program.ops.values()
        return frozenset(op.scope for op in ops if op.scope and op.role == "param" and op.call.outs[0].grad)

    @cached_property
    def of_losses(self) -> dict[str, tuple[float, float]]:
        """Values of losses that habits do not hold whole."""
        return of_losses(self.program.ops, self.habits)

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
