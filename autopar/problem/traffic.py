"""Bytes that the kernels of each Op read and write, forward and backward: with one kernel per operator, and with chains
of pointwise operators fused.

Forward: each operand is read once and each result written once (passes annotate `Op.bytes`).
Backward: the gradients of results and the saved tensors are read, the gradients of operands are written. An addition
hands its gradient on without a copy. Where several operators read a value, their gradients are added up: two reads and
a write for each reader after the first. The gradients of the pieces of a split are concatenated, that of a slice is put
into zeros, unless fused kernels write them in place. Gradients of what was joined or summed up are views, of which the
latter have nothing to read. The bias of a matmul is added in the kernel of the matmul, its gradient is a sum by another
kernel. Some derivatives are several kernels, with tensors between them (problem.derivatives), unless fused.

Fused: a pointwise operator whose only reader is another one, a norm, a softmax or a concatenation runs in the kernel of
that reader, and the tensor between them stays in registers. The backward recomputes it from the inputs of the kernel
(as inductor and hand-written kernels do), so it is not written for the backward either. Readers that are not pointwise
end a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from autopar.problem.derivatives import (
    BY_OPERAND,
    HANDED_ON,
    PLACED,
    SPREAD,
    between_bytes,
    forward_bytes,
    tensor_bytes,
)
from autopar.problem.operand_copies import copied_bytes
from autopar.rules.arguments import bias_of
from autopar.rules.language import Tensor
from passes import ops
from passes.operand_order import ORDERED
from passes.tables import BINARY, UNARY

if TYPE_CHECKING:
    from autopar.problem.graph import Op, Program, Ref

aten = torch.ops.aten

POINTWISE = frozenset((*UNARY, *BINARY, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self))
"""Operators that fuse with a reader which is one of them or of ENDS."""
ENDS = frozenset(
    (aten.cat.default, aten.softmax.int, aten.log_softmax.int, aten.layer_norm.default, aten.rms_norm.default)
)
"""Operators that end a fused kernel: pointwise operators fuse into them, they into none."""
NORMS = frozenset((aten.layer_norm.default, aten.rms_norm.default))
LOSSES = (ops.cross_entropy_sum, ops.cross_entropy_each)
SOFTMAXES = frozenset((aten.softmax.int, aten.log_softmax.int))
DRAWN_BYTES = 4
"""Drawing the mask of a dropout takes as long as moving so many bytes per element; on CPUs, which draw in a time of
their own (cost.compute.drawing_s), it is written."""
PIECES = frozenset((aten.split_with_sizes.default, aten.unbind.int))
"""Views whose gradient is no view: the gradients of their results are concatenated in new memory."""
PARTS = frozenset((aten.slice.Tensor, aten.select.int, aten.diagonal.default, aten.unfold.default))
"""Views whose gradient is zeros of the operand's size, into which that of the result is copied."""
PUT_TOGETHER = PIECES | PARTS | {aten.expand.default}
"""Views whose gradient is a tensor of its own."""
SUMS = frozenset((aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar))
"""Operators that hand the gradient of their result on to operands of the same sizes."""


def annotate(program: Program) -> None:
    """Set `backward_bytes`, `rows_bytes`, `bias_bytes`, `leads` and the fused bytes of every Op of `program`, and
    correct its `bytes` where its kernels move more."""
    readers = program.readers
    for op in program.ops.values():
        if op.role == "op" and _has_kernel(op):
            op.backward_bytes = _backward_bytes(op)
            op.rows_bytes = (op.bytes, op.backward_bytes) if by_rows(op) else (0.0, 0.0)
            bias = bias_of(op.call)
            op.bias_bytes = op.fused_bias_bytes = (
                tensor_bytes(op.call.outs[0]) + tensor_bytes(bias) if bias is not None and bias.grad else 0.0
            )
        elif op.target in PUT_TOGETHER and op.graded and op.call.ins[0].grad:
            op.backward_bytes = _put_together_bytes(op)
    for ref, found in readers.items():
        _add_gradient_sums(program, ref, [op for op, operand in found if op.call.ins[operand].grad and op.role == "op"])
    for op in program.ops.values():
        op.fused_bytes, op.fused_backward_bytes, op.leads = (
            op.bytes,
            op.backward_bytes if op.target not in PUT_TOGETHER else 0.0,
            _has_kernel(op),
        )
        op.bytes += forward_bytes(op) + _permuted_bytes(op)
        op.backward_bytes += between_bytes(op, _backward_bytes(op), _operand_bytes(program, op))
        joined = _joined_bytes(op)
        op.bytes, op.backward_bytes = op.bytes + joined[0], op.backward_bytes + joined[1] * op.graded
        # log-probabilities are written, and a gradient of theirs that is nearly all zeros is made, and read
        if op.target in LOSSES:
            op.bytes += tensor_bytes(op.call.ins[0])
            op.rows_bytes = op.bytes, 0.0
            op.backward_bytes += 2 * tensor_bytes(op.call.ins[0]) if op.backward_bytes else 0.0
        # plain operators one by one, in float32 at least (layer_norm.cpp, rms_norm_composite)
        if op.target is aten.rms_norm.default and program.device == "cpu":
            op.bytes, op.backward_bytes = _plain_norm_bytes(op)
        # the operand is cast by a kernel of its own, and its gradient
        if casts_first(op, program.device):
            wide = 2 * tensor_bytes(op.call.outs[0])
            op.bytes, op.backward_bytes = op.bytes + wide, op.backward_bytes + wide * op.graded
        if op.target is aten.dropout.default:
            _add_mask(op, program.device)
    for op, reader in _read_once(program, readers):
        _read_spread(op, reader)
        if op.bias_bytes and reader.target in POINTWISE - SUMS:
            op.fused_bias_bytes = 0.0  # summed up where the gradient is made
    for producer, reader, tensor in _fused_pairs(program, readers):
        _fuse(producer, reader, tensor)


def _has_kernel(op: Op) -> bool:
    """Whether the Op runs a kernel: not a view."""
    return op.bytes > 0 or op.flops > 0


def by_rows(op: Op) -> bool:
    """Whether the kernels of an Op, not fused, reduce over rows, so that they do not reach full bandwidth: norms,
    softmaxes, and pointwise operators that broadcast an operand, whose gradient is a sum over the broadcast dims."""
    if op.target in NORMS or op.target in SOFTMAXES:
        return True
    whole = op.call.outs[0].sizes if op.call.outs else ()
    return op.target in POINTWISE and any(t.sizes != whole and math.prod(t.sizes) > 1 for t in op.call.ins)


def _backward_bytes(op: Op) -> float:
    """Bytes that the kernels of the backward of one Op move, without sums over several readers and without the gradient
    of a bias."""
    bias = bias_of(op.call)
    grads = [t for t in op.call.ins if t.grad and t is not bias]
    if not op.graded or not grads or op.target in HANDED_ON:
        return 0.0
    out = sum(tensor_bytes(t) for t in op.call.outs if t.grad)
    if op.target in SUMS:  # the gradient of an operand of the same sizes is that of the result
        summed = [t for t in grads if t.sizes != op.call.outs[0].sizes]
        return sum(out + tensor_bytes(t) for t in summed)
    if op.target in PLACED:  # added to where they came from, in zeros of the operand's size
        places = sum(tensor_bytes(t) for t in (op.tensors[i] for i in op.read_back) if not t.floating)
        return 3 * out + places + sum(map(tensor_bytes, grads))
    kept = sum(tensor_bytes(op.tensors[i]) for i in op.read_back) + op.extra_bytes
    # the gradients of weight and bias are a kernel of their own, which reads both again
    if op.target in NORMS and len(grads) > 1:
        kept += out + tensor_bytes(op.call.ins[0])
    passes = len(grads) if op.flops > 0 and len(op.read_back) > 1 and op.target not in POINTWISE | ENDS else 1
    return passes * out + kept + sum(tensor_bytes(t) for t in grads)


def _operand_bytes(program: Program, op: Op) -> list[float]:
    """Bytes that each operand has in memory: what is expanded is read again and again."""
    if op.role != "op":
        return []
    makers = [program.ops[name] for name, _ in op.operands]
    return [
        tensor_bytes(maker.call.ins[0] if maker.target is aten.expand.default else tensor)
        for maker, tensor in zip(makers, op.call.ins, strict=True)
    ]


def _put_together_bytes(op: Op) -> float:
    """Bytes that the backward of a view moves whose gradient is a tensor of its own."""
    (whole, *_), outs = map(tensor_bytes, op.call.ins), sum(map(tensor_bytes, op.call.outs))
    if op.target in PIECES:
        return 2 * whole
    if op.target in PARTS:
        return whole + 2 * outs
    return outs + whole if outs > whole else 0.0  # a sum over what was expanded


def _permuted_bytes(op: Op) -> float:
    """Bytes that are moved to copy operands which do not lie in memory as one batched product reads them. Where copies
    of the same operand are as many as broadcast batch dims, the product reads all of them."""
    return sum(2.0 * copied_bytes(op, index) for index in op.copies) if op.target in ORDERED else 0.0


def _joined_bytes(op: Op) -> tuple[float, float]:
    """Bytes, forward and backward, that are moved to join the products of groups of rows, and the gradients of their
    rows and weights."""
    if op.target is ops.grouped_matmul:
        return 2 * tensor_bytes(op.call.outs[0]), 2 * sum(tensor_bytes(t) for t in op.call.ins if t.grad)
    if op.target is not ops.experts:
        return 0.0, 0.0
    chosen, (up, down) = math.prod(op.call.ins[1].sizes), op.call.ins[ops.UP : ops.UP + 2]
    made, read = (chosen * (up.sizes[d] + down.sizes[d]) * up.itemsize for d in (2, 1))
    return 2 * made, 2 * (read + sum(tensor_bytes(t) for t in (up, down) if t.grad))


def _plain_norm_bytes(op: Op) -> tuple[float, float]:
    """Bytes, forward and backward, of an RMSNorm that runs as plain operators at least in float32: squares, their mean
    and two products, and what these are made of back; for narrower numbers casts of operand and result."""
    rows, *weights = op.call.ins
    wide = max(4.0, rows.itemsize) * math.prod(rows.sizes)
    casts = 2 * (wide + tensor_bytes(rows)) if rows.itemsize < 4 else 0.0
    through, own = 2 * bool(weights), 4 * any(weight.grad for weight in weights)
    back = ((17 + through) * rows.grad + own) * wide + casts
    return (5 + through) * wide + casts, back if op.backward_bytes else 0.0


def casts_first(op: Op, device: str) -> bool:
    """Whether a softmax in a wider dtype than its operand's casts that first: kernels of GPUs read float16 as it is."""
    return (
        op.target in SOFTMAXES
        and op.call.ins[0].itemsize < op.call.outs[0].itemsize
        and (device == "cpu" or op.dtype != "float16")
    )


def _add_mask(op: Op, device: str) -> None:
    """Charge a dropout what it moves beside operand and result: the mask is made by a kernel of its own, and read. CPUs
    scale in three operators, forward and backward: they cast the mask, multiply and scale
    (runtime.algorithms.dropout)."""
    out = op.call.outs[0]
    op.bytes += ((1 if device == "cpu" else DRAWN_BYTES) + 1) * math.prod(out.sizes)
    if device == "cpu":
        op.bytes += 4 * tensor_bytes(out)
        op.backward_bytes += 4 * tensor_bytes(out) * op.graded


def _add_gradient_sums(program: Program, ref: Ref, readers: list[Op]) -> None:
    """Charge the sums of the gradients of a value that several operators read to the first of them, whose backward is
    last; of one that all blocks of a run read also the sum with the gradient of the blocks behind."""
    blocks = program.read_by_all.get(ref[0], 1)
    if readers and program.ops[ref[0]].role in ("op", "port") and len(readers) * blocks > 1:
        passes = 3 * (len(readers) - 1 / blocks) - sum(reader.target in SPREAD for reader in readers)
        readers[0].backward_bytes += passes * tensor_bytes(program.ops[ref[0]].call.outs[ref[1]])


def _read_spread(op: Op, reader: Op) -> None:
    """Take off what the backward of `op` would read of a gradient that is the same number many times, because its only
    `reader` sums up."""
    if reader.target in SPREAD and op.target in POINTWISE and op.graded and not by_rows(op):
        own = op.target in BY_OPERAND and len(op.call.ins) > 1
        out, reads = tensor_bytes(op.call.outs[0]), sum(t.grad for t in op.call.ins) if own else 1
        op.backward_bytes = max(0.0, op.backward_bytes - reads * out)
        op.fused_backward_bytes = max(0.0, op.fused_backward_bytes - out)


def _fused_pairs(program: Program, readers: dict[Ref, list[tuple[Op, int]]]) -> Iterator[tuple[Op, Op, Tensor]]:
    """Pairs of operators that run in one kernel, producer first, with the tensor between them."""
    for op, reader in _read_once(program, readers):
        if op.target in POINTWISE and reader.target in POINTWISE | ENDS:
            yield op, reader, op.call.outs[0]


def _read_once(program: Program, readers: dict[Ref, list[tuple[Op, int]]]) -> Iterator[tuple[Op, Op]]:
    """Operators whose result a single operator reads, in the same scope, each with that reader."""
    for op in program.ops.values():
        ref = (op.name, 0)
        if op.role == "op" and ref not in program.given_on and len(readers.get(ref, ())) == 1:
            reader = readers[ref][0][0]
            if reader.role == "op" and reader.scope == op.scope:
                yield op, reader


def _fuse(producer: Op, reader: Op, between: Tensor) -> None:
    """Run `producer` in the kernel of `reader`: the tensor `between` them is neither written nor read, nor is its
    gradient, but where the reader hands it on."""
    size = tensor_bytes(between)
    producer.leads = False
    producer.fused_bytes = max(0.0, producer.fused_bytes - size)
    reader.fused_bytes = max(0.0, reader.fused_bytes - size)
    if between.grad:
        through = reader.target in SUMS
        producer.fused_backward_bytes = max(0.0, producer.fused_backward_bytes - (0.0 if through else size))
        reader.fused_backward_bytes = max(0.0, reader.fused_backward_bytes - (0.0 if through else size))
