"""How results lie in memory once a copy is gone: what was made of it is made of its operand, which may lie otherwise.

A `reshape` that was a view of the copy may have to copy now: its value says so by its strides.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from passes import edit, facts

Lies = tuple[tuple[int | None, int | None], ...]


def differ(one: fx.Node, other: fx.Node) -> bool:
    """Whether the results of two nodes lie in memory in different ways, at example sizes."""
    return [_lies(tensor) for tensor in facts.tensors(one)] != [_lies(tensor) for tensor in facts.tensors(other)]


def follow(graph: fx.Graph, changed: Iterable[fx.Node]) -> None:
    """Give the calls `changed`, whose operands lie otherwise than when the graph was traced, the values that torch
    makes of these; and then what reads them, as far as that changes anything. Calls with sizes that depend on what
    tensors hold have no example, and stay as they are."""
    todo = dict.fromkeys(changed)
    for node in graph.nodes:
        if node not in todo or node.op != "call_function" or not _has_examples(node):
            continue
        before, made = facts.tensors(node), edit.infer(node)
        after = [
            item for item in (made if isinstance(made, (tuple, list)) else (made,)) if isinstance(item, torch.Tensor)
        ]
        if [_lies(tensor) for tensor in before] != [_lies(tensor) for tensor in after]:
            node.meta["val"] = made
            todo.update(dict.fromkeys(node.users))


def _has_examples(node: fx.Node) -> bool:
    """Whether the values of `node` and of its arguments are known, with numbers for all sizes."""
    nodes = (node, *node.all_input_nodes)
    return all("val" in each.meta for each in nodes) and all(
        _example(size) is not None for each in nodes for tensor in facts.tensors(each) for size in tensor.shape
    )


def _lies(tensor: torch.Tensor) -> Lies:
    """Sizes and strides of the dims with more than one element."""
    pairs = [(_example(size), _example(stride)) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tuple([pair for pair in pairs if pair[0] != 1])


def _example(number: int | torch.SymInt) -> int | None:
    return number if isinstance(number, int) else number.node.hint
