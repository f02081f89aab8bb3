"""The walk over the backward of one stage: gradients, whole gradients of gathered weights until they are scattered,
and weights that are gathered again. Called by memory.stage, after memory.forward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.buckets import BUCKET_BYTES
from autopar.cost.memory import itemsize, rests_in
from autopar.deferred_waits import BUCKETS, Queue
from autopar.layout import Layout, moving
from autopar.memory.ahead import Unit, begin_ahead, gather_into
from autopar.memory.buckets import Buckets, Whole
from autopar.memory.forward import Forward
from autopar.memory.moves import done, fresh, halfway, workspace
from autopar.memory.operators import backward_bytes, hands_on, in_place
from autopar.memory.shares import named
from autopar.memory.storages import Storage
from autopar.memory.summed_gradients import made_whole
from autopar.memory.walked import Blocks, Split, Step, Value
from autopar.memory.weights_part import WeightsPart
from autopar.problem.at_rest import EACH
from autopar.problem.graph import Op

SETTLED_BYTES = 4 * BUCKET_BYTES
"""Bytes of gradients after which the bytes that are being scattered no longer grow."""


class Backward:
    """The backward of one recorded forward.

    `stay`: this backward allocates the gradients of parameters, which stay to the end of the step; otherwise it adds to
    those of the microbatches before. `split`: how the backward is divided (memory.walked.Split). After `walk`, `final`
    are the gradients of parameters that stay, `waiting_bytes` the gradients of activations that the part for weights
    needs, `weights` what that part takes.
    """

    def __init__(self, forward: Forward, *, stay: bool, split: Split) -> None:
        self.forward, self.book, self.shares = forward, forward.book, forward.shares
        self.stay, self.habits = stay, self.shares.habits
        self.scattering = split != "apart"  # whole gradients are scattered as they are made
        self.weights = WeightsPart({scope: stop - first for scope, (first, stop) in forward.part.blocks.items()})
        # gradients of parameters, or what scatters bring that is added to those of the microbatches before in the end
        self.final: list[Storage] = []
        self.late: Queue[Whole] = Queue(BUCKETS * BUCKET_BYTES)
        self.grown = 0.0  # bytes by which `late` is larger after a block than after the one before
        # of the walked block: whole gradients that were put into `late`, with the bytes of results on the way
        self.sending: list[tuple[Storage, Sequence[float]]] = []
        self.buckets = Buckets(self.book, self.shares.on_cpu)
        self.again: dict[Storage, Storage] = {}  # gathered weight of the forward -> the same, gathered again
        self.units: list[Unit] = []  # the weights that are gathered again, block by block
        self.block: Unit | None = None  # those of the block that is walked
        # gradients that wait for the weights' part of a backward that is taken apart
        self.waiting: dict[Storage, None] = {}
        self.waiting_bytes = 0.0

    def walk(self) -> None:
        """From the end of the forward to its start."""
        self.book.step("the backward begins")
        start = self.book.now
        for value in self.forward.results["loss"]:
            value.slot = self.book.new("gradients of activations", value.ref[0], "", 0.0) if value.grad_bytes else None
        came = {
            value: self._gradient_storage("pipeline buffers", value) for value in self.forward.sent if value.grad_bytes
        }
        for value, slot in came.items():
            value.slot = slot
        for step in reversed(self.forward.steps):
            if isinstance(step, Blocks):
                self._blocks(step)
            else:
                self._step(step, {})
        begin_ahead(self.book, self.units, None if self.shares.plan.pipelined else start)
        for value in self.forward.sent if self.habits.keeps_sent else ():
            # torch's stages keep what they made, and what came back for it, until the backward is done
            if not self.forward.part.leaves:
                self.book.use(value.storage)
            self.book.use(came.get(value))
        self.buckets.drain()
        self._extend_to_end_of_inputs_part(start - 1)
        for storage in (
            *(() if self.habits.spends else self.final),
            *(storage for late, _ in self.late.waiting for storage in (late.held, late.coming) if storage is not None),
        ):
            self.book.use(storage)
        for ref in self.forward.part.receives:
            self.book.use(self.forward.values[ref].slot)
        for arrived in self.forward.received:
            self.book.use(arrived)

    def _extend_to_end_of_inputs_part(self, turn: int) -> None:
        """In a backward in two parts, extend the life of all that is kept since time `turn`, the end of the forward,
        and of the gradients that the part for weights needs, to the end of the part for inputs: torch's stages retain
        the graph until then (stage_backward_input). A stage that receives no value with a gradient has no part for
        inputs, and is not divided."""
        if (
            self.scattering
            or not self.habits.keeps_sent
            or not any(self.forward.values[ref].grad_bytes for ref in self.forward.part.receives)
        ):
            return
        for storage in (
            *self.waiting,
            *(storage for storage in self.book.storages if storage.born <= turn < storage.last),
        ):
            self.book.use(storage)

    def early(self) -> list[Storage]:
        """What operators after the last one with a weight keep (those of the loss). In a backward in two parts the part
        for inputs frees it, since the part for weights does not read it."""
        steps = self.forward.steps if self.forward.results["loss"] else []
        last = max(
            (
                i
                for i, step in enumerate(steps)
                if isinstance(step, Blocks) or (step.op is not None and any(step.op.weight))
            ),
            default=len(steps),
        )
        before = {storage for step in steps[: last + 1] if isinstance(step, Step) for storage in step.kept}
        behind = dict.fromkeys(storage for step in steps[last + 1 :] if isinstance(step, Step) for storage in step.kept)
        return [storage for storage in behind if storage not in before and storage.nbytes and not storage.regathered]

    def _blocks(self, blocks: Blocks) -> None:
        """A run of blocks: the backward of the last one is walked, then those between are counted (`_between`), then
        that of the first one is walked, at which the gradients of all parameters of the run exist."""
        before, (first, last) = self.waiting_bytes, blocks.again
        gathered = self._pass(blocks, {}, again=last)
        self.waiting_bytes += max(0, blocks.count - 2) * (self.waiting_bytes - before)
        for storage in blocks.others:
            self.book.use(storage)
        if blocks.count > 1:
            self.units += [self.units[-1].alike] * (blocks.count - 2) if gathered else []
            self._between(blocks)
            self._pass(blocks, blocks.twins, again=first)
        for port, feed in zip(blocks.ports, blocks.feeds, strict=True):
            if port.slot is not None and feed.grad_bytes:
                self._add_gradient(feed, port.slot)
            port.slot = None

    def _pass(self, blocks: Blocks, twins: Mapping[Storage, Storage | None], *, again: bool) -> bool:
        """The backward of one block; with `again` its forward is run before. `twins` are the storages of this block in
        place of those that were walked. Returns whether the block gathers weights."""
        self.again.clear()
        self.sending.clear()
        self.block, self.grown = Unit(more=self.grown), 0.0
        stored = [twins.get(storage, storage) for storage in blocks.stored] if again else []
        if again:
            twins = {**twins, **self._run_again(blocks)}
        for step in reversed(blocks.steps):
            self._step(step, twins)
        for storage in stored:
            self.book.use(storage)
        self.block.end = self.book.now
        gathered, self.block = bool(self.block.storages), None
        return gathered

    def _run_again(self, blocks: Blocks) -> dict[Storage, Storage]:
        """Run the forward of a block again: its values that were not kept are all there until the last one that the
        backward needs is made. Returns the new storages by the old."""
        self.book.step(f"{blocks.run.scope} run again")
        needed = blocks.made if self.habits.frames else _kept_of(blocks)
        made = {storage: self.book.like(storage, self.book.now) for storage in needed}
        for storage in made.values():
            if storage.takes:
                gather_into(self.units, self.block, storage)
        return made

    def _between(self, blocks: Blocks) -> None:
        """The blocks between the last and the first: gradients of carried values go on, and those of parameters of all
        of them are there. What these blocks kept is freed as gradients are made, so the most of both is at one of the
        ends."""
        if blocks.count > 2:
            self.book.step(f"backward of {blocks.run.scope}")
            for port in blocks.ports:
                self.book.use(port.slot)
            self._gradients_between(blocks, blocks.count - 2)
        ports = dict.fromkeys(port.ref for port in blocks.ports)
        for step in blocks.steps:
            for value in (*step.outs, *step.ins):
                value.slot = value.slot if value.ref in ports else None
        for port, out in zip(blocks.ports, blocks.carried, strict=False):
            if port.slot is not None and out.grad_bytes:
                out.slot = (
                    self._gradient_storage("gradients of activations", out)
                    if port.grad_bytes != out.grad_bytes
                    else port.slot
                )
            port.slot = None

    def _gradients_between(self, blocks: Blocks, count: int) -> None:
        """Gradients of parameters of `count` blocks between. Of those that are scattered the whole ones are freed as
        the next ones begin."""
        leaves = {
            value.leaf.name: (value, value.leaf, value.slot)
            for step in reversed(blocks.steps)
            for value in step.ins
            if value.leaf is not None and value.leaf.scope and value.slot is not None
        }
        whole = [(value, slot) for value, _, slot in leaves.values() if self._scattered(value) and slot.nbytes]
        for unit in _units(count, [slot for _, slot in whole]):
            for value, slot in whole:
                self.book.step(f"backward of {blocks.run.scope}")
                self.buckets.add(self.shares.lies(value.ref), self.book.like(slot, self.book.now), unit)
        for unit in _units(count, [slot for slot, _ in self.sending]):
            before = self._late_bytes()
            for slot, ways in self.sending:
                self.book.step(f"backward of {blocks.run.scope}")
                self.late.add(Whole(self.book, self.book.like(slot, self.book.now), ways), unit)
            self.grown = self._late_bytes() - before
        for value, op, slot in leaves.values() if not self.habits.spends else ():
            if self._scattered(value) and not self.habits.standing:
                self.final.append(self._gradient_at_rest(value, op, count))
            elif self.stay:
                self.final.append(self.book.like(slot, self.book.now, count))

    def _late_bytes(self) -> float:
        """Bytes of whole gradients of gathered weights whose scatter is not done."""
        return sum(late.nbytes for late, _ in self.late.waiting)

    def _step(self, step: Step, twins: Mapping[Storage, Storage | None]) -> None:
        """The backward of one step, if any of its results has a gradient."""
        if all(value.slot is None for value in step.outs):
            return
        if step.op is None:
            self._move_back(step)
        else:
            self._operator(step, step.op, twins)
        for value in step.outs:
            value.slot = None

    def _keep_for_weights_part(self, slots: Sequence[Storage]) -> None:
        """Note `slots`, the gradients of the results of an operator with a weight, which the part for weights needs.
        Operators may share one, which is counted once."""
        new = dict.fromkeys(slot for slot in slots if slot not in self.waiting)
        self.waiting.update(new)
        self.waiting_bytes += sum(slot.nbytes for slot in new)

    def _operator(self, step: Step, op: Op, twins: Mapping[Storage, Storage | None]) -> None:
        """The backward of an operator: what it keeps is read, and gradients of its operands are made."""
        assert step.local is not None, "operators have their bytes with them"
        self.book.step(f"backward of {op.name}")
        for storage in step.kept:
            self.book.use(
                self._gathered_again(storage)
                if storage.regathered and storage not in twins
                else twins.get(storage, storage)
            )
        slots = [value.slot for value in step.outs if value.slot is not None]
        for slot in slots:
            self.book.use(slot)
        if op.weighs:
            self._keep_for_weights_part(slots)
        self.book.new(
            "temporaries",
            op.name,
            op.where,
            backward_bytes(step.local, self.shares.plan.nodes[op.name].runs, self.habits),
        )
        least = min((slot.nbytes for slot in slots if op.name not in self.shares.of_losses), default=math.inf)
        self.book.new("temporaries", op.name, op.where, made_whole(step.local, least))
        self.forward.passing(op, backward=True)
        for index, value in enumerate(step.ins):
            if value.grad_bytes:
                if value.leaf is not None:
                    self.weights.add((op.name, op.scope), value.leaf.name, value.grad_bytes, self._wider(value.leaf))
                handed = hands_on(op, index, step.local) and value.leaf is None
                inside = step.kept[0] if index == 0 and in_place(op, self.habits) else None
                self._add_gradient(value, slots[0] if handed else inside or self._gradient(op, value))

    def _move_back(self, step: Step) -> None:
        """The backward of a change of layout: the gradient is brought to the layout of the source's gradient."""
        (source,), (moved,), reshard = step.ins, step.outs, step.reshard
        assert reshard is not None and moved.slot is not None, "steps without an operator are changes of layout"
        if not source.grad_bytes:
            return
        sizes = self.shares.plan.mesh
        back = done(reshard.backward(sizes), sizes)
        self.book.step(f"gradient of {named(self.forward.program.ops[source.ref[0]])} resharded")
        self.book.use(moved.slot)
        if reshard.weight:
            moved.slot.kind = "whole gradients"
        node = self.forward.program.ops[source.ref[0]]
        wider, whole = self._wider(node), self._widened(node, moved.slot)
        if not fresh(back):
            self._add_gradient(source, whole)
            return
        grad = self._gradient_storage("reshards", source)
        grad.nbytes *= wider

        def value(layout: Layout) -> float:
            return wider * self.shares.value(source.ref, layout)

        moved_by = moving(back, sizes)
        if reshard.weight and reshard.fetches(sizes) and moved_by and self.scattering:
            self.book.new(
                "temporaries", node.name, node.where, workspace(moved_by[:1], value, staged=self.shares.on_cpu)
            )
            ways = halfway(moved_by, value)
            self.sending.append((whole, ways))
            self.late.add(Whole(self.book, whole, ways), self.block or object())
        else:
            self.book.new("temporaries", node.name, node.where, workspace(back, value, staged=self.shares.on_cpu))
        self._add_gradient(source, grad)

    def _gathered_again(self, storage: Storage) -> Storage:
        """A weight that the backward gathers again, once for all its readers in a block."""
        if storage not in self.again:
            self.again[storage] = self.book.like(storage, self.book.now)
            if storage.takes:
                gather_into(self.units, self.block, self.again[storage])
        return self.again[storage]

    def _gradient(self, op: Op, value: Value) -> Storage:
        """The gradient of an operand. That of a leaf is added to an existing buffer by the kernel that makes it, or
        cast to the dtype of the parameter at rest, as habits say."""
        made = self._gradient_storage("gradients of activations", value)
        if value.leaf is not None:
            made = self._widened(value.leaf, made)
            if self.habits.standing and op.flops > 0:
                made.nbytes = 0.0
        return made

    def _widened(self, op: Op, grad: Storage) -> Storage:
        """The gradient of the parameter `op` in the dtype in which it is summed: a cast of `grad`, which is there
        beside it, or `grad` itself."""
        if (wider := self._wider(op)) == 1:
            return grad
        return self.book.new(grad.kind, grad.node, grad.where, grad.nbytes * wider)

    def _wider(self, op: Op) -> float:
        """The bytes of an element of a parameter's summed gradient over those of one in the computation; 1 for other
        values."""
        if op.role != "param" or not self.habits.casts_gradients:
            return 1.0
        computed = str(op.out_dtypes[0])
        return itemsize(rests_in(computed, self.shares.plan.precision)) / itemsize(computed)

    def _gradient_storage(self, kind: str, value: Value) -> Storage:
        """A new storage for a gradient of `value`."""
        op = self.forward.program.ops[value.ref[0]]
        return self.book.new(kind, named(op), op.where, value.grad_bytes)

    def _add_gradient(self, value: Value, grad: Storage) -> None:
        """One more gradient of a value: added in place to one that is there already."""
        self.book.use(grad)
        if value.slot is not None:
            self.book.use(value.slot)
            return
        value.slot = grad
        if value.leaf is not None:
            self._parameter_gradient(value, value.leaf, grad)

    def _parameter_gradient(self, value: Value, op: Op, grad: Storage) -> None:
        """The gradient of a parameter's leaf: it stays, or it is scattered, and the shard stays."""
        scattered = self._scattered(value)
        grad.kind = "whole gradients" if scattered else "gradients"
        brings = scattered and not self.habits.standing
        if self.stay or brings:
            self.final.append(self._gradient_at_rest(value, op) if scattered else grad)
        if scattered:
            self.buckets.add(
                self.shares.lies(value.ref), grad, self.block or object(), self.final[-1] if brings else None
            )

    def _scattered(self, value: Value) -> bool:
        """Whether the gradient of a parameter is scattered as soon as it is made."""
        return bool(self.shares.lies(value.ref).gathered) and (
            self.stay or EACH in self.shares.plan.nodes[value.ref[0]].runs
        )

    def _gradient_at_rest(self, value: Value, op: Op, count: int = 1) -> Storage:
        """The gradient of a parameter of `count` blocks in the layout of the parameter at rest."""
        rest = self.shares.value(value.ref, self.shares.lies(value.ref).rest)
        return self.book.new(
            "gradients",
            named(op),
            op.where,
            rest * itemsize(rests_in(str(op.out_dtypes[0]), self.shares.plan.precision)) / op.out_dtypes[0].itemsize,
            count,
        )


def _units(count: int, whole: Sequence[Storage]) -> list[object]:
    """One object for each of the `count` blocks whose scatters must be walked: no more than it takes until the bytes
    that are being scattered no longer grow (SETTLED_BYTES). `whole` are the whole gradients of each block."""
    nbytes = sum(slot.nbytes for slot in whole)
    return [object() for _ in range(min(count, math.ceil(SETTLED_BYTES / nbytes)))] if nbytes else []


def _kept_of(blocks: Blocks) -> list[Storage]:
    """The values that operators of a block that is run again keep for the backward; all others are freed after their
    last reader."""
    kept = {storage: None for step in blocks.steps for storage in step.kept if not storage.regathered}
    return [storage for storage in blocks.made if storage in kept]
