"""The captured graph as plain data: what the problem builder and the recipes see of it.

A *scope* is the top-level graph (`""`) or the body of a run of repeated blocks (its module name). Every node of a scope
becomes an `Op`; values are referred to as `(op name, output index)`. Runs are opened: the `call_module` node itself has no
Op, its body's placeholders become `port` Ops, and `Run` says how the values go round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from autopar.layout import BUCKET_BYTES
from autopar.rules.arguments import bias_of, given
from autopar.rules.language import Call, Tensor
from autopar.rules.rule import Rule

ADD, ATTENTION, CAST = torch.ops.aten.add.Tensor, torch.ops.aten.scaled_dot_product_attention.default, torch.ops.aten.to.dtype
TURNS = (torch.ops.aten.transpose.int, torch.ops.aten.permute.default, torch.ops.aten.t.default, CAST)
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
    rows_bytes: tuple[float, float] = (0.0, 0.0)  # of `bytes` and `backward_bytes`, what kernels move that do not read and write straight through
    bias_bytes: float = 0.0  # of the backward of a product, that the gradient of its bias reads: a kernel of its own
    fused_bias_bytes: float = 0.0
    leads: bool = True  # whether it is a kernel of its own then
    weight: tuple[bool, ...] = ()  # per operand: does it come from parameters alone
    batch: tuple[frozenset[int], ...] = ()  # per tensor (operands, then outputs): dims that hold the batch
    saves: tuple[int, ...] = ()  # tensors (operands, then outputs) that autograd keeps for the backward
    copies: tuple[int, ...] = ()  # operands of which it keeps a copy of its own
    extra_bytes: float = 0.0  # what it keeps beside tensors of the graph: masks, statistics, indices
    late: bool = False  # its results get a gradient in all blocks of a run but the first, whose input has none
    first_saves: tuple[int, ...] = ()  # `saves` in the first block of a run
    first_grads: tuple[bool, ...] = ()  # per operand: whether it has a gradient there
    out_dtypes: tuple[torch.dtype, ...] = ()
    dtype: str = ""  # what it computes in: that of its first floating operand, else of its result
    where: str = ""
    head: bool = False  # its result goes straight into a loss over classes
    rules: Mapping[Any, Rule] | None = None  # the user's own, by operator

    @property
    def target(self) -> Any:
        return self.call.target

    @property
    def graded(self) -> bool:
        """Whether any of its results gets a gradient."""
        return any(t.grad for t in self.call.outs)

    @property
    def first_ins(self) -> tuple[Tensor, ...]:
        """The operands in the first block of a run, where some of them may have no gradients."""
        return tuple(replace(tensor, grad=grad) for tensor, grad in zip(self.call.ins, self.first_grads, strict=True))

    @property
    def free(self) -> bool:
        """Whether it computes and moves nothing: a view, a value that rests."""
        return not (self.flops > 0 or self.bytes > 0 or self.backward_flops > 0 or self.backward_bytes > 0)

    @property
    def of_weights(self) -> bool:
        """Whether it only changes weights (a cast, a transpose): it follows the parameters."""
        return self.role == "op" and bool(self.weight) and all(self.weight)

    @property
    def first_share(self) -> float:
        """The share of its backward that it does in the first block of a run: of operands that get gradients, those that get one there."""
        bias = bias_of(self.call)
        graded = [first for tensor, first in zip(self.call.ins, self.first_grads, strict=True) if tensor.grad and tensor is not bias]
        return 0.0 if self.late else sum(graded) / len(graded) if graded else 1.0

    @property
    def weights_share(self) -> float:
        """The share of its backward that is for weights: of operands that get gradients, those that are made of parameters alone; the bias of a product takes next to nothing."""
        bias = bias_of(self.call)
        graded = [weight for weight, tensor in self._graded if tensor is not bias]
        return sum(graded) / len(graded) if graded else float(self.weighs)

    @property
    def weighs(self) -> bool:
        """Whether a part of its backward is for weights, and it is not made of them alone."""
        return any(weight for weight, _ in self._graded) and not self.of_weights

    @property
    def _graded(self) -> list[tuple[bool, Tensor]]:
        """Its operands that get gradients, and whether each is made of parameters alone."""
        return [(weight, tensor) for weight, tensor in zip(self.weight, self.call.ins, strict=True) if tensor.grad] if self.role == "op" else []

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers; attention does where it drops weights."""
        tagged = torch.Tag.nondeterministic_seeded in getattr(self.target, "tags", ())
        return tagged and not (self.target is ATTENTION and given(self.call)["dropout_p"] == 0.0)

    def needs_again(self, operand: int, *, first: bool = False) -> bool:
        """Whether the backward (of the `first` block) needs that operand in such a way that a gathered weight is dropped and gathered
        again: a vector is kept, because it is smaller than what starting one more collective costs."""
        return operand in (self.first_saves if first else self.saves) and len(self.call.ins[operand].shape) > 1

    @property
    def read_back(self) -> tuple[int, ...]:
        """The tensors that its backward reads, themselves or copies of them, as numbers in `tensors`."""
        return (*self.saves, *self.copies)

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
    whole: str = ""  # of a part of a run (passes.part_runs): that run, and the instance in it with which this part begins
    begins: int = 0


@dataclass(eq=False)
class Program:
    """All Ops in execution order (bodies inside the place where they are called) and the runs."""

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

    @cached_property
    def order(self) -> dict[str, int]:
        """Where each operator stands."""
        return {name: place for place, name in enumerate(self.ops)}

    @cached_property
    def first_read(self) -> str:
        """The first operator that reads a weight; empty where there is none."""
        return next((op.name for op in self.ops.values() if op.role == "op" and op.name not in self.following and any(map(self.is_weight, op.operands))), "")

    @cached_property
    def fed(self) -> dict[Ref, list[str]]:
        """Value -> the ports of runs of blocks that it is fed to."""
        found: dict[Ref, list[str]] = {}
        for run in self.runs.values():
            for port, feed in zip(run.ports, run.feeds, strict=True):
                found.setdefault(feed, []).append(port)
        return found

    @cached_property
    def buffers(self) -> dict[str, str]:
        """The buffers of the model itself, not of blocks: name in the model -> the operator that holds it."""
        return {op.fqn: op.name for op in self.ops.values() if op.role == "buffer" and not op.scope}

    @cached_property
    def following(self) -> dict[str, str]:
        """Operators that only turn or cast one parameter, which nobody else reads: name -> the parameter. They are done on the
        shard, so that what is gathered, and gathered again, is their result."""
        readers = self.readers
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
    def waiting(self) -> frozenset[str]:
        """Operators with a weight whose result has a gradient of its own, and not that of another one with a weight, as a bias behind a product, and what is added to a
        value that more is added to (one gradient goes back along them, and what comes in between is added to it in place)."""
        return frozenset(op.name for op in self.ops.values() if op.weighs and not self._shares(op))

    def _shares(self, op: Op) -> bool:
        """Whether the result of an operator with a weight has the gradient of another one with a weight."""
        return any(self._alone(ref, op) for ref in op.operands) if op.target is ADD else self._added_to(op)

    def _alone(self, ref: Ref, reader: Op) -> bool:
        """Whether an operator with a weight makes a value of the size of what its one reader makes."""
        maker = self.ops[ref[0]]
        return maker.weighs and len(self.readers[ref]) == 1 and maker.call.outs[ref[1]].sizes == reader.call.outs[0].sizes

    def _added_to(self, op: Op) -> bool:
        """Whether what an operator makes is only added to a value, which more is added to."""
        reader, *others = [reader for reader, _ in self.readers.get((op.name, 0), ())] or [op]
        return not others and reader.target is ADD and not reader.weighs and any(later.target is ADD for later, _ in self.readers.get((reader.name, 0), ()))

    @cached_property
    def trained(self) -> frozenset[str]:
        """The blocks, and the operators outside of blocks, that read a parameter which gets a gradient."""
        return frozenset(reader.scope or reader.name for op in self._trained for reader, _ in self.readers.get((op.name, 0), ()))

    @property
    def _trained(self) -> list[Op]:
        return [op for op in self.ops.values() if op.role == "param" and op.call.outs[0].grad]

    @cached_property
    def bucket_bytes(self) -> float:
        """Bytes that travel together where many parameters take the same step: a bucket, or all that are trained."""
        return min(BUCKET_BYTES, sum(self.bytes_of((op.name, 0)) * op.count for op in self._trained))

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

    def turn(self, ref: Ref) -> tuple[Op, ...]:
        """The operators that make a weight of its parameter, in order: none, or turns and casts."""
        op = self.ops[ref[0]]
        return (*self.turn(op.operands[0]), op) if op.name in self.following else ()

    def source(self, ref: Ref) -> str:
        """The parameter that a weight is, or is made of."""
        return self.following.get(ref[0], ref[0])

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
