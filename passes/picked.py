"""Recognises rows that are selected by the values of an index tensor: `token, rank = torch.where(chosen == 3)` in all
its spellings.

    chosen == 3,  one_hot(chosen, e).permute(2, 1, 0)[3],  (chosen.unsqueeze(-1) == arange(e)).unbind(-1)[3],  (chosen
    == 3).any(-1) torch.where(mask),  mask.nonzero(as_tuple=True),  mask.nonzero()[:, 0],  the mask as an index
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes.expert_layer import uncast

aten = torch.ops.aten

TOKEN, RANK, NUMBER = "token", "rank", "number"
"""Kinds of dims of a mask: tokens, merged; the choice of a token; the number that is compared with."""


@dataclass(frozen=True)
class Mask:
    """A mask that is true where the experts that tokens chose equal a number.

    chosen      the chosen experts, `[..., k]`, or `[...]` where each token chooses one
    number      the expert that is compared with; None where all experts are a dim of the mask
    dims        the kind of each dim of the mask (TOKEN, RANK, NUMBER); unmerged dims of tokens by their position
    over        whether the mask is over tokens any of whose k choices is the number
    """

    chosen: fx.Node
    number: int | None
    dims: tuple[str | int, ...]
    over: bool = False

    @property
    def ranked(self) -> bool:
        """Whether each token chooses k numbers, rather than one."""
        return self.over or RANK in self.dims

    @property
    def ordered(self) -> bool:
        """Whether its dims are those of `chosen`, in the same order."""
        natural = _natural(self.chosen)
        return self.dims == natural if not self.over else self.dims in (natural[:-1], (TOKEN,))


def picked(index: Any) -> tuple[Mask, str] | None:
    """For an index that gives one coordinate of the true elements of a Mask: the Mask, and the kind of dim (TOKEN or
    RANK) that it is a coordinate of. None for any other index."""
    found = places(index)
    mask = mask_of(found[0]) if found is not None else None
    if found is None or mask is None or mask.number is None or not {TOKEN} <= {*mask.dims} <= {TOKEN, RANK}:
        return None
    return mask, str(mask.dims[found[1]])


def tokens(indices: Sequence[Any]) -> tuple[Mask, int] | None:
    """The Mask whose tokens the first of `indices` names in their order, and how many dims of tokens it indexes; None
    where it names anything else."""
    if (found := picked(indices[0])) is not None:
        return (found[0], 1) if found[1] == TOKEN else None
    mask = mask_of(indices[0])
    if mask is None or mask.number is None or not mask.ordered or facts.dtype(indices[0]) != torch.bool:
        return None
    return replace(mask, dims=(TOKEN,)), len(mask.dims)


def taken(node: Any) -> tuple[fx.Node, list[Any]] | None:
    """The tensor that `node` indexes along its first dims, and the indices; None for other nodes."""
    if (rows := edit.call_of(node, aten.index_select.default)) is not None and rows.args[1] == 0:
        return rows.args[0], [rows.args[2]]  # type: ignore[return-value]
    rows = edit.call_of(node, aten.index.Tensor)
    return None if rows is None else (rows.args[0], list(rows.args[1]))  # type: ignore[return-value, arg-type]


def places(index: Any) -> tuple[Any, int] | None:
    """For an index that gives one coordinate of the nonzero elements of a tensor: that tensor, and the number of the
    coordinate. None for any other index."""
    if (part := edit.call_of(index, operator.getitem)) is not None:
        source, dim = part.args
        if edit.call_of(source, aten.where.default, aten.nonzero_numpy.default) is not None:
            return source.args[0], dim  # type: ignore[return-value, union-attr]
        columns = edit.call_of(source, aten.unbind.int)
        places = edit.call_of(
            columns and edit.args_of(columns)["dim"] in (1, -1) and columns.args[0], aten.nonzero.default
        )
        return None if places is None else (places.args[0], dim)  # type: ignore[return-value]
    if (column := edit.call_of(index, aten.select.int)) is not None:
        places = edit.call_of(column.args[1] in (1, -1) and column.args[0], aten.nonzero.default)
        return None if places is None else (places.args[0], column.args[2])  # type: ignore[return-value]
    flat = edit.call_of(index, aten.squeeze.dim, aten.reshape.default)
    places = edit.call_of(flat and facts.rank(flat) == 1 and flat.args[0], aten.nonzero.default)
    return (places.args[0], 0) if places is not None and facts.shape(places)[1] == 1 else None


def mask_of(node: Any) -> Mask | None:
    """The Mask that `node` computes; None for other nodes."""
    node = uncast(node)
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    if (compared := _compared(node)) is not None:
        return compared
    source = node.args[0].args[0] if node.target is operator.getitem else node.args and node.args[0]  # type: ignore[union-attr]
    inner, moved = MOVES.get(node.target), mask_of(source)
    return None if inner is None or moved is None else inner(node, moved)


def _compared(node: fx.Node) -> Mask | None:
    """The mask of a comparison of chosen experts with a number, or with all numbers along a new dim."""
    if node.target is aten.eq.Scalar and isinstance(node.args[1], int):
        return _fresh(node.args[0], node.args[1], ())  # type: ignore[arg-type]
    if node.target is aten.one_hot.default:
        return _fresh(node.args[0], None, (NUMBER,))  # type: ignore[arg-type]
    if node.target is aten.eq.Tensor:
        for one, other in (node.args, node.args[::-1]):
            apart, numbers = edit.call_of(one, aten.unsqueeze.default), edit.call_of(other, aten.arange.default)
            if (
                apart is not None
                and numbers is not None
                and len(numbers.args) == 1
                and apart.args[1] in (-1, facts.rank(apart) - 1)
            ):
                return _fresh(apart.args[0], None, (NUMBER,))  # type: ignore[arg-type]
    return None


def _fresh(chosen: fx.Node, number: int | None, more: tuple[str, ...]) -> Mask:
    """The mask of `chosen == number`, with dims `more` after those of `chosen`."""
    return Mask(chosen, number, (*_natural(chosen), *more))


def _natural(chosen: fx.Node) -> tuple[str | int, ...]:
    """The kinds of the dims of `chosen`: tokens, then the choice."""
    rank = facts.rank(chosen)
    return {1: (TOKEN,), 2: (TOKEN, RANK)}.get(rank, (*range(rank - 1), RANK))


def _permuted(node: fx.Node, mask: Mask) -> Mask:
    """A mask with its dims permuted."""
    return replace(mask, dims=tuple(mask.dims[dim] for dim in node.args[1]))  # type: ignore[union-attr, index]


def _transposed(node: fx.Node, mask: Mask) -> Mask:
    """A mask with two dims exchanged."""
    one, other, dims = int(node.args[1]), int(node.args[2]), list(mask.dims)  # type: ignore[arg-type]
    dims[one], dims[other] = dims[other], dims[one]
    return replace(mask, dims=tuple(dims))


def _selected(node: fx.Node, mask: Mask) -> Mask | None:
    """The mask of one index of a dim."""
    return _of_one_number(mask, int(node.args[1]), int(node.args[2]))  # type: ignore[arg-type]


def _unbound(node: fx.Node, mask: Mask) -> Mask | None:
    """The mask of one item of an unbind."""
    cut = edit.call_of(node.args[0], aten.unbind.int)
    return None if cut is None else _of_one_number(mask, edit.args_of(cut)["dim"], int(node.args[1]))  # type: ignore[arg-type]


def _of_one_number(mask: Mask, dim: int, number: int) -> Mask | None:
    """The mask of one `number`, if `dim` is that of numbers; else None."""
    dim %= len(mask.dims)
    return (
        replace(mask, number=number, dims=mask.dims[:dim] + mask.dims[dim + 1 :])
        if mask.dims[dim] == NUMBER and number >= 0
        else None
    )


def _merged(node: fx.Node, mask: Mask) -> Mask | None:
    """The mask after a reshape that merges tokens into one dim, in their order; or merges all dims, which is the same
    where each token chooses one expert. None for other reshapes."""
    sizes = facts.shape(node)
    if not mask.ordered:
        return None
    if len(sizes) == 1:
        return replace(mask, dims=(TOKEN,))
    return (
        replace(mask, dims=(TOKEN, RANK))
        if not mask.over and len(sizes) == 2 and sizes[1] == facts.shape(mask.chosen)[-1]
        else None
    )


def _any(node: fx.Node, mask: Mask) -> Mask | None:
    """The mask of tokens any of whose choices is the number."""
    given = edit.args_of(node)
    dim = given["dim"] % len(mask.dims)
    return (
        None
        if given["keepdim"] or mask.dims[dim] != RANK
        else replace(mask, dims=mask.dims[:dim] + mask.dims[dim + 1 :], over=True)
    )


MOVES: dict[Any, Any] = {
    aten.permute.default: _permuted,
    aten.transpose.int: _transposed,
    aten.select.int: _selected,
    operator.getitem: _unbound,
    aten.reshape.default: _merged,
    aten.any.dim: _any,
}
"""Operators -> the mask that they make of a mask."""
