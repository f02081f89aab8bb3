"""Bytes that every call reads, writes, and keeps for the backward, as formulas in the symbols of the sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops, recurrent
from passes.facts import Size
from passes.grads import needs_grad
from passes.kernel_extras import beside
from passes.operand_order import copied
from passes.padded import added_bytes
from passes.saved import Saved, saved_positions
from passes.tables import VIEWS

aten = torch.ops.aten

GATHERS = (aten.embedding.default, aten.gather.default, aten.index.Tensor, aten.index_select.default)
"""Operators that read as many bytes of their first operand as they write."""

BAGS = (ops.bag, ops.ragged_bags)
"""Operators that read a row of their first operand for each index in the second."""

POOLS = (aten.max_pool2d.default, aten.max_pool3d.default)
"""Operators that write where each maximum is, too."""

COMPUTE_WIDE = (aten.float_power.Scalar, aten.float_power.Tensor_Scalar, aten.float_power.Tensor_Tensor)
"""Operators that compute in float64 or complex128, whatever the dtype of their operands."""


def annotate_memory(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: a normalized graph; folded bodies are annotated too, per instance.
    does: adds up sizes of operands and results, and looks up what autograd keeps.
    gives: `meta["read_bytes"]`, `meta["written_bytes"]` and `meta["saved"]` (a `Saved`) of every call, and
           `meta["saved_on_cpu"]` where kernels of the CPU keep something else."""
    for graph in edit.graphs(gm):
        carries = needs_grad(graph)
        for node in edit.calls(graph):
            node.meta["read_bytes"], node.meta["written_bytes"] = _traffic(node)
            grads = [carries[operand] for operand in edit.tensor_operands(node)]
            keeps = carries[node] and node.target is not operator.getitem
            node.meta["saved"] = saved_by(node, grads) if keeps else Saved()
            on_cpu = ON_CPU[node.target](node, grads) if keeps and node.target in ON_CPU else None
            if on_cpu is not None:
                node.meta["saved_on_cpu"] = on_cpu
    return gm


def saved_by(node: fx.Node, grads: Sequence[bool]) -> Saved:
    """What the backward of a call keeps; `grads` says which of its operands have a gradient."""
    positions = saved_positions(node.target, grads)
    copies, cast = copied(node, positions), _cast(node, positions)
    border = added_bytes(node) if 0 in positions else 0
    copies = (0, *copies) if border else copies
    return Saved(
        tuple(position for position in positions if position not in (*copies, *cast)),
        copies,
        beside(node, grads)
        + sum(facts.dtype(node).itemsize * facts.numel(operand) for operand in cast.values())
        + border,
    )


def _cast(node: fx.Node, positions: tuple[int, ...]) -> dict[int, fx.Node]:
    """The operands at `positions` that are kept as they are cast to the dtype in which the operator computes."""
    if node.target not in COMPUTE_WIDE:
        return {}
    return {
        position: operand
        for position, operand in enumerate(edit.tensor_operands(node))
        if position in positions and facts.dtype(operand) != facts.dtype(node)
    }


def is_view(node: fx.Node) -> bool:
    """Whether the call moves no bytes: getitem, a size, a view, a reshape of contiguous memory."""
    if node.target is operator.getitem or not facts.tensors(node):
        return True
    if node.target is aten.reshape.default:
        return joins_heads(node) or _viewable(
            node, facts.tensors(edit.tensor_operands(node)[0])[0], facts.tensors(node)[0]
        )
    return node.target in VIEWS


def joins_heads(node: fx.Node) -> bool:
    """Whether `node` joins the heads of an attention's result without a copy.

    The fused kernels write their result in the order of the query's memory (`empty_like`), which graphs traced without
    a device do not show: for a query laid out [b, s, h, d] the transposed result is contiguous, for one laid out
    [s, b, h, d] (nn.MultiheadAttention) the permuted one.
    """
    turned = node.args[0] if node.target is aten.reshape.default else None
    if not isinstance(turned, fx.Node) or turned.target not in TURNS:
        return False
    made = turned.args[0]
    if not isinstance(made, fx.Node) or made.target is not aten.scaled_dot_product_attention.default:
        return False
    (query,) = facts.tensors(made.args[0]) if isinstance(made.args[0], fx.Node) else (None,)
    if query is None or query.dim() != 4:
        return False
    strides = [facts.example(node, stride) for stride in query.stride()]
    lies = [strides[dim] for dim in TURNS[turned.target](turned)]
    return strides[1] < strides[2] and lies == sorted(lies, reverse=True)


def _swapped(node: fx.Node) -> list[int]:
    """The dims of the operand of a transpose of four dims, in the order of its result."""
    dims = list(range(4))
    first, second = (int(dim) for dim in node.args[1:3])  # type: ignore[arg-type]
    dims[first], dims[second] = dims[second], dims[first]
    return dims


TURNS: dict[Any, Callable[[fx.Node], list[int]]] = {
    aten.transpose.int: _swapped,
    aten.permute.default: lambda node: [int(dim) for dim in node.args[1]],  # type: ignore[union-attr, arg-type]
}
"""Views of four dims in another order: which dims of their operand theirs are."""


def _viewable(node: fx.Node, before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether the memory of `before` can be read in the sizes of `after`, by a reshape: torch's own rule, at example
    sizes."""
    sizes, strides, wanted = (
        tuple([facts.example(node, size) for size in numbers])
        for numbers in (before.shape, before.stride(), after.shape)
    )
    try:
        torch.empty_strided(sizes, strides, device="meta").view(wanted)
    except RuntimeError:
        return False
    return True


def _traffic(node: fx.Node) -> tuple[Size, Size]:
    """Bytes that the forward of the node reads and writes."""
    if is_view(node):
        return 0, 0
    written = facts.nbytes(node)
    operands = list(dict.fromkeys(edit.tensor_operands(node)))
    read: Size = 0
    for position, operand in enumerate(operands):
        read = read + (
            _looked_up(node, written)
            if position == 0 and node.target in (*GATHERS, *BAGS)
            else facts.nbytes(_in_memory(operand))
        )
    return read, written + (beside(node, ()) if node.target in POOLS else 0)


def _in_memory(node: fx.Node) -> fx.Node:
    """What an expanded value has in memory, which is read again and again."""
    base = node.args[0] if node.target is aten.expand.default else node
    return base if isinstance(base, fx.Node) else node


def _looked_up(node: fx.Node, written: Size) -> Size:
    """Bytes of table rows that are read: as many as are written, or for bags one row per index."""
    table, chosen = edit.tensor_operands(node)[:2]
    return facts.numel(chosen) * facts.shape(table)[1] * facts.dtype(table).itemsize if node.target in BAGS else written


def _is_fused(node: fx.Node, grads: list[bool]) -> bool:
    """Whether the CPU has a fused kernel for an attention (sdp_utils_cpp.cpp, use_flash_attention_cpp): without dropout
    and without a gradient of the mask, for queries, keys and values of four dims, with equal sizes of batch, heads
    (unless groups of queries share them) and head."""
    given = edit.args_of(node)
    query, key, value = (facts.shape(given[name]) for name in ("query", "key", "value"))
    alike = (0, 3) if given["enable_gqa"] else (0, 1, 3)
    return (
        not (any(grads[3:]) or given["dropout_p"])
        and len(query) == len(key) == len(value) == 4
        and all(query[dim] == key[dim] == value[dim] for dim in alike)
    )


def _attention(node: fx.Node, grads: list[bool]) -> Saved | None:
    """What attention keeps on a CPU where the fused kernel refuses (`_is_fused`) and plain products are used
    (_scaled_dot_product_attention_math): scaled queries and keys in the layout of a batched product, values in that
    layout, and the softmax; with dropout also the noise and the softmax after dropout. All at least in float32."""
    given = edit.args_of(node)
    if _is_fused(node, grads):
        return None
    itemsize = facts.dtype(node).itemsize
    wide = max(torch.float32.itemsize, itemsize)
    scores = wide * prod((*facts.shape(node)[:-1], facts.shape(given["key"])[-2]))
    wider = (wide - itemsize) * sum(facts.numel(given[name]) for name in ("query", "key", "value"))
    extra = scores * (3 if given["dropout_p"] else 1) + wider
    # a batched product takes values of three dims as they are
    as_given = facts.rank(given["value"]) == 3 and wide == itemsize
    return Saved((2,), (0, 1), extra) if as_given else Saved((), (0, 1, 2), extra)


def _rms_norm(node: fx.Node, grads: list[bool]) -> Saved:
    """What rms_norm keeps on a CPU, where it is plain operators (layer_norm.cpp, rms_norm_composite) at least in
    float32: for the gradient of the rows the rows (a copy if they are cast) and the reciprocal root of each; for that
    of the weight what the weight is multiplied by."""
    rows, weight = grads[0], any(grads[1:])
    itemsize = facts.dtype(node).itemsize
    wide = max(itemsize, torch.float32.itemsize)
    copies = int(rows and wide > itemsize) + int(weight)
    roots = prod(facts.shape(node)[:-1]) if rows else 0
    return Saved((0,) if rows and wide == itemsize else (), (), wide * (copies * facts.numel(node) + roots))


ON_CPU: dict[Any, Callable[[fx.Node, list[bool]], Saved | None]] = {
    aten.rms_norm.default: _rms_norm,
    aten.scaled_dot_product_attention.default: _attention,
    **dict.fromkeys(recurrent.GATES, recurrent.saved_on_cpu),
}
"""What autograd keeps on a CPU, for operators that have another kernel there, or none; None where it is the same."""
