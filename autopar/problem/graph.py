"""The captured graph as plain data: what the problem builder and the recipes see of it.

A *scope* is the top-level graph (`""`) or the body of a run of repeated blocks (its module name). Every node of a scope
becomes an `Op`; values are referred to as `(op name, output index)`. Of a run, the `call_module` node has no Op: the
placeholders of its body become Ops of role `port`, and a `Run` says which values enter the first block and which go
from each block to the next.
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

from autopar.buckets import BUCKET_BYTES
from autopar.layout import Layout, dim_of, is_shard
from autopar.rules.arguments import bias_of, given
from autopar.rules.language import Call, Tensor
from autopar.rules.rule import Rule
from passes import facts

ADD, ATTENTION, CAST = (
    torch.ops.aten.add.Tensor,
    torch.ops.aten.scaled_dot_product_attention.default,
    torch.ops.aten.to.dtype,
)
TURNS = (torch.ops.aten.transpose.int, torch.ops.aten.permute.default, torch.ops.aten.t.default, CAST)
"""Operators that reorder or cast elements: each shard of their result needs one shard of their operand only."""

Ref = tuple[str, int]  # (name of the producing op, index of its output)
HOLDERS = ("param", "buffer", "constant", "input")
"""Roles of values that are in memory for the whole step."""


def op_name(node: fx.Node, scope: str) -> str:
    """The name of the Op of a node of `scope`."""
    return f"{scope}/{node.name}" if scope else node.name


@dataclass(eq=False, slots=True)
class Op:
    """One node: its call as the rules see it, where its operands come from, and what it costs on one device.

    `role` is param, buffer, constant, input, port (a placeholder of the body of a block), op, or for each result of the
    model loss, output or mutation (of a buffer). `operands` has one entry per tensor operand, and tensors are numbered
    operands first, then outputs. `count` is the number of runs per step; FLOPs and bytes are of one run, of whole
    tensors at the planned batch and sequence. Bytes are those that kernels read and write (problem.traffic).
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
    fused_bytes: float = 0.0  # as `bytes` and `backward_bytes`, where chains of pointwise operators run as one kernel
    fused_backward_bytes: float = 0.0
    # the parts of `bytes` and `backward_bytes` that are moved by kernels with a lower bandwidth (traffic.by_rows)
    rows_bytes: tuple[float, float] = (0.0, 0.0)
    bias_bytes: float = 0.0  # of the kernel in the backward of a matmul that sums up the gradient of its bias
    fused_bias_bytes: float = 0.0
    leads: bool = True  # with fused kernels: whether it is the last operator of its kernel, which pays the launch
    weight: tuple[bool, ...] = ()  # per operand: whether it depends on parameters alone
    batch: tuple[frozenset[int], ...] = ()  # per tensor (operands, then outputs): dims that hold the batch
    saves: tuple[int, ...] = ()  # numbers of the tensors that autograd keeps for the backward
    copies: tuple[int, ...] = ()  # numbers of the operands of which it keeps a copy of its own
    extra_bytes: float = 0.0  # of what it keeps beside tensors of the graph: masks, statistics, indices
    late: bool = False  # its results have gradients in all blocks of a run but the first, whose input has none
    first_saves: tuple[int, ...] = ()  # `saves` in the first block of a run
    first_grads: tuple[bool, ...] = ()  # per operand: whether it has a gradient there
    out_dtypes: tuple[torch.dtype, ...] = ()
    dtype: str = ""  # that it computes in: of its first floating operand, else of its result
    where: str = ""  # module path and line of the user, for messages
    head: bool = False  # whether its result is the input of a loss over classes
    rules: Mapping[Any, Rule] | None = None  # the user's own, by operator

    @property
    def target(self) -> Any:
        return self.call.target

    @property
    def graded(self) -> bool:
        """Whether any of its results has a gradient."""
        return any(t.grad for t in self.call.outs)

    @property
    def first_ins(self) -> tuple[Tensor, ...]:
        """The operands in the first block of a run, where some of them may have no gradients."""
        return tuple(replace(tensor, grad=grad) for tensor, grad in zip(self.call.ins, self.first_grads, strict=True))

    @property
    def samples(self) -> int | None:
        """The dim along which an input has the samples, the first that holds the batch; None where it has none."""
        return min(self.batch[0], default=None) if self.role == "input" else None

    @property
    def free(self) -> bool:
        """Whether it computes and moves nothing: a view, or a value at rest."""
        return not (self.flops > 0 or self.bytes > 0 or self.backward_flops > 0 or self.backward_bytes > 0)

    @property
    def of_weights(self) -> bool:
        """Whether it depends on weights alone (a cast, a transpose, a product of weights)."""
        return self.role == "op" and bool(self.weight) and all(self.weight)

    @property
    def first_share(self) -> float:
        """The backward in the first block of a run, as a share of the backward in other blocks: the number of operands
        with a gradient in the first block over that in other blocks. The bias of a matmul does not count."""
        bias = bias_of(self.call)
        graded = [
            first
            for tensor, first in zip(self.call.ins, self.first_grads, strict=True)
            if tensor.grad and tensor is not bias
        ]
        return 0.0 if self.late else sum(graded) / len(graded) if graded else 1.0

    @property
    def weights_share(self) -> float:
        """The share of its backward that computes gradients of weights: the number of operands with a gradient that
        depend on parameters alone, over that of all operands with a gradient. The bias of a matmul does not count,
        because its gradient costs little; where there is nothing else, all of the backward is for it."""
        bias = bias_of(self.call)
        graded = [weight for weight, tensor in self._graded if tensor is not bias]
        return sum(graded) / len(graded) if graded else float(self.weighs)

    @property
    def weighs(self) -> bool:
        """Whether a part of its backward computes gradients of weights, and it does not depend on weights alone."""
        return any(weight for weight, _ in self._graded) and not self.of_weights

    @property
    def _graded(self) -> list[tuple[bool, Tensor]]:
        """Its operands with gradients, and whether each depends on parameters alone."""
        return (
            [(weight, tensor) for weight, tensor in zip(self.weight, self.call.ins, strict=True) if tensor.grad]
            if self.role == "op"
            else []
        )

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers; attention does only with dropout."""
        tagged = torch.Tag.nondeterministic_seeded in getattr(self.target, "tags", ())
        return tagged and not (self.target is ATTENTION and given(self.call)["dropout_p"] == 0.0)

    def drawn(self, layout: Layout) -> Layout:
        """How the random numbers for a result in `layout` are cut. Attention draws one for each score, the same for all
        features of the values, so that ranks which split these draw the same."""
        if self.target is not ATTENTION:
            return layout
        features = len(self.call.outs[0].sizes) - 1
        return tuple("R" if is_shard(entry) and dim_of(entry) == features else entry for entry in layout)

    def needs_again(self, operand: int, *, first: bool = False) -> bool:
        """Whether the backward (with `first`: of the first block of a run) reads operand number `operand`, and the copy
        of a gathered weight would be dropped and gathered again for it. Vectors are kept: they are so small that the
        latency of another collective costs more."""
        return operand in (self.first_saves if first else self.saves) and len(self.call.ins[operand].shape) > 1

    @property
    def read_back(self) -> tuple[int, ...]:
        """Numbers of the tensors that its backward reads, as they are or as copies."""
        return (*self.saves, *self.copies)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Operands, then outputs."""
        return (*self.call.ins, *self.call.outs)


@dataclass(frozen=True, slots=True)
class Run:
    """A run of `count` alike blocks. In the first block port i gets the outer value `feeds[i]`. In the others it gets
    the value `carried[i]` of the body of the block before it, or `feeds[i]` again where i >= len(carried). `mutated`
    are the Ops of new values of the block's buffers."""

    scope: str
    count: int
    ports: tuple[str, ...]
    feeds: tuple[Ref, ...]
    carried: tuple[Ref, ...]
    mutated: tuple[str, ...] = ()
    # of a part of a run (passes.part_runs): the scope of that run, and the number of the instance in it with which this
    # part begins
    whole: str = ""
    begins: int = 0


@dataclass(eq=False)
class Program:
    """All Ops by name in execution order (those of a body where it is called), and the runs of blocks by scope.
    `hints`: the planned size of each symbol; `device`: the kind of device."""

    ops: dict[str, Op] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    device: str = ""

    @cached_property
    def readers(self) -> dict[Ref, list[tuple[Op, int]]]:
        """Value -> the (op, operand index) pairs that read it."""
        found: dict[Ref, list[tuple[Op, int]]] = {}
        for op in self.ops.values():
            for index, ref in enumerate(op.operands):
                found.setdefault(ref, []).append((op, index))
        return found

    def same_as(self, op: Op) -> tuple[object, ...]:
        """What only operators share that do the same in blocks of one run, which may be in parts."""
        run, grads = self.runs.get(op.scope), tuple([tensor.grad for tensor in op.tensors])
        whole = run.whole or op.scope if run is not None else ""
        return whole, op.name.removeprefix(op.scope), op.role, op.call.target, grads

    @cached_property
    def order(self) -> dict[str, int]:
        """The position of each operator in execution order."""
        return {name: place for place, name in enumerate(self.ops)}

    @cached_property
    def first_read(self) -> str:
        """The name of the first operator that reads a weight; empty where there is none."""
        return next(
            (
                op.name
                for op in self.ops.values()
                if op.role == "op" and op.name not in self.following and any(map(self.is_weight, op.operands))
            ),
            "",
        )

    @cached_property
    def fed(self) -> dict[Ref, list[str]]:
        """Value -> the ports of runs of blocks whose `feeds` it is."""
        found: dict[Ref, list[str]] = {}
        for run in self.runs.values():
            for port, feed in zip(run.ports, run.feeds, strict=True):
                found.setdefault(feed, []).append(port)
        return found

    @cached_property
    def read_by_all(self) -> dict[str, int]:
        """The ports that have the same value in all blocks of a run, and the number of blocks."""
        return {port: run.count for run in self.runs.values() for port in run.ports[len(run.carried) :]}

    @cached_property
    def given_on(self) -> dict[Ref, None]:
        """Values that runs of blocks are fed or carry from block to block: they are read other than as operands."""
        return {ref: None for run in self.runs.values() for ref in (*run.feeds, *run.carried)}

    @cached_property
    def buffers(self) -> dict[str, str]:
        """The buffers of the model itself, not of blocks: name in the model -> the operator that holds it."""
        return {op.fqn: op.name for op in self.ops.values() if op.role == "buffer" and not op.scope}

    @cached_property
    def following(self) -> dict[str, str]:
        """Operators that only reorder or cast (TURNS) one parameter that no other operator reads: name -> the
        parameter. They run on the shard, so that their result is gathered, not the parameter."""
        readers = self.readers
        found: dict[str, str] = {}
        for op in self.ops.values():
            if op.role != "op" or op.target not in TURNS or len(op.operands) != 1 or len(op.call.outs) != 1:
                continue
            ref = op.operands[0]
            source = ref[0] if self.ops[ref[0]].role == "param" else found.get(ref[0])
            alone = len(readers[ref]) == 1 and ref not in self.given_on
            if source is not None and alone and self.ops[ref[0]].scope == op.scope:
                found[op.name] = source
        return found

    @cached_property
    def waiting(self) -> frozenset[str]:
        """Operators with a weight whose result has a gradient tensor of its own. The others share one with another
        operator with a weight: a bias behind a matmul, and a matmul whose result is added to a residual stream (the
        gradient of the stream goes back through all additions, other gradients are added to it in place)."""
        return frozenset(op.name for op in self.ops.values() if op.weighs and not self._shares_gradient(op))

    def _shares_gradient(self, op: Op) -> bool:
        """Whether the result of an operator with a weight has the same gradient tensor as that of another one with a
        weight."""
        return any(self._only_read_by(ref, op) for ref in op.operands) if op.target is ADD else self._joins_sum(op)

    def _only_read_by(self, ref: Ref, reader: Op) -> bool:
        """Whether an operator with a weight makes a value that `reader` alone reads, of the same sizes as the result of
        that."""
        maker = self.ops[ref[0]]
        return (
            maker.weighs and len(self.readers[ref]) == 1 and maker.call.outs[ref[1]].sizes == reader.call.outs[0].sizes
        )

    def _joins_sum(self, op: Op) -> bool:
        """Whether the only reader of the result of `op` adds it to another value, and the sum is an operand of a
        further addition."""
        reader, *others = [reader for reader, _ in self.readers.get((op.name, 0), ())] or [op]
        return (
            not others
            and reader.target is ADD
            and not reader.weighs
            and any(later.target is ADD for later, _ in self.readers.get((reader.name, 0), ()))
        )

    @cached_property
    def trained(self) -> frozenset[str]:
        """The scopes of blocks, and the names of operators outside of blocks, that read a parameter with a gradient."""
        return frozenset(
            reader.scope or reader.name for op in self._trained for reader, _ in self.readers.get((op.name, 0), ())
        )

    @property
    def _trained(self) -> list[Op]:
        return [op for op in self.ops.values() if op.role == "param" and op.call.outs[0].grad]

    @cached_property
    def bucket_bytes(self) -> float:
        """Bytes of whole parameters in one bucket where many take the same collective: BUCKET_BYTES, or those of all
        trained parameters if they are fewer."""
        return min(BUCKET_BYTES, sum(self.bytes_of((op.name, 0)) * op.count for op in self._trained))

    def op_of(self, node: fx.Node, scope: str) -> Op | None:
        """The Op of a node of `scope`; None for sizes, items of tuples, runs of blocks and the output."""
        if node.op in ("call_module", "output") or node.target is operator.getitem or not facts.tensors(node):
            return None
        return self.ops[op_name(node, scope)]

    def is_weight(self, ref: Ref) -> bool:
        """Whether a value is a parameter, or one reordered or cast (`following`)."""
        return self.ops[ref[0]].role == "param" or ref[0] in self.following

    def turn(self, ref: Ref) -> tuple[Op, ...]:
        """The operators of `following` between a weight and its parameter, in execution order."""
        op = self.ops[ref[0]]
        return (*self.turn(op.operands[0]), op) if op.name in self.following else ()

    def source(self, ref: Ref) -> str:
        """The name of the parameter that a weight is, or is made of."""
        return self.following.get(ref[0], ref[0])

    def first_runs(self, ref: Ref) -> int:
        """How often per step a value is made in the first block of its run; 0 outside of blocks."""
        op = self.ops[ref[0]]
        return op.count // self.runs[op.scope].count if op.scope else 0

    @cached_property
    def results(self) -> list[Op]:
        """The results of the model: loss, outputs, new values of buffers outside of blocks, in the order of the graph's
        outputs."""
        return [op for op in self.ops.values() if op.role in ("loss", "output", "mutation") and not op.scope]

    def scope_of(self, scope: str) -> str:
        """The run of blocks that `scope` is; empty for what is outside of all of them."""
        return scope if scope in self.runs else ""

    def bytes_of(self, ref: Ref) -> float:
        """Bytes of the whole value, on one device."""
        op = self.ops[ref[0]]
        tensor, dtype = op.call.outs[ref[1]], op.out_dtypes[ref[1]]
        return float(sympy.prod(tensor.sizes)) * dtype.itemsize
