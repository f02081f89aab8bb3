"""Tensors of an operator, and copies of operands, that autograd keeps: their sizes and layouts.

A batched product of operands whose batch dims differ expands both to the broadcast batch dims and makes one tensor of
each (at::matmul: expand, reshape, bmm). Such a copy is larger than the operand that it is made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from autopar.layout import Entry, Layout, dim_of, is_shard, sections_of, shard
from autopar.problem.graph import Op
from autopar.rules.language import Option

aten = torch.ops.aten

BATCHED = (aten.matmul.default, aten.scaled_dot_product_attention.default)
"""Products of matrices in the last two dims of their operands, over all dims before them."""
MATRIX = 2  # dims of a matrix


def copy_of(op: Op, index: int, options: Sequence[Option]) -> tuple[int, Layout]:
    """Bytes of the copy that `op` keeps of operand `index`, and its layout, with one of `options` per mesh axis."""
    operand, batch = op.call.ins[index], _batch_of(op, index)
    own = tuple(option.ins[index].value for option in options)
    if batch is None:
        return copied_bytes(op, index), own
    made = tuple(option.outs[0].value for option in options)
    layout = tuple(_entry(result, given, batch, len(operand.sizes)) for result, given in zip(made, own, strict=True))
    return copied_bytes(op, index), layout


def copied_bytes(op: Op, index: int) -> int:
    """Bytes of the copy that `op` makes of operand `index`."""
    operand, batch = op.call.ins[index], _batch_of(op, index)
    return math.prod(operand.sizes if batch is None else (*batch, *operand.sizes[-MATRIX:])) * operand.itemsize


def _batch_of(op: Op, index: int) -> tuple[int, ...] | None:
    """The batch dims of the copy of operand `index`, None where they are the operand's own."""
    # scores are the product of queries and keys, the result is that of scores and values
    factors = [each.sizes for each in op.call.ins[: max(2, index + 1)]]
    if op.target not in BATCHED or min(map(len, factors)) <= MATRIX:
        return None
    batches = (reversed(sizes[:-MATRIX]) for sizes in factors)
    return tuple(max(each) for each in itertools.zip_longest(*batches, fillvalue=1))[::-1]


def tensor_of(op: Op, index: int, options: Sequence[Option]) -> tuple[int, Layout]:
    """Bytes of tensor number `index` of `op` (operands, then results), and its layout."""
    tensor = op.tensors[index]
    return math.prod(tensor.sizes) * tensor.itemsize, tuple(
        (*option.ins, *option.outs)[index].value for option in options
    )


def _entry(result: Entry, given: Entry, batch: Sequence[int], rank: int) -> Entry:
    """The layout of a copy on one axis: in batch dims as the result, in dims of the matrix as the operand, which has
    `rank` dims."""
    if is_shard(result) and dim_of(result) < len(batch) and batch[dim_of(result)] > 1:
        return result
    if is_shard(given) and dim_of(given) >= rank - MATRIX:
        return shard(dim_of(given) + len(batch) + MATRIX - rank, sections_of(given))
    return "R"
