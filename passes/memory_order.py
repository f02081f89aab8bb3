"""Strides of results after a copy was removed. What was computed from the copy is then computed from its operand, whose
strides may be others, and so may be those of the results. Called by passes.drop_noops.

A `reshape` that was a view of the copy may have to copy now: the strides of its value say so.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from passes import edit, facts

Strides = tuple[tuple[int | None, int | None], ...]


def differ(one: fx.Node, other: fx.Node) -> bool:
    """Whether the results of two nodes have different strides, at example sizes."""
    return [_strides(tensor) for tensor in facts.tensors(one)] != [_strides(tensor) for tensor in facts.tensors(other)]


def follow(graph: fx.Graph, changed: Iterable[fx.Node]) -> None:
    """Infer anew the values of the calls `changed`, whose operands have other strides than when the graph was traced,
    and of their readers, as far as strides change. Calls with sizes that depend on values of tensors have no example
    sizes, and stay as they are."""
    todo = dict.fromkeys(changed)
    for node in graph.nodes:
        if node not in todo or node.op != "call_function" or not _has_examples(node):
            continue
        before, made = facts.tensors(node), edit.infer(node)
        after = [
            item for item in (made if isinstance(made, (tuple, list)) else (made,)) if isinstance(item, torch.Tensor)
        ]
        if [_strides(tensor) for tensor in before] != [_strides(tensor) for tensor in after]:
            node.meta["val"] = made
            todo.update(dict.fromkeys(node.users))


def _has_examples(node: fx.Node) -> bool:
    """Whether the values of `node` and of its arguments are known, with numbers for all sizes."""
    nodes = (node, *node.all_input_nodes)
    return all("val" in each.meta for each in nodes) and all(
        _example(size) is not None for each in nodes for tensor in facts.tensors(each) for size in tensor.shape
    )


def _strides(tensor: torch.Tensor) -> Strides:
    """Sizes and strides of the dims with more than one element."""
    pairs = [(_example(size), _example(stride)) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tuple([pair for pair in pairs if pair[0] != 1])


def _example(number: int | torch.SymInt) -> int | None:
    """A size or stride as a number, as it was when the graph was traced; None where it depends on values."""
    return number if isinstance(number, int) else number.node.hint
