"""Writes the forward of one scope: the top-level graph, or the body of a run of blocks.

Each line is one operator on local shards with the local sizes and layout of its result as a comment; in front of it
stand the reshards that it needs, each with its collectives, bytes and price. A reshard that several readers share is
written once.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from autopar.codegen import probes
from autopar.codegen import sizes as size_text
from autopar.codegen.algorithms import (
    PlannedCall,
    algorithm_text,
    operands_chosen,
    seeded_text,
    switched,
    with_local_groups,
)
from autopar.codegen.context import Context
from autopar.codegen.edges import Reshard, Spot, given, in_pair, needed, options, out_pair, spot_of
from autopar.codegen.expressions import Written, literal, write
from autopar.codegen.placements import in_order, write_placed
from autopar.codegen.reserved import COMMENT_COLUMN, REPLAYED, USED_IN_SCOPES, atom
from autopar.codegen.turns import turn_text
from autopar.errors import PlanError
from autopar.layout import NO_GRAD, show
from autopar.problem.graph import Op, Ref, Run, op_name
from autopar.problem.pairs import LayoutPair
from autopar.rules.tiles import tiled
from autopar.text import quoted
from passes import facts


class ScopeWriter:
    """Writes one scope; `lines` collects the statements of its forward."""

    def __init__(self, context: Context, gm: fx.GraphModule, scope: str) -> None:
        self.context, self.gm, self.scope = context, gm, scope
        self.lines: list[str] = []
        self.names: dict[Ref, str] = {}
        self.resharded: dict[tuple[Ref, str], str] = {}
        self.taken: dict[str, int] = {}
        self.indent = ""

    def write(self) -> list[str]:
        """The statements, in execution order; those placed on one coordinate together."""
        together: list[Op] = []
        self._enough(None)
        program = self.context.program
        for node in in_order(self.gm, self.scope, program, self.context.plan):
            op = program.op_of(node, self.scope)
            if (op is None and node.op not in ("call_module", "output")) or not self.includes(node, op):
                continue
            spot = self._spot(op)
            if together and (spot != self._spot(together[0]) or self.context.probes or self._moves(op, together)):
                write_placed(self, together)
                together = []
            if op is not None and spot is not None:
                together.append(op)
            else:
                self._node(node, op)
            if op is not None and op.role == "op":
                self._enough(op)
        return self.lines

    def _enough(self, op: Op | None) -> None:
        """Write `enough()` where `op` is the last operator of the block that saves something for the backward (None:
        the block begins, and no operator does)."""
        about = self.context.edges.reruns.get(self.scope)
        if about is not None and about.last == (-1 if op is None else about.order[op.name]):
            self.context.marks["enough"] = None
            self.say("enough()", "what follows is not run again")

    def includes(self, node: fx.Node, op: Op | None) -> bool:
        """Whether `node` is written; stages write some nodes only."""
        return True

    def _node(self, node: fx.Node, op: Op | None) -> None:
        if node.op == "placeholder":
            self._placeholder(node)
        elif node.op == "call_module":
            self._run(node)
        elif op is None:
            self._output(node)
        elif not self._gathered_turned(op):
            self.operator(op)

    def _gathered_turned(self, op: Op) -> bool:
        """Whether `op` permutes or casts a weight only for gathers, which do that themselves (`reshard_text`)."""
        program, plan = self.context.program, self.context.plan
        if op.name not in program.following or self.context.probes:
            return False
        readers, edges = program.readers[op.name, 0], self.context.edges
        moves = [
            (r, edges.between((op.name, 0), in_pair(plan, r.name, index), "edge", self.scope)) for r, index in readers
        ]
        return all(self._gathered_turned(r) or (move and move.fetches(self.context.sizes)) for r, move in moves)

    def _spot(self, op: Op | None) -> Spot | None:
        return spot_of(self.context.plan.nodes[op.name]) if op is not None and op.role == "op" else None

    def _moves(self, op: Op | None, together: Sequence[Op]) -> bool:
        """Whether `op` needs a reshard of a value made in `together`: all ranks run reshards, so that these are outside
        of local functions."""
        inside = {other.name: other for other in together}
        return op is not None and any(
            ref[0] in inside and needed(out_pair(self.context.plan, ref), in_pair(self.context.plan, op.name, i))
            for i, ref in enumerate(op.operands)
        )

    def fresh(self, name: str) -> str:
        """A variable name that is unused in this scope: `name` if it is free, else with a number."""
        taken = (*USED_IN_SCOPES, *self.context.symbols, *self.context.function_names)
        name = f"{name}_" if keyword.iskeyword(name) or name in taken else name
        self.taken[name] = self.taken.get(name, 0) + 1
        return name if self.taken[name] == 1 else self.fresh(f"{name}_{self.taken[name]}")

    def say(self, code: str, comment: str = "") -> None:
        """Add one statement; its comment is on the same line, or above it where the statement is long."""
        code = self.indent + code
        if comment and len(code) >= COMMENT_COLUMN:
            self.lines.append(f"{code[: len(code) - len(code.lstrip())]}# {comment}")
        self.lines.append(
            f"{code.ljust(COMMENT_COLUMN)}# {comment}" if comment and len(code) < COMMENT_COLUMN else code
        )

    def _placeholder(self, node: fx.Node) -> None:
        op = self.context.program.ops[op_name(node, self.scope)]
        table = {"param": "w", "buffer": "b", "constant": "b"}
        if op.role in table:
            self.names[op.name, 0] = f"self.{table[op.role]}[{quoted(self.context.short_name(op))}]"
        else:
            self.names[op.name, 0] = self.fresh(node.meta.get("input", node.name))

    def value(self, ref: Ref) -> str:
        return self.names[ref]

    def asked(self, ref: Ref, dst: LayoutPair, role: str = "edge") -> str:
        """The variable that holds `ref` in the layout pair `dst`; writes the reshard the first time that it is asked
        for."""
        reshard = self.context.edges.between(ref, dst, role, self.scope if role == "edge" else None)
        if reshard is None:
            return self.names[ref]
        key = (ref, f"{role} {dst}")
        if key not in self.resharded:
            name = self.fresh(self._base(ref))
            self.resharded[key] = name
            text = self._marked(REPLAYED.get(reshard.replay, ""), self.reshard_text(reshard, self.names.get(ref, "")))
            self.say(f"{name} = {text}", self.context.reason(reshard))
        return self.resharded[key]

    def _marked(self, mark: str, text: str) -> str:
        """`text` inside of `keep` or `skip`, as `mark` says; "": unchanged."""
        if not mark:
            return text
        self.context.marks[mark] = None
        return f"{mark}(lambda: {text})"

    def _base(self, ref: Ref) -> str:
        op = self.context.program.ops[ref[0]]
        if op.role in ("param", "buffer", "constant"):
            return re.sub(r"\W|^(?=\d)", "_", self.context.short_name(op))
        return self.names.get(ref) or str(op.node.name)

    def reshard_text(self, reshard: Reshard, name: str) -> str:
        """The call of `reshard` for a value called `name`; of `gather` for weights, which permutes and casts them, is
        prefetched, and gathers again in the backward where needed."""
        shape, turn = self.context.whole_sizes(reshard.ref), ""
        grad = f'"{show(reshard.dst.grad)} -> {show(reshard.src.grad)}"' if reshard.gradient else "None"
        fetches, gathers = reshard.fetches(self.context.sizes), reshard.gathers(self.context.sizes)
        if fetches:
            name, turn = (
                self.names[self.context.program.source(reshard.ref), 0],
                turn_text(self.context.program.turn(reshard.ref)),
            )
        kept = fetches and not gathers and self.context.plan.mode == "train"
        return (
            f'{"gather" if fetches else "reshard"}({name}, "{show(reshard.src.value)} -> {show(reshard.dst.value)}", '
            f"grad={grad}, shape={shape}, mesh=MESH{turn}{', again=False' if kept else ''})"
        )

    def operator(self, op: Op) -> None:
        """The statement of one operator, and the reshards in front of it."""
        operands = [
            self.context.operand(op, i, self.asked(ref, in_pair(self.context.plan, op.name, i)))
            for i, ref in enumerate(op.operands)
        ]
        text = self._marked(self.context.edges.mark(op), self._call(op, operands))
        if len(op.call.outs) == 1 and not isinstance(op.node.meta["val"], (tuple, list)):
            name = self.names[op.name, 0] = self.fresh(op.node.name)
            tiles = self.context.tiles(op) if tiled(options(self.context.plan.nodes[op.name])) > 1 else ""
            self.say(f"{name} = {text}", self._layout((op.name, 0)) + (f"   {tiles}" if tiles else ""))
            self.probe(op)
            return
        names = [self.fresh(f"{op.node.name}_{i}") for i in range(len(op.call.outs))]
        self.names.update({(op.name, i): name for i, name in enumerate(names)})
        rest = ", *_" if len(op.node.meta["val"]) > len(names) else "," if len(names) == 1 else ""  # *_: Nones
        self.say(f"{', '.join(names)}{rest} = {text}", self._layout((op.name, 0)))
        self.probe(op)

    def probe(self, op: Op) -> None:
        """Reports what `op` gave, outside local functions: a probe puts values together on all ranks."""
        if self.context.probes and not self.indent:
            for i, name in enumerate(probes.names(op.name, len(op.call.outs))):
                self.say(
                    probes.probe(
                        name, self.names[op.name, i], self._given((op.name, i)), self.context.whole_sizes((op.name, i))
                    )
                )

    def _given(self, ref: Ref) -> LayoutPair:
        """The layout pair of a value for its probe: as readers get it and leave its gradient. The gradient of a weight
        is partial on its sync axes."""
        program, pair = self.context.program, given(self.context.program, self.context.plan, ref)
        if self._passed_by(ref):
            return LayoutPair(pair.value, (NO_GRAD,) * len(pair.value))
        return (
            pair.partial(self.context.edges.sync.get((program.source(ref), 0), ())) if program.is_weight(ref) else pair
        )

    def _passed_by(self, ref: Ref) -> bool:
        """Whether no gradient passes a value: a permuted or cast weight that is then gathered. The gather reads the
        parameter itself."""
        context = self.context
        return ref[0] in context.program.following and (
            any(reshard.ref == ref and reshard.fetches(context.sizes) for reshard in context.edges.reshards)
            or any(self._passed_by((reader.name, 0)) for reader, _ in context.program.readers.get(ref, ()))
        )

    def _layout(self, ref: Ref) -> str:
        tensor = self.context.program.ops[ref[0]].call.outs[ref[1]]
        layout = out_pair(self.context.plan, ref).value
        sizes = size_text.comment(
            tensor.shape, layout, self.context.sizes, self.context.micro(ref), self.context.plan.microbatches
        )
        return f"{sizes}   {show(layout)}".strip()

    def _call(self, op: Op, operands: Sequence[str]) -> str:
        node, plan = op.node, self.context.plan
        queue = iter(operands)
        args = tuple(self._argument(a, queue, op) for a in node.args)
        kwargs = {k: self._argument(v, queue, op) for k, v in node.kwargs.items()}
        outs = tuple(self.context.local_sizes((op.name, i)) for i in range(len(op.call.outs)))
        self._note_even(op)
        plain = Written(args, kwargs, node.args, outs)
        call = operands_chosen(with_local_groups(PlannedCall(op, plan.nodes[op.name], plain, self.context)))
        special = algorithm_text(call)
        if special is not None:
            return special
        self.context.use(node.target)
        return seeded_text(call, write(node.target, switched(call)))

    def _note_even(self, op: Op) -> None:
        """Note the sizes that must divide evenly, for a reshape of cut dims and for samples side by side: the forward
        checks them first."""
        plan, exact = self.context.plan, self.context.batch_axes
        ins = [in_pair(plan, op.name, index).value for index in range(len(op.call.ins))]
        outs = [out_pair(plan, (op.name, index)).value for index in range(len(op.call.outs))]
        found = [
            pair
            for tensor, layout in zip(op.tensors, (*ins, *outs), strict=True)
            for pair in size_text.sections_must_divide(tensor.shape, layout, exact)
        ]
        if op.target is torch.ops.aten.reshape.default:
            before, after = op.call.ins[0].shape, op.call.outs[0].shape
            found += size_text.must_divide(before, ins[0], after, outs[0], exact)
            micro = [(self.context.micro(ref),) for ref in (op.operands[0], (op.name, 0))]
            for size, _ in size_text.must_divide(before, micro[0], after, micro[1], (0,)):
                self._note(op, size, (), self.context.parts)
        for size, axes in found:
            self._note(op, size, axes)

    def _note(self, op: Op, size: facts.Size, axes: tuple[int, ...], parts: int = 1) -> None:
        self.context.even.setdefault((size_text.text(size), axes, parts), f"{op.name} at {op.where}")

    def _argument(self, item: Any, queue: Any, op: Op) -> str:
        if isinstance(item, fx.Node):
            if facts.tensors(item):
                return str(next(queue))
            held = facts.value(item)
            if isinstance(held, (int, float, torch.SymInt, torch.SymFloat)):
                return atom(size_text.text(self._number(held, op)))
            raise TypeError(f"argument {item} of kind {type(held).__name__} has no source form")
        if isinstance(item, (tuple, list)):
            inside = ", ".join(self._argument(i, queue, op) for i in item)
            return f"[{inside}]" if isinstance(item, list) else f"({inside}{',' if len(item) == 1 else ''})"
        return literal(item)

    def _number(self, held: float | torch.SymInt | torch.SymFloat, op: Op) -> float | sympy.Expr:
        """A number argument of `op`, as a formula of the sizes of the inputs. Raises PlanError where it depends on
        values of tensors."""
        number = facts.as_number(held, self.gm)
        if isinstance(number, sympy.Expr) and (unknown := number.free_symbols - set(facts.symbols(self.gm).values())):
            raise PlanError(
                f"{op.name} at {op.where} computes with {number}, and {', '.join(map(str, unknown))} is a number read "
                "off a tensor (item(), int(), float()): each rank would read it off its part; leave it a tensor of no "
                "dims, which operators take like a number"
            )
        return number

    def first_instance(self, run: Run) -> int:
        """The instance with which the loop over the blocks of `run` begins."""
        return 0

    def _run(self, node: fx.Node) -> None:
        run = self.context.program.runs[str(node.target)]
        begun = self.first_instance(run) > 0  # the run begins in an earlier stage: carried values were received
        feeds = [
            self.names[run.carried[i]]
            if begun and i < len(run.carried)
            else self.context.shared(port, 0, self.asked(ref, in_pair(self.context.plan, port, 0), "feed"))
            for i, (port, ref) in enumerate(zip(run.ports, run.feeds, strict=True))
        ]
        carried = [self.fresh("h" if len(run.carried) == 1 else f"h{i}") for i in range(len(run.carried))]
        for name, feed in zip(carried, feeds, strict=False):
            self.say(f"{name} = {feed}")
        changes = [
            self.context.edges.between(ref, in_pair(self.context.plan, port, 0), "carry")
            for ref, port in zip(run.carried, run.ports, strict=False)
        ]
        counted = any(changes) and not begun
        blocks = f"self.runs[{run.scope!r}]"
        arguments = ", ".join([*carried, *feeds[len(carried) :], *(f"{s}={s}" for s in self.context.symbols)])
        count, again = self.instances(run), self.again(run)
        loops = (
            [(blocks, count, again > 0, counted)]
            if again in (0, count)
            else [(f"{blocks}[:{again}]", again, True, counted), (f"{blocks}[{again}:]", count - again, False, False)]
        )
        for which, times, reruns, first in loops:
            note = f"{self.blocks_comment(times)}{self.context.class_of(run.scope)}"
            note += ", run again in the backward" if reruns else ""
            self.say(f"for i, block in enumerate({which}):" if first else f"for block in {which}:", note)
            self._carry(list(zip(carried, changes, strict=True)), first=first)
            call = f"remat(block, {arguments})" if reruns else f"block({arguments})"
            self.say(f"    {', '.join([*carried, *(['*changed'] if run.mutated else [])])} = {call}")
            if run.mutated:
                self.say("    self.changed(block, changed)")
        for name, ref in zip(carried, run.carried, strict=True):
            self.names[ref] = name

    def _carry(self, changes: Sequence[tuple[str, Reshard | None]], *, first: bool) -> None:
        """Write the reshards of carried values before the next block; with `first` the loop includes the first block,
        which needs none."""
        for name, change in changes:
            if change is not None:
                if first:
                    self.say("    if i > 0:")
                self.say(
                    f"    {'    ' if first else ''}{name} = {self.reshard_text(change, name)}",
                    self.context.reason(change),
                )

    def instances(self, run: Run) -> int:
        """How many blocks of `run` the loop goes over."""
        return run.count

    def blocks_comment(self, times: int) -> str:
        """The number of blocks of a loop, for the comment in front of their class; "" in a stage."""
        return f"{times} x "

    def again(self, run: Run) -> int:
        """How many of these blocks, counted from the first, are run again in the backward."""
        return self.context.plan.again(self.context.plan.stages[0], run.scope, run.count)

    def _output(self, node: fx.Node) -> None:
        program = self.context.program
        if self.scope:
            run = program.runs[self.scope]
            mutated = [
                self.asked(program.ops[name].operands[0], in_pair(self.context.plan, name, 0)) for name in run.mutated
            ]
            self.say(f"return {', '.join([*(self.names[ref] for ref in run.carried), *mutated])}")
            return
        values = self.results(program.results)
        self.say(f"return {', '.join(values)}{',' if len(values) == 1 else ''}")

    def results(self, ops: Sequence[Op]) -> list[str]:
        """The expressions that the forward returns for these results of the model; writes the reshards that they
        need."""
        values = []
        for op in ops:
            name = self.asked(op.operands[0], in_pair(self.context.plan, op.name, 0))
            layout = in_pair(self.context.plan, op.name, 0).value
            values.append(
                name
                if op.role != "output"
                else f'self.spread({name}, "{show(layout)}", {self.context.whole_sizes(op.operands[0])})'
            )
        return values
