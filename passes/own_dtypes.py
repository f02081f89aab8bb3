"""Buffers in their own dtypes, in a graph that was captured with all floating tensors of the model in one narrower
dtype (mixed precision).

Export has traced the model with buffers in the dtype of activations, so that operand dtypes agree. Afterwards, values
computed from buffers alone (tables of angles) are computed in the buffers' own dtypes, and updates of buffers
(counters, averages) in that of the buffer. Casts are inserted where such values are combined with activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from passes import edit, facts

aten = torch.ops.aten

PRODUCTS = frozenset(
    getattr(aten, name).default
    for name in (
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "addbmm",
        "einsum",
        "bilinear",
        "scaled_dot_product_attention",
        "conv1d",
        "conv2d",
        "conv3d",
        "convolution",
        "_convolution",
    )
) | {aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input}
"""Products with activations are computed in the activations' dtype, as mixed precision intends, even where the result
changes a buffer."""

TAKES_NUMBERS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor})
"""Operators in which a tensor without dims does not promote the dtype of one with dims."""


def own_dtypes(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops, every cast spelled `to`, no asserts.
    does: gives the buffers in `gm.meta["own_dtypes"]` (fqn -> dtype) that dtype, and computes in it what depends on
           them alone; inserts casts where such values are combined with activations.
    gives: activations in the dtypes that they had, and new values of buffers in the dtypes of the buffers."""
    wanted: Mapping[str, torch.dtype] = gm.meta.get("own_dtypes", {})
    own = {
        node: wanted[node.meta["fqn"]]
        for node in gm.graph.find_nodes(op="placeholder")
        if node.meta.get("role") == "buffer" and node.meta["fqn"] in wanted
    }
    own = {
        node: dtype
        for node, dtype in own.items()
        if dtype.is_floating_point and dtype.itemsize > 1 and dtype != facts.dtype(node)
    }
    if own:
        _Own(gm, own).run()
    return edit.finish(gm)


class _Own:
    """One run of the pass. `active` are the nodes that depend on parameters or floating inputs; `ways` the nodes
    between a buffer and its new value, with the dtype in which they are computed; `wide` the nodes whose dtype is
    another than captured, because they are computed from buffers."""

    def __init__(self, gm: fx.GraphModule, own: dict[fx.Node, torch.dtype]) -> None:
        self.gm, self.own = gm, own
        self.narrow = facts.dtype(next(iter(own)))
        self.active = _active(gm)
        self.ways = _ways(gm, own, self.active)
        self.wide: set[fx.Node] = set(own)
        self.casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def run(self) -> None:
        """Set dtypes in the order of the graph, from the buffers on."""
        for node, dtype in self.own.items():
            value = node.meta["val"]
            node.meta["val"] = value.new_empty_strided(value.shape, value.stride(), dtype=dtype)
        for node in edit.calls(self.gm):
            held = _floats(node)
            if node in self.ways:
                self._retype(node, self.ways[node], everything=True)
            elif not self.wide.isdisjoint(held):
                leading = [_dtype(operand) for operand in held if operand in self.active and operand not in self.wide]
                if leading:
                    self._meet(node, _promoted(leading))
                else:
                    self._retype(node, _promoted(_dtype(operand) for operand in held if operand in self.wide))
        self._hold()

    def _retype(self, node: fx.Node, dtype: torch.dtype, *, everything: bool = False) -> None:
        """Compute `node` in `dtype`: operands that were captured in a narrower dtype are taken in `dtype`.
        `everything`: also where `node` itself is a cast to another dtype."""
        for operand in dict.fromkeys(_floats(node)):
            if (
                facts.is_tensor(operand)
                and _dtype(operand) != dtype
                and _promoted((_dtype(operand), dtype)) == dtype
                and (everything or _dtype(operand) == self.narrow)
            ):
                node.replace_input_with(operand, self._lifted(operand, dtype, node))
        if everything:
            node.args, node.kwargs = self._in(node.args, dtype), self._in(node.kwargs, dtype)
        node.meta["val"] = edit.infer(node)
        if node.target is aten.to.dtype and facts.dtype(node) == facts.dtype(node.args[0]):  # type: ignore[arg-type]  # a tensor
            edit.replace(node, node.args[0])  # type: ignore[arg-type]  # a tensor
        elif facts.is_float(node):
            self.wide.add(node)

    def _in(self, args: Any, dtype: torch.dtype) -> Any:
        return map_aggregate(args, lambda item: dtype if item is self.narrow else item)

    def _meet(self, node: fx.Node, dtype: torch.dtype) -> None:
        """Cast operands that would promote an activation of `dtype` to a wider dtype back to `dtype`."""
        for operand in dict.fromkeys(_floats(node)):
            number = (
                facts.is_tensor(operand)
                and not facts.shape(operand)
                and node.target in TAKES_NUMBERS
                and facts.shape(node)
            )
            if operand in self.wide and _promoted((_dtype(operand), dtype)) != dtype and not number:
                node.replace_input_with(operand, self._cast(operand, dtype, node))

    def _lifted(self, value: fx.Node, dtype: torch.dtype, user: fx.Node) -> fx.Node:
        """`value` in the wider `dtype`, for `user`: the value before it was cast to a narrower dtype, or computed in
        `dtype` from the beginning where it depends on no activations and no random numbers; else a cast."""
        if _dtype(value) == dtype:
            return value
        if value.target is aten.to.dtype and facts.dtype(value) == self.narrow:
            source: fx.Node = value.args[0]  # type: ignore[assignment]  # a tensor
            if facts.is_float(source) and facts.dtype(source) != self.narrow:
                return source if facts.dtype(source) == dtype else self._cast(source, dtype, user)
        if value.op != "call_function" or value in self.active or value in self.wide or _draws(value):
            return self._cast(value, dtype, user)
        if (value, dtype) not in self.casts:

            def wider(operand: fx.Node) -> fx.Node:
                return (
                    self._lifted(operand, dtype, value)
                    if facts.is_float(operand) and _dtype(operand) == self.narrow
                    else operand
                )

            args, kwargs = map_arg((self._in(value.args, dtype), self._in(value.kwargs, dtype)), wider)
            with edit.after(value):
                again = edit.call(value, value.target, *args, **kwargs)
            self.casts[value, dtype] = again
        return self.casts[value, dtype] if _dtype(self.casts[value, dtype]) == dtype else self._cast(value, dtype, user)

    def _cast(self, value: fx.Node, dtype: torch.dtype, user: fx.Node) -> fx.Node:
        """`value` cast to `dtype`, once and where it is computed; parameters and buffers are cast where they are read,
        so that each block has its own cast."""
        made = value.op == "call_function"
        if not made or (value, dtype) not in self.casts:
            with edit.after(value) if made else edit.before(user):
                self.casts[value, dtype] = edit.call(value if made else user, aten.to.dtype, value, dtype)
        return self.casts[value, dtype]

    def _hold(self) -> None:
        """Cast the new value of each buffer to the buffer's dtype."""
        held = {
            node.meta["fqn"]: node
            for node in self.gm.graph.find_nodes(op="placeholder")
            if node.meta.get("role") == "buffer"
        }
        last = edit.output_node(self.gm)
        values = list(last.args[0])  # type: ignore[arg-type]  # what a graph returns
        for index, about in enumerate(self.gm.meta["outputs"]):
            if about["kind"] == "mutation" and (dtype := facts.dtype(held[about["target"]])) != facts.dtype(
                values[index]
            ):
                values[index] = (
                    self._lifted if _promoted((facts.dtype(values[index]), dtype)) == dtype else self._cast
                )(values[index], dtype, last)
        last.args = (tuple(values),)


def _active(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes that depend on parameters or floating inputs through floating values."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            chosen = node.meta.get("role") in ("param", "input") and facts.is_float(node)
        else:
            chosen = node.op == "call_function" and facts.is_float(node) and not found.isdisjoint(_floats(node))
        if chosen:
            found.add(node)
    return found


def _ways(gm: fx.GraphModule, own: Mapping[fx.Node, torch.dtype], active: set[fx.Node]) -> dict[fx.Node, torch.dtype]:
    """The nodes between one of the buffers in `own` and its new value, each with the dtype to compute it in (the wider
    one of the buffer's own and captured dtypes). Not among them: activations (values that depend on inputs and are
    larger than the buffer), products of these, and what depends on such nodes."""
    place = {node: number for number, node in enumerate(gm.graph.nodes)}
    named = {node.meta["fqn"]: node for node in own}
    fed = _fed(gm)
    found: dict[fx.Node, torch.dtype] = {}

    def passes(node: fx.Node, most: facts.Size) -> bool:
        small = node not in fed or all(isinstance(size, int) and size <= most for size in _sizes(node))
        return (
            small
            and node.op == "call_function"
            and facts.is_float(node)
            and not (node.target in PRODUCTS and node in active)
        )

    def way(buffer: fx.Node, value: fx.Node) -> set[fx.Node]:
        most = facts.numel(buffer)
        behind = _reached(
            buffer, lambda node: (user for user in node.users if place[user] <= place[value] and passes(user, most))
        )
        return behind & _reached(value, lambda node: (operand for operand in _floats(node) if operand in behind)) - {
            buffer
        }

    for value, fqns in edit.mutated(gm).items():
        for buffer in (named[fqn] for fqn in fqns if fqn in named):
            dtype = _promoted((own[buffer], facts.dtype(buffer)))
            found |= {node: _promoted((dtype, found.get(node, dtype))) for node in way(buffer, value)}
    return found


def _fed(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes that depend on inputs."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.meta.get("role") == "input" or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _sizes(node: fx.Node) -> Iterator[facts.Size]:
    """The number of elements of each tensor that `node` gives."""
    return (
        prod(facts.as_size(size, node.graph.owning_module) for size in tensor.shape) for tensor in facts.tensors(node)
    )


def _reached(start: fx.Node, steps: Callable[[fx.Node], Iterator[fx.Node]]) -> set[fx.Node]:
    """All nodes that can be reached from `start` by `steps`, `start` included."""
    found, todo = {start}, [start]
    while todo:
        fresh = set(steps(todo.pop())) - found
        found |= fresh
        todo += fresh
    return found


def _floats(node: fx.Node) -> list[fx.Node]:
    """The floating operands of a node."""
    return [operand for operand in edit.tensor_operands(node) if facts.is_float(operand)]


def _dtype(node: fx.Node) -> torch.dtype:
    """The dtype of the first floating or complex tensor that `node` gives."""
    return next(
        tensor.dtype for tensor in facts.tensors(node) if tensor.dtype.is_floating_point or tensor.dtype.is_complex
    )


def _promoted(dtypes: Any) -> torch.dtype:
    """The dtype that all of `dtypes` promote to."""
    return reduce(torch.promote_types, dtypes)


def _draws(node: fx.Node) -> bool:
    """Whether `node` draws random numbers, so that a second call would give other values."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
