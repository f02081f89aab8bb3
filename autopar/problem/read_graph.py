"""Reads a captured graph into a Program: one Op per node, the bodies of runs opened where they are called."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from autopar.problem.gradients import carried_on, reaching
from autopar.problem.graph import Op, Program, Ref, Run, op_name
from autopar.problem.traffic import LOSSES, annotate
from autopar.rules.language import Call, Tensor
from passes import edit, facts
from passes.grads import NO_GRADIENT
from passes.saved import Saved, saved_positions


def read(gm: fx.GraphModule, hints: Mapping[str, int], *, training: bool, device: str = "") -> Program:
    """Turn the captured graph into a Program at the sizes `hints` (friendly symbol -> number). What the backward keeps
    depends on the kernels that the kind of `device` has ("cpu", "cuda"; without one, those of an accelerator)."""
    program = Program(hints=dict(hints), device=device)
    _Reader(gm, program, "", 1, reaching(gm) if training else {}, _Numbers(hints)).read({})
    for op in program.ops.values():
        if op.target in LOSSES:
            program.ops[op.operands[0][0]].head = True
    annotate(program)
    return program


def laid_out(gm: fx.GraphModule, hints: Mapping[str, int], *, training: bool) -> Iterator[str]:
    """Names of what a plan of this graph lays out (`Plan.nodes`); the graph is read when the first one is asked for."""
    yield from read(gm, hints, training=training).ops


@dataclass(frozen=True, slots=True)
class Fed:
    """What a block is fed: whether it has a gradient, whether in the first block too, and whether it comes from
    parameters alone."""

    grad: bool
    early: bool
    weight: bool


class _Numbers:
    """Formulas at the sizes `hints`, each worked out once: most nodes of a graph have one of few sizes."""

    def __init__(self, hints: Mapping[str, int]) -> None:
        self.values = {facts.symbol(name): sympy.sympify(n) for name, n in hints.items()}
        self.known: dict[sympy.Expr, float] = {}

    def __call__(self, size: int | float | sympy.Expr) -> float:
        if isinstance(size, (int, float)):
            return float(size)
        if size not in self.known:
            self.known[size] = float(size.xreplace(self.values))
        return self.known[size]


class _Reader:
    """Reads one scope."""

    def __init__(
        self,
        gm: fx.GraphModule,
        program: Program,
        scope: str,
        count: int,
        reached: Mapping[fx.Node, None],
        number: _Numbers,
    ) -> None:
        self.gm, self.program, self.scope, self.count, self.reached, self.number = (
            gm,
            program,
            scope,
            count,
            reached,
            number,
        )
        self.refs: dict[fx.Node, Ref] = {}
        self.runs_of: dict[fx.Node, Run] = {}
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

    def _item(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        run = self.runs_of.get(source)
        self.refs[node] = run.carried[index] if run else (self.refs[source][0], index)

    def _op(self, node: fx.Node, ports: Mapping[str, Fed]) -> None:
        """Add the Op of a node with tensor values."""
        name, role = op_name(node, self.scope), _role(node)
        operands = tuple(self.refs[n] for n in edit.tensor_operands(node))
        known = self.program.ops
        read = [known[ref[0]].call.outs[ref[1]] for ref in operands]
        grads = tuple(tensor.grad for tensor in read)
        weights = tuple(self.weight[ref] for ref in operands)
        gradient, weight = self._flow(node, role, grads, weights, ports)
        first = tuple(grad and self.early[ref[0]] for ref, grad in zip(operands, grads, strict=True))
        self.early[name] = (
            ports[node.name].early if role == "port" else self._flow(node, role, first, weights, ports)[0]
        )
        several = isinstance(facts.value(node), (tuple, list))
        outs = tuple(
            self._tensor(node, i if several else None, graded=gradient) for i in range(len(facts.tensors(node)))
        )
        if role == "op" and not gradient:  # its operands may have one from others
            read = [replace(tensor, grad=False) for tensor in read]
        arguments = ((outs[0],), {}) if role == "port" else _substitute(node, read)  # a port passes its value on
        op = Op(
            name,
            self.scope,
            node,
            role,
            Call(node.target, *arguments, outs),
            operands,
            self.count,
            str(node.meta.get("fqn", "")),
            weight=weights,
            late=gradient and not self.early[name],
            first_grads=first,
            out_dtypes=tuple(t.dtype for t in facts.tensors(node)),
            dtype=_computes_in(node),
            where=facts.where(node),
        )
        if role == "op":
            self._add_work(op, grads, graded=gradient)
        op.batch = tuple(frozenset(d for d, n in enumerate(t.shape) if _has_batch(n)) for t in op.tensors)
        known[name] = op
        self.refs[node] = (name, 0)
        self.weight.update({(name, i): weight for i in range(len(outs))})

    def _add_work(self, op: Op, grads: tuple[bool, ...], *, graded: bool) -> None:
        """Fill in the FLOPs and bytes of an operator, and where it is `graded`, what its backward keeps. `grads`:
        whether each operand has a gradient."""
        node = op.node
        op.flops, op.backward_flops = self.number(facts.flops(node)), self.number(facts.backward_flops(node))
        op.bytes = self.number(facts.read_bytes(node)) + self.number(facts.written_bytes(node))
        if graded:
            kept, first = saved(node, self.program.device), op.first_grads
            op.saves, op.copies, op.extra_bytes = kept.positions, kept.copies, self.number(kept.extra_bytes)
            op.first_saves = (
                op.saves if first == grads else tuple(i for i in op.saves if i in saved_positions(node.target, first))
            )

    def _flow(
        self, node: fx.Node, role: str, grads: tuple[bool, ...], weights: tuple[bool, ...], ports: Mapping[str, Fed]
    ) -> tuple[bool, bool]:
        """Whether the node's value carries a gradient, and whether it comes from parameters alone."""
        floating = facts.is_float(node)
        if role == "param":
            return node in self.reached and floating and facts.is_trained(node), True
        if role == "port":
            return ports[node.name].grad and floating, ports[node.name].weight
        gradient = node in self.reached and floating and any(grads) and node.target not in NO_GRADIENT
        return gradient, role == "op" and bool(weights) and all(weights)

    def _tensor(self, node: fx.Node, index: int | None, *, graded: bool) -> Tensor:
        shape = facts.shape(node, index)
        dtype = facts.dtype(node, index)
        floating = dtype.is_floating_point or dtype.is_complex
        gradient = graded and floating and (index is None or self._used(node, index))
        return Tensor(shape, gradient, tuple(int(self.number(n)) for n in shape), floating, dtype.itemsize)

    def _used(self, node: fx.Node, index: int) -> bool:
        """Whether the loss depends on output `index` of a node that has several."""
        return any(
            user in self.reached for user in node.users if user.target is operator.getitem and user.args[1] == index
        )

    def _run(self, node: fx.Node) -> None:
        """Add a run of blocks: its body as a scope of its own, and the Run that says how it is fed."""
        body = self.gm.get_submodule(str(node.target))
        assert isinstance(body, fx.GraphModule)
        scope = str(node.target)
        reader = _Reader(body, self.program, scope, self.count * int(node.meta["repeat"]), self.reached, self.number)
        feeds = tuple(self.refs[arg] for arg in node.args if isinstance(arg, fx.Node) and arg in self.refs)
        names = [n for n in body.graph.nodes if n.op == "placeholder" and "fqns" not in n.meta and facts.tensors(n)]
        grads = [
            n in self.reached and self.program.ops[ref[0]].call.outs[ref[1]].grad
            for n, ref in zip(names, feeds, strict=True)
        ]
        ports = {n.name: Fed(grad, grad, self.weight[ref]) for n, grad, ref in zip(names, grads, feeds, strict=True)}
        carried_count = len(edit.results(body))
        if not all(grads[:carried_count]) and node in self.reached:
            # the first block may be fed something without a gradient, and the later ones something with one
            later = carried_on(self.gm, node, self.reached, grads)
            ports |= {n.name: Fed(grad, ports[n.name].early, False) for n, grad in zip(names, later, strict=False)}
        carried = reader.read(ports)
        mutated = tuple(op.name for op in self.program.ops.values() if op.scope == scope and op.role == "mutation")
        run = Run(
            scope,
            int(node.meta["repeat"]),
            tuple(op_name(n, scope) for n in names),
            feeds,
            carried[:carried_count],
            mutated,
            *body.meta.get("part", ()),
        )
        self.program.runs[scope] = run
        self.runs_of[node] = run
        for ref in carried:
            self.weight[ref], self.early[ref[0]] = False, True  # of the last block

    def _output(self, node: fx.Node) -> tuple[Ref, ...]:
        """The values that the scope returns; at the top level, also add an Op for each result of the model."""
        args = node.args[0]
        flat = list(args) if isinstance(args, (tuple, list)) else [args]  # keeps repeats and order
        refs = tuple(self.refs[n] for n in flat if isinstance(n, fx.Node))
        for index, (ref, entry) in enumerate(zip(refs, self.gm.meta["outputs"], strict=True)):
            # a block gives nothing else to the outside; its carried values go round
            if not self.scope or entry["kind"] == "mutation":
                self._result(node, f"{self.scope}/output_{index}" if self.scope else f"output_{index}", ref, entry)
        return refs

    def _result(self, node: fx.Node, name: str, ref: Ref, entry: Mapping[str, str]) -> None:
        """Add the Op of a result of the model: the value `ref`, which `entry` of the graph's outputs describes."""
        tensor = self.program.ops[ref[0]].call.outs[ref[1]]
        kind = entry["kind"]
        tensor = replace(tensor, grad=tensor.grad and kind == "loss")
        batch = frozenset(d for d, n in enumerate(tensor.shape) if _has_batch(n))
        fqn = str(entry.get("target") or entry.get("name") or "")
        self.program.ops[name] = Op(
            name,
            self.scope,
            node,
            kind,
            Call(kind, (tensor,), {}, ()),
            (ref,),
            self.count,
            fqn,
            weight=(False,),
            batch=(batch,),
            where="the model's outputs",
        )


def _role(node: fx.Node) -> str:
    """`Op.role` of a node that is no result of the model."""
    if node.op != "placeholder":
        return "op"
    role = str(node.meta.get("role", "op"))
    return "port" if role == "op" else role


def _computes_in(node: fx.Node) -> str:
    held = [t.dtype for n in (*edit.tensor_operands(node), node) for t in facts.tensors(n)]
    return str(next((d for d in held if d.is_floating_point), held[-1])).removeprefix("torch.")


def saved(node: fx.Node, device: str) -> Saved:
    """What the node's backward keeps on that kind of device."""
    found: Saved = node.meta.get(f"saved_on_{device}") or node.meta.get("saved") or Saved()
    return found


def _gives_tensors(node: Any) -> bool:
    return isinstance(node, fx.Node) and (isinstance(node.meta.get("val"), (tuple, list)) or node.op == "call_module")


def _substitute(node: fx.Node, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments with tensors replaced by rule Tensors and sizes by expressions."""
    queue = iter(tensors)
    gm = node.graph.owning_module

    def swap(item: Any) -> Any:
        if isinstance(item, fx.Node):
            if facts.tensors(item):
                return next(queue)
            held = facts.value(item)
            return facts.as_number(held, gm) if isinstance(held, (int, float, torch.SymInt, torch.SymFloat)) else held
        if isinstance(item, (tuple, list)):
            return type(item)(swap(i) for i in item) if not isinstance(item, tuple) else tuple(swap(i) for i in item)
        return item

    args = tuple(swap(a) for a in node.args)
    return args, {k: swap(v) for k, v in node.kwargs.items()}


def _has_batch(size: int | sympy.Expr) -> bool:
    return not isinstance(size, int) and facts.symbol("b") in size.free_symbols
