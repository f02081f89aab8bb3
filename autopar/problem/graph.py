"""The captured graph as plain data: what the problem builder and the recipes see of it.

A *scope* is the top-level graph (`""`) or the body of a run of repeated blocks (its module name). Every node of a scope
becomes an `Op`; values are referred to as `(op name, output index)`. Runs are opened: the `call_module` node itself has no
Op, its body's placeholders become `port` Ops, and `Run` says how the values go round.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from autopar.layout import BUCKET_BYTES
from autopar.problem.gradients import NO_GRADIENT, reaching
from autopar.problem.traffic import annotate
from autopar.rules.language import Call, Tensor
from passes import edit, facts, ops
from passes.saved import Saved, saved_positions

TURNS = (torch.ops.aten.transpose.int, torch.ops.aten.permute.default, torch.ops.aten.t.default, torch.ops.aten.to.dtype)
"""Operators that move or cast elements one by one: a shard of their result is made of one shard of their operand."""

Ref = tuple[str, int]  # (name of the producing op, index of its output)


@dataclass(eq=False, slots=True)
class Op:
    """One node: its call as the rules see it, where its operands come from, and what it costs on one device.

    `role` is param, buffer, constant, input, port (a placeholder of a block body), op, or one per result of the model: loss,
    output, mutation (of a buffer). `count` is how often it
    runs per step. Sizes, FLOPs and bytes are numbers at the planned batch and sequence.
    """

    name: str
    scope: str
    node: fx.Node
    role: str
    call: Call
    operands: tuple[Ref, ...]
    count: int = 1
    fqn: str = ""
    flops: float = 0.0
    backward_flops: float = 0.0
    bytes: float = 0.0
    backward_bytes: float = 0.0
    fused_bytes: float = 0.0  # forward, and of the backward, where chains of pointwise operators run as one kernel (problem.traffic)
    fused_backward_bytes: float = 0.0
    leads: bool = True  # whether it is a kernel of its own then
    weight: tuple[bool, ...] = ()  # per operand: does it come from parameters alone
    batch: tuple[frozenset[int], ...] = ()  # per tensor (operands, then outputs): dims that hold the batch
    saves: tuple[int, ...] = ()  # tensors (operands, then outputs) that autograd keeps for the backward
    copies: tuple[int, ...] = ()  # operands of which it keeps a copy of its own
    extra_bytes: float = 0.0  # what it keeps beside tensors of the graph: masks, statistics, indices
    late: bool = False  # its results get a gradient in all blocks of a run but the first, whose input has none
    first_saves: tuple[int, ...] = ()  # `saves` in the first block of a run
    out_dtypes: tuple[torch.dtype, ...] = ()
    dtype: str = ""  # what it computes in: that of its first floating operand, else of its result
    where: str = ""
    head: bool = False  # its result goes straight into a loss over classes

    @property
    def target(self) -> Any:
        return self.call.target

    @property
    def graded(self) -> bool:
        """Whether any of its results gets a gradient."""
        return any(t.grad for t in self.call.outs)

    @property
    def free(self) -> bool:
        """Whether it computes and moves nothing: a view, a value that rests."""
        return not (self.flops > 0 or self.bytes > 0 or self.backward_flops > 0 or self.backward_bytes > 0)

    @property
    def of_weights(self) -> bool:
        """Whether it only changes weights (a cast, a transpose): it follows the parameters."""
        return self.role == "op" and bool(self.weight) and all(self.weight)

    @property
    def weights_share(self) -> float:
        """The share of its backward that is for weights: of operands that get gradients, those that are made of parameters alone."""
        graded = [weight for weight, tensor in zip(self.weight, self.call.ins, strict=True) if tensor.grad] if self.role == "op" else []
        return sum(graded) / len(graded) if graded else 0.0

    def needs_again(self, operand: int, *, first: bool = False) -> bool:
        """Whether the backward (of the `first` block) needs that operand in such a way that a gathered weight is dropped and gathered
        again: a vector is kept, because it is smaller than what starting one more collective costs."""
        return operand in (self.first_saves if first else self.saves) and len(self.call.ins[operand].shape) > 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Operands, then outputs."""
        return (*self.call.ins, *self.call.outs)


@dataclass(frozen=True, slots=True)
class Run:
    """A run of `count` alike blocks: `feeds[i]` is the outer value that port i first gets; `carried[i]` the body value that
    port i gets from then on (only for the first len(carried) ports). `mutated` are the Ops of new values of the block's buffers."""

    scope: str
    count: int
    ports: tuple[str, ...]
    feeds: tuple[Ref, ...]
    carried: tuple[Ref, ...]
    mutated: tuple[str, ...] = ()


@dataclass(eq=False)
class Program:
    """All Ops in execution order (bodies inside the place where they are called) and the runs."""

    ops: dict[str, Op] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    device: str = ""

    def readers(self) -> dict[Ref, list[tuple[Op, int]]]:
        """Value -> the (op, operand index) pairs that read it."""
        found: dict[Ref, list[tuple[Op, int]]] = {}
        for op in self.ops.values():
            for index, ref in enumerate(op.operands):
                found.setdefault(ref, []).append((op, index))
        return found

    @cached_property
    def following(self) -> dict[str, str]:
        """Operators that only turn or cast one parameter, which nobody else reads: name -> the parameter. They are done on the
        shard, so that what is gathered, and gathered again, is their result."""
        readers = self.readers()
        fed = {ref for run in self.runs.values() for ref in (*run.feeds, *run.carried)}
        found: dict[str, str] = {}
        for op in self.ops.values():
            if op.role != "op" or op.target not in TURNS or len(op.operands) != 1 or len(op.call.outs) != 1:
                continue
            ref = op.operands[0]
            source = ref[0] if self.ops[ref[0]].role == "param" else found.get(ref[0])
            if source is not None and len(readers[ref]) == 1 and ref not in fed and self.ops[ref[0]].scope == op.scope:
                found[op.name] = source
        return found

    @cached_property
    def bucket_bytes(self) -> float:
        """Bytes that travel together where many parameters take the same step: a bucket, or all that are trained."""
        trained = [op for op in self.ops.values() if op.role == "param" and op.call.outs[0].grad]
        return min(BUCKET_BYTES, sum(self.bytes_of((op.name, 0)) * op.count for op in trained))

    @cached_property
    def weights_bytes(self) -> dict[str, float]:
        """Bytes of all parameters of one instance of each block, by scope; of the model's own by ""."""
        found: dict[str, float] = {}
        for op in self.ops.values():
            if op.role == "param":
                found[op.scope] = found.get(op.scope, 0.0) + self.bytes_of((op.name, 0))
        return found

    def is_weight(self, ref: Ref) -> bool:
        """Whether a value is a parameter, or one that was turned or cast."""
        return self.ops[ref[0]].role == "param" or ref[0] in self.following

    def first_runs(self, ref: Ref) -> int:
        """How often per step a value is made in the first block of its run; 0 outside of runs."""
        op = self.ops[ref[0]]
        return op.count // self.runs[op.scope].count if op.scope else 0

    @property
    def results(self) -> list[Op]:
        """What the model gives: loss, outputs, new values of buffers outside of blocks, in the order of the graph's outputs."""
        return [op for op in self.ops.values() if op.role in ("loss", "output", "mutation") and not op.scope]

    def bytes_of(self, ref: Ref) -> float:
        """Bytes of the whole value, on one device."""
        op = self.ops[ref[0]]
        tensor, dtype = op.call.outs[ref[1]], op.out_dtypes[ref[1]]
        return float(sympy.prod(tensor.sizes)) * dtype.itemsize


def read(gm: fx.GraphModule, hints: Mapping[str, int], *, training: bool, device: str = "") -> Program:
    """Turn the captured graph into a Program at the sizes `hints` (friendly symbol -> number). What the backward keeps
    depends on the kernels that the kind of `device` has ("cpu", "cuda"; without one, those of an accelerator)."""
    program = Program(hints=dict(hints), device=device)
    _Reader(gm, program, "", 1, reaching(gm) if training else {}).read({})
    for op in program.ops.values():
        if op.target in LOSSES:
            program.ops[op.operands[0][0]].head = True
    annotate(program)
    return program


@dataclass(frozen=True, slots=True)
class Fed:
    """What a block is fed: whether it has a gradient, whether in the first block too, and whether it comes from parameters alone."""

    grad: bool
    early: bool
    weight: bool


class _Reader:
    """Reads one scope."""

    def __init__(self, gm: fx.GraphModule, program: Program, scope: str, count: int, reached: Mapping[fx.Node, None]) -> None:
        self.gm, self.program, self.scope, self.count, self.reached = gm, program, scope, count, reached
        self.refs: dict[fx.Node, Ref] = {}
        self.runs_of: dict[fx.Node, Run] = {}
        self.values = {facts.symbol(name): n for name, n in program.hints.items()}
        self.weight: dict[Ref, bool] = {}
        self.early: dict[str, bool] = {}  # Op name -> whether it has a gradient in the first block too

    def read(self, ports: Mapping[str, Fed]) -> tuple[Ref, ...]:
        """Read every node; `ports` says by name what is fed to placeholders."""
        outputs: tuple[Ref, ...] = ()
        for node in self.gm.graph.nodes:
            if node.op == "call_module":
                self._run(node)
            elif node.op == "call_function" and node.target is operator.getitem and _gives_tensors(node.args[0]):
                self._item(node)
            elif node.op == "output":
                outputs = self._output(node)
            elif facts.tensors(node):
                self._op(node, ports)  # sizes are no Ops: they are formulas wherever they are used
        return outputs

    def full_name(self, node: fx.Node) -> str:
        return f"{self.scope}/{node.name}" if self.scope else node.name

    def _item(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        run = self.runs_of.get(source)
        self.refs[node] = run.carried[index] if run else (self.refs[source][0], index)

    def _op(self, node: fx.Node, ports: Mapping[str, Fed]) -> None:
        name = self.full_name(node)
        role = str(node.meta["role"]) if node.op == "placeholder" and "role" in node.meta else "op"
        if node.op == "placeholder" and role == "op":
            role = "port"
        operands = tuple(self.refs[n] for n in tensor_operands(node))
        known = self.program.ops
        grads = tuple(known[ref[0]].call.outs[ref[1]].grad for ref in operands)
        weights = tuple(self.weight[ref] for ref in operands)
        gradient, weight = self._flow(node, role, grads, weights, ports)
        first = tuple(grad and self.early[ref[0]] for ref, grad in zip(operands, grads, strict=True))
        self.early[name] = ports[node.name].early if role == "port" else self._flow(node, role, first, weights, ports)[0]
        held = facts.tensors(node)
        outs = tuple(self._tensor(node, i if isinstance(facts.value(node), (tuple, list)) else None, gradient)
                     for i in range(len(held)))
        lookup = [known[ref[0]].call.outs[ref[1]] for ref in operands]
        arguments = ((outs[0],), {}) if role == "port" else _substitute(node, lookup)  # a port passes its value on
        call = Call(node.target, *arguments, outs)
        op = Op(name, self.scope, node, role, call, operands, self.count, str(node.meta.get("fqn", "")),
                weight=weights, out_dtypes=tuple(t.dtype for t in held), dtype=_computes_in(node), where=facts.where(node))
        if role == "op":
            op.flops, op.backward_flops = self._number(facts.flops(node)), self._number(facts.backward_flops(node))
            op.bytes = self._number(facts.read_bytes(node)) + self._number(facts.written_bytes(node))
            if gradient:
                kept = saved(node, self.program.device)
                op.saves, op.copies, op.extra_bytes = kept.positions, kept.copies, self._number(kept.extra_bytes)
                op.first_saves = op.saves if first == grads else tuple(i for i in op.saves if i in saved_positions(node.target, first))
        op.late = gradient and not self.early[name]
        op.batch = tuple(frozenset(d for d, n in enumerate(t.shape) if _has_batch(n)) for t in op.tensors)
        known[name] = op
        self.refs[node] = (name, 0)
        for i in range(len(outs)):
            self.weight[name, i] = weight

    def _flow(self, node: fx.Node, role: str, grads: tuple[bool, ...], weights: tuple[bool, ...],
              ports: Mapping[str, Fed]) -> tuple[bool, bool]:
        """Whether the node's value carries a gradient, and whether it comes from parameters alone."""
        floating = facts.is_float(node)
        if role == "param":
            return node in self.reached and floating and bool(node.meta.get("requires_grad", True)), True
        if role == "port":
            return ports[node.name].grad and floating, ports[node.name].weight
        gradient = node in self.reached and floating and any(grads) and node.target not in NO_GRADIENT
        return gradient, role == "op" and bool(weights) and all(weights)

    def _tensor(self, node: fx.Node, index: int | None, gradient: bool) -> Tensor:
        shape = facts.shape(node, index)
        dtype = facts.dtype(node, index)
        floating = dtype.is_floating_point or dtype.is_complex
        gradient = gradient and floating and (index is None or self._used(node, index))
        return Tensor(shape, gradient, tuple(int(self._number(n)) for n in shape), floating, dtype.itemsize)

    def _used(self, node: fx.Node, index: int) -> bool:
        """Whether the loss depends on output `index` of a node that has several."""
        return any(user in self.reached for user in node.users if user.target is operator.getitem and user.args[1] == index)

    def _number(self, size: int | sympy.Expr) -> float:
        return float(size) if isinstance(size, (int, float)) else float(size.subs(self.values))

    def _run(self, node: fx.Node) -> None:
        body = self.gm.get_submodule(str(node.target))
        assert isinstance(body, fx.GraphModule)
        scope = str(node.target)
        reader = _Reader(body, self.program, scope, self.count * int(node.meta["repeat"]), self.reached)
        feeds = tuple(self.refs[arg] for arg in node.args if isinstance(arg, fx.Node) and arg in self.refs)
        names = [n for n in body.graph.nodes if n.op == "placeholder" and "fqns" not in n.meta and facts.tensors(n)]
        grads = [n in self.reached and self.program.ops[ref[0]].call.outs[ref[1]].grad for n, ref in zip(names, feeds, strict=True)]
        ports = {n.name: Fed(grad, grad, self.weight[ref]) for n, grad, ref in zip(names, grads, feeds, strict=True)}
        carried_count = len(edit.results(body))
        if not all(grads[:carried_count]) and node in self.reached:
            # the first block may be fed something without a gradient, the later ones are not
            ports |= {n.name: Fed(n in self.reached, ports[n.name].early, False) for n in names[:carried_count]}
        carried = reader.read(ports)
        mutated = tuple(op.name for op in self.program.ops.values() if op.scope == scope and op.role == "mutation")
        run = Run(scope, int(node.meta["repeat"]), tuple(reader.full_name(n) for n in names), feeds, carried[:carried_count], mutated)
        self.program.runs[scope] = run
        self.runs_of[node] = run
        for ref in carried:
            self.weight[ref], self.early[ref[0]] = False, True  # of the last block

    def _output(self, node: fx.Node) -> tuple[Ref, ...]:
        args = node.args[0]
        flat = list(args) if isinstance(args, (tuple, list)) else [args]  # keeps repeats and order
        refs = tuple(self.refs[n] for n in flat if isinstance(n, fx.Node))
        for index, (ref, entry) in enumerate(zip(refs, self.gm.meta["outputs"], strict=True)):
            if not self.scope or entry["kind"] == "mutation":  # a block gives nothing else to the outside; its carried values go round
                self._result(node, f"{self.scope}/output_{index}" if self.scope else f"output_{index}", ref, entry)
        return refs

    def _result(self, node: fx.Node, name: str, ref: Ref, entry: Mapping[str, str]) -> None:
        tensor = self.program.ops[ref[0]].call.outs[ref[1]]
        kind = entry["kind"]
        tensor = replace(tensor, grad=tensor.grad and kind == "loss")
        batch = frozenset(d for d, n in enumerate(tensor.shape) if _has_batch(n))
        fqn = str(entry.get("target") or entry.get("name") or "")
        self.program.ops[name] = Op(name, self.scope, node, kind, Call(kind, (tensor,), {}, ()), (ref,), self.count, fqn,
                                    weight=(False,), batch=(batch,), where="the model's outputs")


LOSSES = (ops.cross_entropy_sum, ops.cross_entropy_each)


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of a node in order, repeats kept (`mul(x, x)` has two)."""
    found: list[fx.Node] = []
    _walk((node.args, tuple(node.kwargs.values())), found)
    return [n for n in found if facts.tensors(n)]


def _computes_in(node: fx.Node) -> str:
    held = [t.dtype for n in (*tensor_operands(node), node) for t in facts.tensors(n)]
    return str(next((d for d in held if d.is_floating_point), held[-1])).removeprefix("torch.")


def saved(node: fx.Node, device: str) -> Saved:
    """What the node's backward keeps on that kind of device."""
    found: Saved = node.meta.get(f"saved_on_{device}") or node.meta.get("saved") or Saved()
    return found


def _walk(tree: Any, found: list[fx.Node]) -> None:
    if isinstance(tree, fx.Node):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _walk(item, found)


def _gives_tensors(node: Any) -> bool:
    return (isinstance(node, fx.Node) and isinstance(node.meta.get("val"), (tuple, list))) or (
        isinstance(node, fx.Node) and node.op == "call_module")


def _substitute(node: fx.Node, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments with tensors replaced by rule Tensors and sizes by expressions."""
    queue = iter(tensors)
    gm = node.graph.owning_module

    def swap(item: Any) -> Any:
        if isinstance(item, fx.Node):
            if facts.tensors(item):
                return next(queue)
            held = facts.value(item)
            return facts.as_size(held, gm) if isinstance(held, (int, torch.SymInt)) else held
        if isinstance(item, (tuple, list)):
            return type(item)(swap(i) for i in item) if not isinstance(item, tuple) else tuple(swap(i) for i in item)
        return item

    args = tuple(swap(a) for a in node.args)
    return args, {k: swap(v) for k, v in node.kwargs.items()}


def _has_batch(size: int | sympy.Expr) -> bool:
    return not isinstance(size, int) and facts.symbol("b") in size.free_symbols
