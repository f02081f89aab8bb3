"""Rows that are split into one piece per expert, each with its own matmul, as one grouped operator on all rows.

    pieces = rows.split(torch.bincount(chosen).tolist())
    torch.cat([F.linear(piece, weight[i]) for i, piece in enumerate(pieces)])

The length of a piece depends on data, so operators on pieces can be neither priced nor split; `ops.grouped_matmul` of
all rows can.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops
from passes.expert_layer import together
from passes.tables import BINARY, CONTRACTIONS, UNARY

aten = torch.ops.aten

COLUMNS = (aten.chunk.default, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default)
"""Operators that take columns of rows, along the last dim."""


def pieces(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional operators, contractions without bias.
    does: finds rows that are split into one section per class, as long as the class occurs often, pass equal operators
           section by section, and are concatenated again.
    gives: these operators once, on all rows; other splits stay as they are."""
    first: fx.Node | None = None
    for node in edit.calls(gm, aten.cat.default):
        found = _Pieces(node)
        if edit.args_of(node)["dim"] != 0 or not found.are(node.args[0]):
            continue
        with edit.before(node):
            new = found.whole(node.args[0])
        first = first or new
        edit.replace(node, new)
    if first is not None:
        _sized_anew(first)
    return edit.finish(gm)


def _sized_anew(first: fx.Node) -> None:
    """Compute the sizes of all values that depend on `first` anew: they are no sums of section lengths any more."""
    behind = False
    for node in first.graph.nodes:
        behind = behind or node is first
        if behind and node.op == "call_function":
            node.meta["val"] = edit.infer(node)


class _Pieces:
    """The sections of one split, in its order, and equal operators on them."""

    def __init__(self, joined: fx.Node) -> None:
        self.like = joined
        self.split: fx.Node | None = None
        self.counts: fx.Node | None = None
        self._whole: dict[tuple[fx.Node, ...], fx.Node] = {}

    def are(self, nodes: Any) -> bool:
        """Whether `nodes` are the sections of one split, or equal operators on such, in its order."""
        if len(nodes) < 2 or not all(
            isinstance(node, fx.Node) and node.op == "call_function" and node.target is nodes[0].target
            for node in nodes
        ):
            return False
        target, args = nodes[0].target, [node.args for node in nodes]
        if any(node.kwargs != nodes[0].kwargs or len(node.args) != len(args[0]) for node in nodes):
            return False
        if target is operator.getitem and [*args] == [(args[0][0], number) for number in range(len(nodes))]:
            return self._cuts(args[0][0], len(nodes))
        if target in CONTRACTIONS:
            return self.are([each[0] for each in args]) and all(
                facts.rank(each[1]) == 2 and not self._of_split(each[1]) for each in args
            )
        if target is operator.getitem or target in COLUMNS:
            return (
                self.are([each[0] for each in args])
                and all(each[1:] == args[0][1:] for each in args)
                and (target is operator.getitem or self._along_last(nodes[0]))
            )
        if (target not in UNARY and target not in BINARY) or target is aten.dropout.default:
            return False
        return all(self._operand([each[place] for each in args]) for place in range(len(args[0])))

    def _operand(self, operands: Sequence[Any]) -> bool:
        """Whether the operands of a pointwise operator, one per section, are sections, biases of the experts, or one
        and the same value."""
        if all(operand == operands[0] for operand in operands):
            return (
                not isinstance(operands[0], fx.Node) or not facts.is_tensor(operands[0]) or facts.rank(operands[0]) < 2
            )
        return self._biases(operands) or self.are(operands)

    def _biases(self, operands: Sequence[Any]) -> bool:
        """Whether all operands are vectors: biases of the experts, one for each section."""
        return all(
            isinstance(operand, fx.Node) and facts.is_tensor(operand) and facts.rank(operand) == 1
            for operand in operands
        )

    def _along_last(self, node: fx.Node) -> bool:
        """Whether `node` works along the last dim."""
        return edit.args_of(node)["dim"] in (-1, facts.rank(node.args[0]) - 1)

    def _cuts(self, split: fx.Node, count: int) -> bool:
        """Whether `split` cuts rows into `count` sections, section i with as many rows as i occurs among some
        numbers."""
        if self.split is not None:
            return split is self.split
        if (
            split.target is not aten.split_with_sizes.default
            or edit.args_of(split)["dim"] != 0
            or facts.rank(split.args[0]) != 2
        ):
            return False
        found = [_count(size) for size in edit.args_of(split)["split_sizes"]]
        if None in found or len({each[0] for each in found}) != 1 or [each[1] for each in found] != [*range(count)]:  # type: ignore[index]
            return False
        counts = found[0][0]  # type: ignore[index]
        if facts.shape(counts) != (count,):
            return False
        self.split, self.counts = split, counts
        return True

    def _of_split(self, node: fx.Node) -> bool:
        """Whether a size of `node` is not a number, which only the length of a section can be here."""
        return any(not isinstance(size, int) for size in facts.shape(node))

    def whole(self, nodes: Any) -> fx.Node:
        """The value on all rows of which `nodes` (sections, as in `are`) are the parts, at the insertion point."""
        key = tuple(nodes)
        if key not in self._whole:
            self._whole[key] = self._made(nodes)
        return self._whole[key]

    def _made(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """`whole` for the results of equal operators on all sections."""
        some = nodes[0]
        assert self.split is not None and self.counts is not None
        if some.target is operator.getitem and some.args[0] is self.split:
            return self.split.args[0]  # type: ignore[return-value]
        if some.target in CONTRACTIONS:
            rows, weights = (
                self.whole([node.args[0] for node in nodes]),
                together([node.args[1] for node in nodes], 1, some),  # type: ignore[misc]
            )
            if some.target is aten.linear.default:
                weights = edit.call(some, aten.transpose.int, weights, 1, 2)
            return edit.call(some, ops.grouped_matmul, rows, weights, self._ends)
        return edit.call(
            some,
            some.target,
            *(self._all([node.args[place] for node in nodes], some) for place in range(len(some.args))),
            **some.kwargs,
        )

    @cached_property
    def _ends(self) -> fx.Node:
        """The number of rows up to the end of each section."""
        return edit.call(self.like, aten.cumsum.default, self.counts, 0)

    def _all(self, operands: Sequence[Any], like: fx.Node) -> Any:
        """The operand, on all rows, of an operator whose operands on sections are `operands`."""
        if all(operand == operands[0] for operand in operands):
            return operands[0]
        if not self._biases(operands):
            return self.whole(operands)
        rows = edit.size(self.split.args[0], 0)  # type: ignore[union-attr, arg-type]
        return edit.call(
            like,
            aten.repeat_interleave.self_Tensor,
            together(list(operands), 1, like),
            self.counts,
            0,
            output_size=rows,
        )


def _count(size: Any) -> tuple[fx.Node, int] | None:
    """The tensor of counts of which `size` is an element, and the number of that element; None for other sizes."""
    item = edit.call_of(size, aten.item.default, aten._local_scalar_dense.default)
    one = edit.call_of(item and item.args[0], aten.select.int, operator.getitem)
    if one is None:
        return None
    if one.target is aten.select.int:
        return (one.args[0], one.args[2]) if one.args[1] == 0 else None  # type: ignore[return-value]
    parts = edit.call_of(one.args[0], aten.unbind.int)
    return None if parts is None else (parts.args[0], one.args[1])  # type: ignore[return-value]
