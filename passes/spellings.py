"""One spelling for ops that ATen spells in many ways, so that later passes and rules need one row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops

aten = torch.ops.aten


def spellings(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops with values.
    does: every cast becomes `to.dtype`, every change of sizes `reshape`, every fixed-factor call its plain form.
    gives: the same values in fewer kinds of ops (table below)."""
    return edit.rewrite(gm, SPELLINGS)


def _same_args(target: Callable[..., Any], count: int) -> Callable[[fx.Node], fx.Node]:
    """A function that writes a call as one of `target` with the first `count` arguments."""

    def spell(node: fx.Node) -> fx.Node:
        new = node.graph.call_function(target, node.args[:count])
        new.meta.update(node.meta)
        return new

    return spell


def _cast(node: fx.Node) -> fx.Node:
    return _as(aten.to.dtype, node, (node.args[0], facts.dtype(node)))


def _as(target: Callable[..., Any], node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    """A call that gives exactly what `node` gave; its recorded value is taken over."""
    new = node.graph.call_function(target, args)
    new.meta.update(node.meta)
    return new


def _dense(node: fx.Node) -> fx.Node | None:
    """Lookups with dense gradients: sparse ones cannot be summed over ranks, sharded, or used by AdamW."""
    given = edit.args_of(node)
    return (
        _as(
            aten.embedding.default,
            node,
            tuple(given[name] for name in ("weight", "indices", "padding_idx", "scale_grad_by_freq")),
        )
        if given["sparse"]
        else None
    )


def _reshape(node: fx.Node) -> fx.Node:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return _as(aten.reshape.default, node, (operand, reshape_sizes(operand, node)))


def reshape_sizes(operand: fx.Node, node: fx.Node) -> list[int | fx.Node]:
    """The sizes of `node` as arguments of a reshape of `operand`. A symbolic size is taken from an equal dim of
    `operand`; one that no dim has is -1.

    Raises ValueError where two symbolic sizes of the result are no sizes of the operand."""
    before, after = facts.shape(operand), facts.shape(node)
    sizes: list[int | fx.Node] = []
    for wanted in after:
        if isinstance(wanted, int):
            sizes.append(wanted)
        elif wanted in before:
            sizes.append(edit.size(operand, before.index(wanted)))
        elif -1 not in sizes:
            sizes.append(-1)
        else:
            raise ValueError(f"cannot spell {node.name} ({facts.where(node)}) as a reshape from {before} to {after}")
    return sizes


def _inner(node: fx.Node) -> fx.Node | None:
    """vdot of real numbers as `dot`, without conjugation."""
    return None if facts.dtype(node).is_complex else _as(aten.dot.default, node, node.args)


def _diagonal(node: fx.Node) -> fx.Node | None:
    """The main diagonal of a square of all samples (`(z @ z.T).diag()`) as what each row has at its own place, which
    leaves rows apart; other diagonals stay."""
    given = edit.args_of(node)
    square, offset = given["self"], given["diagonal" if node.target is aten.diag.default else "offset"]
    sizes = facts.shape(square)
    if len(sizes) != 2 or isinstance(sizes[0], int) or sizes[0] != sizes[1] or offset != 0:
        return None
    places = edit.call(node, aten.arange.default, edit.size(square, 0))
    column = edit.call(node, aten.unsqueeze.default, places, 1)
    return edit.call(node, aten.squeeze.dim, edit.call(node, aten.gather.default, square, 1, column), 1)


def _full(node: fx.Node) -> fx.Node:
    return edit.call(node, aten.full_like.default, node.args[0], node.args[1])


def _repeat(node: fx.Node) -> fx.Node | None:
    """Copies of a dim of size 1 as an expansion, which each rank makes of its own shard; and copies in a symbolic
    number (one per sample) of any dim."""
    operand, counts = node.args
    assert isinstance(operand, fx.Node) and isinstance(counts, (list, tuple))
    sizes = [1] * (len(counts) - facts.rank(operand)) + list(facts.shape(operand))
    both = [count for size, count in zip(sizes, counts, strict=True) if size != 1 and count != 1]
    if any(isinstance(count, fx.Node) for count in both):
        return _copies(node, operand, counts)
    if both:
        return None
    return _as(
        aten.expand.default,
        node,
        (operand, [count if size == 1 else -1 for size, count in zip(sizes, counts, strict=True)]),
    )


def _copies(node: fx.Node, operand: fx.Node, counts: Sequence[Any]) -> fx.Node:
    """`operand` repeated `counts` times along each dim: expanded along a new dim in front of each, and merged with
    it."""
    wide = operand
    for _ in range(len(counts) - facts.rank(operand)):
        wide = edit.call(node, aten.unsqueeze.default, wide, 0)
    sizes: list[int | fx.Node] = []
    for count in counts:
        if count != 1:
            wide = edit.call(node, aten.unsqueeze.default, wide, len(sizes))
            sizes.append(count)
        sizes.append(-1)
    wide = edit.call(node, aten.expand.default, wide, sizes)
    return _as(aten.reshape.default, node, (wide, reshape_sizes(wide, node)))


def _made(target: Callable[..., Any], count: int, first: int = 1) -> Callable[[fx.Node], fx.Node]:
    """A tensor made from sizes alone, without the operand, which gave only dtype and sizes but would make it depend on
    values. Uninitialised tensors are filled with zeros."""

    def spell(node: fx.Node) -> fx.Node:
        return edit.call(node, target, *node.args[first : first + count], dtype=facts.dtype(node))

    return spell


def _without_empty(node: fx.Node) -> fx.Node | None:
    """`cat` without empty vectors, which torch accepts among tensors of any rank (initial caches)."""
    given = edit.args_of(node)
    kept = [piece for piece in given["tensors"] if facts.shape(piece) != (0,)]
    if not kept or len(kept) == len(given["tensors"]) or any(facts.dtype(piece) != facts.dtype(node) for piece in kept):
        return None
    return kept[0] if len(kept) == 1 else edit.call(node, aten.cat.default, kept, given["dim"])


def _all_dims_mean(node: fx.Node) -> fx.Node | None:
    """A pool to 1x1 is the mean over height and width."""
    if list(node.args[1]) != [1, 1]:  # type: ignore[arg-type]
        return None
    return _as(aten.mean.dim, node, (node.args[0], [-2, -1], True))


PADS = {"reflect": "reflection_pad", "replicate": "replication_pad"}
"""Padding mode -> the operator that does it."""


def _padded(node: fx.Node) -> fx.Node | None:
    """Padding by its mode's own operator: padding with zeros and circular padding keep nothing for the backward,
    reflection and replication keep their operand."""
    given = edit.args_of(node)
    name = PADS.get(given["mode"])
    return (
        _as(getattr(aten, f"{name}{len(given['pad']) // 2}d").default, node, (given["self"], given["pad"]))
        if name
        else None
    )


def _squeezed(node: fx.Node) -> fx.Node | None:
    """`squeeze` with the removed dims named, so that a rank whose shard has one sample does not lose the dim of
    samples."""
    given = edit.args_of(node)
    operand = given["self"]
    assert isinstance(operand, fx.Node)
    sizes = facts.shape(operand)
    asked = given.get("dim", list(range(len(sizes))))
    dims = [dim % len(sizes) for dim in (asked if isinstance(asked, (list, tuple)) else [asked])] if sizes else []
    gone = [dim for dim in dims if sizes[dim] == 1]
    if gone == dims and "dim" in given:
        return None
    return _as(aten.squeeze.dims, node, (operand, gone)) if gone else operand


SPELLINGS: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    aten.__lshift__.Scalar: _same_args(aten.bitwise_left_shift.Tensor_Scalar, 2),
    aten.__lshift__.Tensor: _same_args(aten.bitwise_left_shift.Tensor, 2),
    aten.__rshift__.Scalar: _same_args(aten.bitwise_right_shift.Tensor_Scalar, 2),
    aten.__rshift__.Tensor: _same_args(aten.bitwise_right_shift.Tensor, 2),
    aten._log_softmax.default: _same_args(aten.log_softmax.int, 2),
    aten._softmax.default: _same_args(aten.softmax.int, 2),
    aten._to_copy.default: _cast,
    aten._unsafe_view.default: _same_args(aten.reshape.default, 2),
    aten.adaptive_avg_pool2d.default: _all_dims_mean,
    aten.cat.default: _without_empty,
    aten.diag.default: _diagonal,
    aten.diagonal.default: _diagonal,
    aten.embedding.default: _dense,
    aten.empty.memory_format: _made(aten.zeros.default, 1, 0),
    aten.fill.Scalar: _full,
    aten.flatten.using_ints: _reshape,
    aten.new_empty.default: _made(aten.zeros.default, 1),
    aten.new_full.default: _made(aten.full.default, 2),
    aten.new_ones.default: _made(aten.ones.default, 1),
    aten.new_zeros.default: _made(aten.zeros.default, 1),
    aten.pad.default: _padded,
    aten.ravel.default: _reshape,
    aten.repeat.default: _repeat,
    aten.squeeze.default: _squeezed,
    aten.squeeze.dim: _squeezed,
    aten.squeeze.dims: _squeezed,
    aten.to.device: _cast,
    aten.to.dtype: _cast,
    aten.to.dtype_layout: _cast,
    aten.to.other: _cast,
    aten.type_as.default: _cast,
    aten.vdot.default: _inner,
    aten.view.default: _same_args(aten.reshape.default, 2),
    aten.view_as_complex.default: _same_args(ops.as_complex, 1),
    torch.ops.autopar.picked_places.default: _same_args(ops.picked_places, 2),
}
"""Operators -> a function that writes a call in the one spelling; None: the call stays."""
