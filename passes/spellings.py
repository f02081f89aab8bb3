"""One spelling for ops that ATen spells in many ways, so that later passes and rules need one row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops
from passes.aliases import ALIASES

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


def _by_its_name(node: fx.Node) -> fx.Node:
    """The same call by the name that the tables of this project have (`passes.aliases`)."""
    new = node.graph.call_function(ALIASES[node.target], node.args, node.kwargs)
    new.meta.update(node.meta)
    return new


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


def _as_another(node: fx.Node) -> fx.Node:
    """A reshape to the sizes of another tensor (view_as)."""
    operand, other = node.args
    assert isinstance(operand, fx.Node) and isinstance(other, fx.Node)
    return _as(aten.reshape.default, node, (operand, reshape_sizes(operand, node, lambda dim: edit.size(other, dim))))


def _unflattened(node: fx.Node) -> fx.Node:
    """One dim split into several."""
    given = edit.args_of(node)
    operand, first = given["self"], given["dim"] % facts.rank(given["self"])
    return _as(
        aten.reshape.default, node, (operand, reshape_sizes(operand, node, lambda dim: given["sizes"][dim - first]))
    )


def reshape_sizes(
    operand: fx.Node, node: fx.Node, given: Callable[[int], int | fx.Node] | None = None
) -> list[int | fx.Node]:
    """The sizes of `node` as arguments of a reshape of `operand`. A symbolic size is taken from an equal dim of
    `operand`; of the others one may be -1, and further ones are what `given` returns for the dim.

    Raises ValueError where two symbolic sizes of the result are no sizes of the operand, and none are given."""
    before, after = facts.shape(operand), facts.shape(node)
    sizes: list[int | fx.Node] = []
    for dim, wanted in enumerate(after):
        if isinstance(wanted, int):
            sizes.append(wanted)
        elif wanted in before:
            sizes.append(edit.size(operand, before.index(wanted)))
        elif -1 not in sizes:
            sizes.append(-1)
        elif given is not None:
            sizes.append(given(dim))
        else:
            raise ValueError(f"cannot spell {node.name} ({facts.where(node)}) as a reshape from {before} to {after}")
    return sizes


def _expanded(node: fx.Node) -> fx.Node:
    """expand_as as an expansion to sizes: the other operand's values are not needed, and it gets no gradient."""
    operand, other = node.args
    assert isinstance(operand, fx.Node) and isinstance(other, fx.Node)
    before = facts.shape(operand)
    sizes = [n if isinstance(n, int) else edit.size(other, dim) for dim, n in enumerate(facts.shape(node))]
    kept = len(sizes) - len(before)
    return _as(
        aten.expand.default,
        node,
        (
            operand,
            [-1 if dim >= kept and before[dim - kept] == facts.shape(node)[dim] else n for dim, n in enumerate(sizes)],
        ),
    )


def _with_dims(rank: int) -> Callable[[fx.Node], fx.Node]:
    """atleast_1d, atleast_2d, atleast_3d: dims of size 1 are added; a matrix has the first two of three dims, a vector
    the second."""

    def spell(node: fx.Node) -> fx.Node:
        return _operand(node) if facts.rank(_operand(node)) >= rank else _reshape(node)

    return spell


def _of_all(target: Callable[..., Any]) -> Callable[[fx.Node], fx.Node]:
    """A statistic of all elements, with the correction of its count (std and var without dims)."""

    def spell(node: fx.Node) -> fx.Node:
        given = edit.args_of(node)
        return edit.call(node, target, given["self"], None, correction=int(given["unbiased"]))

    return spell


def _turned(node: fx.Node) -> fx.Node:
    """`x.T`: all dims in reverse order."""
    return _as(aten.permute.default, node, (node.args[0], list(reversed(range(facts.rank(node))))))


def _turned_last(node: fx.Node) -> fx.Node:
    """`x.mT`: the last two dims exchanged."""
    return _as(aten.transpose.int, node, (node.args[0], -2, -1))


def _operand(node: fx.Node) -> fx.Node:
    (operand,) = edit.tensor_operands(node)
    return operand


def _adjoint(node: fx.Node) -> fx.Node:
    """`x.mH`: the last two dims exchanged, and complex numbers conjugated."""
    turned = edit.call(node, aten.transpose.int, node.args[0], -2, -1)
    return edit.call(node, aten.conj_physical.default, turned) if facts.dtype(node).is_complex else turned


def _crossed(node: fx.Node) -> fx.Node:
    """torch.cross along the named dim; else along the first dim of size 3, which is named so that it stays the same on
    shards."""
    given = edit.args_of(node)
    dim = facts.shape(node).index(3) if given["dim"] is None else given["dim"]
    return edit.call(node, aten.linalg_cross.default, given["self"], given["other"], dim=dim)


def _flipped(dim: int) -> Callable[[fx.Node], fx.Node]:
    return lambda node: _as(aten.flip.default, node, (node.args[0], [dim]))


def _inner(node: fx.Node) -> fx.Node | None:
    """vdot of real numbers as `dot`, without conjugation."""
    return None if facts.dtype(node).is_complex else _as(aten.dot.default, node, node.args)


def _side_by_side(node: fx.Node) -> fx.Node:
    """hstack, vstack, dstack as `cat`, after dims of size 1 are added to operands that have too few, as the rank of the
    result says."""
    rank, pieces = facts.rank(node), node.args[0]
    assert isinstance(pieces, (list, tuple))
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]  # an operator
    dim = {"dstack": 2, "hstack": min(1, rank - 1), "column_stack": 1}.get(name, 0)
    wide = []
    for piece in pieces:
        while (own := facts.rank(piece)) < rank:
            in_front = name in ("hstack", "vstack", "row_stack") or own == 0 or (name == "dstack" and own == 1)
            piece = edit.call(node, aten.unsqueeze.default, piece, 0 if in_front else own)
        wide.append(piece)
    return _as(aten.cat.default, node, (wide, dim))


def _tiled(node: fx.Node) -> fx.Node:
    """As `repeat`, with a count of one for dims that have none."""
    operand, counts = node.args
    assert isinstance(operand, fx.Node) and isinstance(counts, (list, tuple))
    repeated = _as(aten.repeat.default, node, (operand, [1] * (facts.rank(operand) - len(counts)) + list(counts)))
    return _repeat(repeated) or repeated


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


def _repeated(node: fx.Node) -> fx.Node:
    """repeat_interleave by a number: a new dim behind the repeated one, expanded and merged with it; without a dim, on
    the flattened tensor."""
    given = edit.args_of(node)
    operand, dim = given["self"], given["dim"]
    assert isinstance(operand, fx.Node)
    if dim is None:
        operand, dim = edit.call(node, aten.reshape.default, operand, [-1]), 0
    rank = facts.rank(operand)
    dim %= rank
    wide = edit.call(node, aten.unsqueeze.default, operand, dim + 1)
    wide = edit.call(node, aten.expand.default, wide, [-1] * (dim + 1) + [given["repeats"]] + [-1] * (rank - dim - 1))
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
    **dict.fromkeys(ALIASES, _by_its_name),
    aten.__and__.Tensor: _same_args(aten.bitwise_and.Tensor, 2),
    aten.__or__.Tensor: _same_args(aten.bitwise_or.Tensor, 2),
    aten._softmax.default: _same_args(aten.softmax.int, 2),
    aten._to_copy.default: _cast,
    aten._unsafe_view.default: _same_args(aten.reshape.default, 2),
    aten.adaptive_avg_pool2d.default: _all_dims_mean,
    aten.adjoint.default: _adjoint,
    aten.atleast_1d.default: _with_dims(1),
    aten.atleast_2d.default: _with_dims(2),
    aten.atleast_3d.default: _with_dims(3),
    aten.broadcast_to.default: _same_args(aten.expand.default, 2),
    aten.embedding.default: _dense,
    aten.expand_as.default: _expanded,
    aten.cat.default: _without_empty,
    aten.concat.default: _same_args(aten.cat.default, 2),
    aten.concatenate.default: _same_args(aten.cat.default, 2),
    **dict.fromkeys(
        (
            aten.column_stack.default,
            aten.dstack.default,
            aten.hstack.default,
            aten.row_stack.default,
            aten.vstack.default,
        ),
        _side_by_side,
    ),
    aten.cross.default: _crossed,
    aten.empty.memory_format: _made(aten.zeros.default, 1, 0),
    aten.fill.Scalar: _full,
    aten.flatten.using_ints: _reshape,
    aten.fliplr.default: _flipped(1),
    aten.flipud.default: _flipped(0),
    aten.ger.default: _same_args(aten.outer.default, 2),
    aten.linalg_matmul.default: _same_args(aten.matmul.default, 2),
    aten.mH.default: _adjoint,
    aten.mT.default: _turned_last,
    aten.matrix_H.default: _adjoint,
    aten.new_empty.default: _made(aten.zeros.default, 1),
    aten.new_full.default: _made(aten.full.default, 2),
    aten.new_ones.default: _made(aten.ones.default, 1),
    aten.new_zeros.default: _made(aten.zeros.default, 1),
    aten.numpy_T.default: _turned,
    aten.pad.default: _padded,
    aten.positive.default: _operand,
    aten.ravel.default: _reshape,
    aten.repeat.default: _repeat,
    aten.repeat_interleave.self_int: _repeated,
    aten.std_mean.default: _of_all(aten.std_mean.correction),
    aten.squeeze.default: _squeezed,
    aten.squeeze.dim: _squeezed,
    aten.squeeze.dims: _squeezed,
    aten.swapaxes.default: _same_args(aten.transpose.int, 3),
    aten.swapdims.default: _same_args(aten.transpose.int, 3),
    aten.tile.default: _tiled,
    aten.to.device: _cast,
    aten.to.dtype: _cast,
    aten.to.dtype_layout: _cast,
    aten.to.other: _cast,
    aten.type_as.default: _cast,
    aten.unflatten.int: _unflattened,
    aten.var_mean.default: _of_all(aten.var_mean.correction),
    aten.vdot.default: _inner,
    aten.view.default: _same_args(aten.reshape.default, 2),
    aten.view_as_complex.default: _same_args(ops.as_complex, 1),
    aten.view_as.default: _as_another,
    aten.reshape_as.default: _as_another,
    torch.ops.autopar.picked_places.default: _same_args(ops.picked_places, 2),
}
"""Operators -> a function that writes a call in the one spelling; None: the call stays."""
