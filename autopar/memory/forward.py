"""The walk over the forward of one stage, in the order in which the emitted module runs it: what it allocates, what
autograd keeps for the backward, and until when. Called by memory.stage, before memory.backward.

A forward is a Python function in which each value has a variable of its own, so all values stay alive until it returns;
what autograd keeps lives on. Of a run of blocks the last one is walked; what the others keep is added after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from autopar.codegen.edges import Edges, Reshard
from autopar.layout import moving
from autopar.memory.ahead import Unit, begin_ahead, gather_into
from autopar.memory.at_rest import cast_bytes
from autopar.memory.habitual import in_registers, reads_frozen
from autopar.memory.local import Local
from autopar.memory.moves import done, fresh, halfway, workspace
from autopar.memory.operators import copies, forward_bytes, heads_first
from autopar.memory.shares import Shares, named
from autopar.memory.storages import Book, Storage
from autopar.memory.walked import Blocks, Part, Step, Value
from autopar.pipeline.stage_views import RESULTS
from autopar.problem.graph import CAST, HOLDERS, Op, Program, Ref, Run
from autopar.problem.op_algorithms import keeping, sites
from autopar.problem.pairs import LayoutPair
from autopar.problem.view_ops import makes_view
from autopar.rules.tiles import weight_of
from passes.annotate_memory import joins_heads

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


class Forward:
    """The walk over the forward of one part of a program.

    `extra_bytes` gives bytes that an operator keeps for its backward in addition to tensors of the graph. After `walk`,
    `book` has all storages, `steps` the record for the backward, `values` all values as they are made, `received` and
    `sent` what crosses between stages, `results` what the model gives by role (`loss`, ...).
    """

    def __init__(
        self, shares: Shares, edges: Edges, extra_bytes: Callable[[Op], float], book: Book, part: Part
    ) -> None:
        self.shares, self.book, self.part, self.extra_bytes = shares, book, part, extra_bytes
        self.program: Program = shares.program
        self.habits = shares.habits
        self.sizes = shares.plan.mesh
        self.reshards = {(r.ref, r.role, r.dst, r.scope if r.role == "edge" else ""): r for r in edges.reshards}
        self.edges, self.sync = edges, edges.sync
        self.values: dict[Ref, Value] = {}
        # the run whose walked block is not run again, though others of the run are
        self.plain: dict[str, None] = {}
        # values in other layouts, by value, role of the reshard, layouts and scope of the readers
        self.moved: dict[tuple[Ref, str, LayoutPair, str], Value] = {}
        self.narrowed: dict[Storage, Storage] = {}  # 8-bit copies (`_narrow`)
        self.queries: dict[str, Storage | None] = {}  # by the attention that reads them
        self.steps: list[Step | Blocks] = []
        self.frame: list[Storage | None] = []  # of the variables of the Python function that is walked
        # a list of its own, since a value that is passed on gets the storage of its copy (`_sendable`)
        self.received: list[Storage | None] = []
        self.sent: list[Value] = []
        self.results: dict[str, list[Value]] = {role: [] for role in RESULTS}  # what the model gives
        self.units: list[Unit] = []  # the weights that are gathered where they are used, block by block
        self.block: Unit | None = None  # those of the block that is walked

    def walk(self) -> None:
        """The whole part, to the end of its forward."""
        for ref in self.part.receives:
            op = self.program.ops[ref[0]]
            # a value from another stage of this place is not copied
            nbytes = self.shares.value(ref, self.shares.lies(ref).value) if self.part.brought else 0.0
            self.values[ref] = self._value(ref, self.book.new("pipeline buffers", op.name, op.where, nbytes))
            self.values[ref].view = True
            self.received.append(self.values[ref].storage)
        self.values.update({ref: self._value(ref, None) for ref in self.part.given})
        for op in self.program.ops.values():
            if op.role in HOLDERS:
                self._holder(op)
        done: dict[str, None] = {}
        for op in self.program.ops.values():
            if op.scope:
                if op.scope in self.part.blocks and op.scope not in done:
                    done[op.scope] = None
                    self._run(self.program.runs[op.scope])
            elif op.name in self.part.ops or (op.role in RESULTS and op.name in self.part.results):
                self._op(op, self.steps)
        self.sent = [self._sendable(self.values[ref]) for ref in self.part.sends]
        self._close(self.frame)
        begin_ahead(self.book, self.units)

    def _sendable(self, value: Value) -> Value:
        """The storage that goes to the next stage: a copy of a value that has no gradient or is a view
        (runtime.stepping._sendable)."""
        if value.view or not value.grad_bytes:
            op = self.program.ops[value.ref[0]]
            value.storage = self.book.new(
                "activations", op.name, op.where, self.shares.value(value.ref, value.pair.value)
            )
        return value

    def _value(self, ref: Ref, storage: Storage | None, pair: LayoutPair | None = None) -> Value:
        pair = pair or self.shares.lies(ref)
        graded = self.program.ops[ref[0]].call.outs[ref[1]].grad and pair.has_grad
        return Value(ref, pair, storage, self.shares.gradient(ref, pair) if graded else 0.0)

    def _holder(self, op: Op) -> None:
        """Make the value of a parameter, buffer, constant or input."""
        value = self._value((op.name, 0), self._cast_input(op) if op.role == "input" else None)
        if op.role == "param" and value.pair.has_grad:
            value.leaf = op
            value.pair = value.pair.partial((*self.sync.get(value.ref, ()), *value.pair.gathered))
            value.grad_bytes = self.shares.gradient(value.ref, value.pair) if value.grad_bytes else 0.0
        self.values[op.name, 0] = value

    def _cast_input(self, op: Op) -> Storage | None:
        """The copy of an input in another dtype, which stays until the forward returns. In a pipeline it is of the
        whole batch, and stays for the whole step (memory/at_rest.py)."""
        if self.shares.plan.pipelined or not (nbytes := cast_bytes(self.shares, op)):
            return None
        self.frame.append(self.book.new("activations", op.name, op.where, nbytes))
        return self.frame[-1]

    def _close(self, frame: Sequence[Storage | None]) -> None:
        """A function returns: its values were alive until now."""
        for storage in frame if self.habits.frames else ():
            self.book.use(storage)

    def arrive(
        self, ref: Ref, dst: LayoutPair, role: str, scope: str, steps: list[Step] | list[Step | Blocks]
    ) -> Value:
        """A value in the layouts `dst` that a reader in `scope` asks for. A change of layout is made once per scope,
        and recorded in `steps`."""
        source = self.values[ref]
        reshard = self.reshards.get((ref, role, dst, scope if role == "edge" else ""))
        if reshard is None:
            return source
        key = (ref, role, dst, scope)
        if key not in self.moved:
            self.moved[key] = self._moved(source, reshard, dst, steps)
        return self.moved[key]

    def _moved(
        self, source: Value, reshard: Reshard, dst: LayoutPair, steps: list[Step] | list[Step | Blocks]
    ) -> Value:
        ref, forward = source.ref, done(reshard.forward(self.sizes), self.sizes)
        self.book.step(f"reshard of {named(self.program.ops[ref[0]])}")
        self.book.use(source.storage)
        storage = source.storage
        if fresh(forward):
            kind = "gathered weights" if reshard.weight else "reshards"
            op = self.program.ops[ref[0]]
            nbytes = self.shares.value(ref, dst.value) * self.shares.resting(ref)
            storage = self.book.new(kind, named(op), op.where, nbytes)
            storage.regathered = (
                reshard.gathers(self.sizes) if reshard.scope in self.plain else reshard.regathers(self.sizes)
            )
            if (
                self.habits.regathers
                and not reshard.weight
                and source.storage is not None
                and any(step.kind == "all_gather" for step in forward)
            ):
                storage.regathered, storage.sources = True, (source.storage,)
            left = forward
            if reshard.fetches(self.sizes):
                storage.takes, left = (
                    (self._cast_bytes(ref), *halfway(moving(forward, self.sizes), partial(self.shares.value, ref))),
                    forward[-1:],
                )
                gather_into(self.units, self.block, storage)
            self.book.new(
                "temporaries",
                ref[0],
                op.where,
                workspace(left, partial(self.shares.value, ref), staged=self.shares.on_cpu),
            )
        value = self._value(ref, storage, dst)
        self.frame.append(storage)
        steps.append(Step((source,), (value,), reshard=reshard))
        return value

    def _cast_bytes(self, ref: Ref) -> float:
        """Bytes of the cast that a rank makes of a parameter's shard before it gathers it; 0 without a cast."""
        turned = self.program.turn(ref)
        return self.shares.value(ref, self.shares.lies(ref).value) if any(op.target is CAST for op in turned) else 0.0

    def _op(self, op: Op, steps: list[Step] | list[Step | Blocks]) -> None:
        ins = tuple(
            self.arrive(ref, self.shares.asked(op.name, i), "edge", op.scope, steps)
            for i, ref in enumerate(op.operands)
        )
        if op.role in RESULTS:
            self.results[op.role] += ins
            return
        self.book.step(op.name)
        for value in ins:
            self.book.use(value.storage)
        if op.target is ATTENTION:
            self.queries[op.name] = ins[0].storage
        local = self._local(op, ins)
        outs, view = [], makes_view(op) and not (joins_heads(op.node) and self._heads_in_order(op, ins[0]))
        for index, nbytes in enumerate(local.outs):
            storage = ins[0].storage if view else self._made(op, ins, nbytes)
            outs.append(self._value((op.name, index), storage))
            outs[-1].view = view
            self.values[op.name, index] = outs[-1]
            self.frame.append(storage)
        runs = self.shares.plan.nodes[op.name].runs
        self.book.new("temporaries", op.name, op.where, forward_bytes(local, runs, self.habits))
        self.passing(op, backward=False)
        steps.append(Step(ins, tuple(outs), op, local, kept=self._kept(op, ins, outs, local, runs)))

    def _heads_in_order(self, op: Op, heads: Value) -> bool:
        """Whether the reshape `op`, which joins the heads of attention's result, must copy them because they lie in
        memory in the order of their dims (head before position).

        Attention's result has the strides of its query. Both are views of [position, head] memory as the model makes
        them. A tensor that a collective has made is contiguous, so that it has heads first if its dims are in that
        order.
        """
        attention = self.program.ops[self.program.ops[op.operands[0][0]].operands[0][0]]
        moved = [each for each in (heads.storage, self.queries.get(attention.name)) if each is not None]
        first = heads_first(self.program.ops, attention)
        return any(each.kind == "reshards" and each.node in first for each in moved)

    def passing(self, op: Op, *, backward: bool) -> None:
        """Record what a runtime algorithm of `op` holds only while it runs: parts of weights and of their whole
        gradients, and buffers of its own."""
        for algorithm, site in sites(op, self.shares.options(op), self.sizes, self.shares.plan.precision):
            if algorithm.takes:
                nbytes = algorithm.takes[backward](site) * self.shares.scale(op)
                self.book.new("temporaries", op.name, op.where, nbytes)
            if algorithm.gathers:
                weight = self.program.ops[op.operands[weight_of(site)][0]]
                for kind, nbytes in zip(
                    ("gathered weights", "whole gradients"), algorithm.gathers[backward](site), strict=True
                ):
                    self.book.new(kind, named(weight), weight.where, nbytes)

    def _made(self, op: Op, ins: Sequence[Value], nbytes: float) -> Storage:
        """A storage for the result of an operator. Where habits fuse the operator into the kernel of its reader it has
        no bytes, and to keep it means to keep its operands."""
        read = dict.fromkeys(real for value in ins if value.storage is not None for real in value.storage.real)
        inside = in_registers(op, list(read), nbytes, self.habits, of_loss=op.name in self.shares.of_losses)
        made = self.book.new("activations", op.name, op.where, 0.0 if inside else nbytes)
        made.sources = tuple(read) if inside else ()
        return made

    def _local(self, op: Op, ins: Sequence[Value]) -> Local:
        """The call of `op` on this rank, for formulas of temporary memory."""
        outs = [self.shares.value((op.name, i), self.shares.lies((op.name, i)).value) for i in range(len(op.call.outs))]
        instead = keeping(op, self.shares.options(op), self.sizes)
        return Local(
            op,
            [self.shares.value(v.ref, v.pair.value) for v in ins],
            outs,
            self.extra_bytes(op) if instead is None else instead.own_bytes * self.shares.scale(op),
            self.program.device == "cpu",
        )

    def _kept(
        self, op: Op, ins: Sequence[Value], outs: Sequence[Value], local: Local, runs: Sequence[str]
    ) -> list[Storage]:
        """The storages that autograd keeps for the backward of `op`, each once, without what rests anyway
        (parameters, buffers, inputs)."""
        kept: dict[Storage, None] = {}
        instead = keeping(op, self.shares.options(op), self.sizes)
        saved = op.saves if instead is None else instead.given
        for index in (0, *saved) if self.habits.keeps_rows and reads_frozen(op) else saved:
            value = ins[index] if index < len(ins) else outs[index - len(ins)]
            if copies(op, index, runs, self.habits):
                chunks = 1 if self.habits.chunked_logits else self.habits.loss_chunks
                kept[self.book.new("activations", op.name, op.where, local.ins[0] * chunks)] = None
            elif index == 0 and self.habits.kept_bytes and op.scope and op.flops > 0 and op.weight[1:2] == (True,):
                kept.update(
                    dict.fromkeys(self._narrow(op, real) for real in (value.storage.real if value.storage else ()))
                )
            # of an image with borders the copy is kept
            elif value.storage is not None and not (index == 0 and "halo" in runs):
                kept.update(
                    dict.fromkeys((*value.storage.real, *([value.storage] if value.storage.regathered else ())))
                )
        for index in () if instead is None else instead.copied:
            kept[self.book.new("activations", op.name, op.where, local.ins[index])] = None
        if local.extra:
            kept[self.book.new("activations", op.name, op.where, local.extra)] = None
        return list(kept)

    def _narrow(self, op: Op, rows: Storage) -> Storage:
        """The 8-bit copy of a matmul's rows that habits keep for the backward, one for all matmuls that read these."""
        if rows not in self.narrowed:
            self.narrowed[rows] = self.book.new(
                "activations", rows.node, op.where, rows.nbytes * self.habits.kept_bytes / op.out_dtypes[0].itemsize
            )
        return self.narrowed[rows]

    def _run(self, run: Run) -> None:
        """A run of blocks: the last one is walked, and what the others keep is added."""
        first, stop = self.part.blocks[run.scope]
        count = stop - first
        feeds = [
            self.values[run.carried[i]]
            if first > 0 and i < len(run.carried)
            else self.arrive(ref, self.shares.asked(port, 0), "feed", "", self.steps)
            for i, (port, ref) in enumerate(zip(run.ports, run.feeds, strict=True))
        ]
        began, ports = self.book.now, []
        for i, (port, feed) in enumerate(zip(run.ports, feeds, strict=True)):
            storage = feed.storage
            if i < len(run.carried) and count > 1:
                made = self.program.ops[run.carried[i][0]]
                storage = self.book.new(
                    "activations", port, made.where, self.shares.value((port, 0), self.shares.lies((port, 0)).value)
                )
            ports.append(self._value((port, 0), storage))
            self.values[port, 0] = ports[-1]
        again = self.part.again.get(run.scope, count) if run.scope in self.edges.reruns else 0
        self.plain = {run.scope: None} if again < count else {}
        steps: list[Step] = []
        outer, self.frame = self.frame, [v.storage for v in ports]
        self.block, before = Unit(), len(self.units)
        for op in self.program.ops.values():
            if op.scope == run.scope and op.role == "op":
                self._op(op, steps)
        self._close(self.frame)
        if self.block.storages:
            self.units[before:before] = [self.block.alike] * (count - 1)
        self.frame, self.block = outer, None
        carried_out = [self.values[ref] for ref in run.carried]
        self.frame += [v.storage for v in carried_out]
        blocks = Blocks(run, count, steps, feeds, ports, carried_out, {}, [])
        if again:
            blocks.again = True, again == count
            blocks.stored, blocks.made = self._stored(blocks)
        self._other_blocks(blocks, began, again)
        self.steps.append(blocks)

    def _other_blocks(self, blocks: Blocks, began: int, again: int) -> None:
        """Storages for what all blocks but the walked one keep; the first `again` blocks of the run are run again. A
        carried value is one tensor for two blocks: the block that makes it keeps it, and it is not counted again for
        the block that receives it."""
        if blocks.count < 2:
            return
        kept = (
            blocks.stored
            if again == blocks.count
            else {s: None for step in blocks.steps for s in step.kept if not s.regathered}
        )
        makers = {
            port.storage: (feed.storage, out.storage)
            for port, feed, out in zip(blocks.ports, blocks.feeds, blocks.carried, strict=False)
        }
        own = [storage for storage in kept if storage in makers or storage.born > began]  # others: one for all blocks
        if 0 < again < blocks.count:
            self._first_again(blocks, began, again, kept)
            between = blocks.count - 1 - again
        else:
            for storage in own:
                blocks.twins[storage] = makers[storage][0] if storage in makers else self.book.like(storage, began)
            between = blocks.count - 2
        for storage in own:
            if storage in makers and makers[storage][1] in kept:
                storage.nbytes = 0.0
            elif between > 0 and not self.habits.hosts_blocks:
                blocks.others.append(self.book.like(storage, began, between))

    def _first_again(self, blocks: Blocks, began: int, again: int, kept: Collection[Storage]) -> None:
        """What the first `again` blocks keep, where the walked one is not run again and keeps `kept`."""
        feeds = {port.storage: feed.storage for port, feed in zip(blocks.ports, blocks.feeds, strict=True)}
        blocks.twins.update({storage: None for storage in kept if storage.born > began})
        for storage in blocks.stored:
            if again > 1 and (storage in feeds or storage.born > began):
                blocks.others.append(self.book.like(storage, began, again - 1))
            if storage in feeds:
                blocks.twins[storage] = feeds[storage]
            elif storage.born > began:
                blocks.twins[storage] = self.book.like(storage, began)

    def _stored(self, blocks: Blocks) -> tuple[dict[Storage, None], list[Storage]]:
        """For a block that is run again: what it keeps (its inputs, and the results that the plan keeps), and what it
        makes again."""
        about = self.edges.reruns[blocks.run.scope]
        stored = {port.storage: None for port in blocks.ports if port.storage is not None}
        made: list[Storage] = []
        for step in blocks.steps:
            replay = step.reshard.replay if step.reshard is not None else ""
            kept = replay == "kept" or (step.op is not None and self.edges.mark(step.op) == "keep")
            reached = replay in ("again", "skipped") or (step.op is not None and about.reached(step.op.name))
            given = [value.storage for value in step.ins]
            for storage in dict.fromkeys((*(value.storage for value in step.outs), *step.kept)):
                if storage is None or storage in stored or storage in given:
                    continue
                if kept:
                    stored[storage] = None
                elif reached and storage not in made:
                    made.append(storage)
        return stored, made
