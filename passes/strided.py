"""Views by strides (`as_strided`) as lookups of elements. Shards of a tensor, and a tensor whose copy was dropped, lie
in memory in another order than the tensor of the user's code, so that the same strides reach other elements."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten


def strided(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops with values, and all copies that the model makes.
    does: `as_strided` of an operand that fills its memory becomes `index_select` of the elements in the order in which
           the operand lies there. Leading dims that stay as they are stay dims, and can be cut.
    gives: no as_strided. Raises ValueError where it reads memory that is not the operand's."""
    return edit.rewrite(gm, {aten.as_strided.default: _lookup, aten.as_strided_copy.default: _lookup})


def _lookup(node: fx.Node) -> fx.Node:
    """`node` as a lookup along the last dim of its operand, [*leading, elements]."""
    given = edit.args_of(node)
    x, sizes, strides = given["self"], list(given["size"]), list(given["stride"])
    order = _order(node, x)
    start = _start(node, x, given["storage_offset"])
    lead = _leading(node, x, order, start)
    kept: list[Any] = [edit.size(x, dim) for dim in order[:lead]]
    inner = edit.product(node, [edit.size(x, dim) for dim in order[lead:]])
    call = partial(edit.call, node)
    lies = x if order == sorted(order) else call(aten.permute.default, x, order)
    index = _index(node, sizes[lead:], strides[lead:], start)
    found = call(aten.index_select.default, call(aten.reshape.default, lies, [*kept, inner]), lead, index)
    return call(aten.reshape.default, found, [*kept, *sizes[lead:]])


def _order(node: fx.Node, x: fx.Node) -> list[int]:
    """The dims of `x` in the order in which they lie in memory, those of size 1 last. Raises ValueError where `x` does
    not fill its memory: a part of a tensor, or one that is expanded."""
    value = facts.value(x)
    strides = [facts.example(x, stride) for stride in value.stride()]
    order = sorted(range(value.dim()), key=lambda dim: (facts.shape(x)[dim] == 1, -strides[dim]))
    step: Any = 1
    for dim in reversed([dim for dim in order if facts.shape(x)[dim] != 1]):
        if not _equal(facts.as_size(value.stride(dim), None), step):
            raise _refused(node, f"{x.name} has elements in memory that are not its own or are there twice")
        step = step * facts.as_size(value.shape[dim], None)
    return order


def _start(node: fx.Node, x: fx.Node, offset: Any) -> int:
    """The number of the first element, counted from the first one of `x`."""
    if offset is None:
        return 0
    first = facts.value(x).storage_offset()
    if not isinstance(offset, int) or not isinstance(first, int) or offset < first:
        raise _refused(node, f"it starts at element {offset} of the memory of {x.name}")
    return offset - first


def _leading(node: fx.Node, x: fx.Node, order: list[int], start: int) -> int:
    """How many leading dims of the memory of `x` are leading dims of the result, while all else reads within one entry
    of them. Raises ValueError where elements behind those of `x` are read."""
    before, after = facts.value(x), facts.value(node)
    lead = 0
    while lead < min(len(order), after.dim()) and all(
        _equal(facts.as_size(get(before, order[lead]), None), facts.as_size(get(after, lead), None))
        for get in (torch.Tensor.size, torch.Tensor.stride)
    ):
        lead += 1
    for count in range(lead, -1, -1):
        rest = range(count, after.dim())
        steps = [(facts.example(node, after.size(dim)) - 1) * facts.example(node, after.stride(dim)) for dim in rest]
        if start + sum(steps) < math.prod(facts.example(x, before.size(dim)) for dim in order[count:]):
            return count
    raise _refused(node, f"it reads elements behind those of {x.name}")


def _index(node: fx.Node, sizes: list[Any], strides: list[Any], start: int) -> fx.Node:
    """The numbers of the elements of a result of `sizes` and `strides`: [product of sizes]."""
    call = partial(edit.call, node)
    total = call(aten.add.Scalar, call(aten.arange.default, 1), start)
    for size, stride in zip(sizes, strides, strict=True):
        numbers = call(aten.mul.Tensor, call(aten.arange.default, size), stride)
        total = call(aten.add.Tensor, call(aten.unsqueeze.default, total, -1), numbers)
    return call(aten.reshape.default, total, [edit.product(node, sizes)])


def _equal(one: Any, other: Any) -> bool:
    return bool(sympy.expand(one - other) == 0)


def _refused(node: fx.Node, why: str) -> ValueError:
    return ValueError(
        f"{facts.where(node)} takes a tensor by strides (as_strided), and {why}; take it of a whole contiguous tensor "
        "(x.contiguous()), or by unfold, slices and expand"
    )
