"""Small tools to change a captured graph and keep `meta["val"]` right.

A new node gets its value by running its op on the fake values of its arguments under their own fake mode, so symbolic
sizes stay symbolic. Example: replace `relu(x)` by `x * (x > 0)`:

    with before(node):
        mask = call(node, aten.gt.Scalar, x, 0)
        replace(node, call(node, aten.mul.Tensor, x, mask))
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from passes import facts
from passes._torch import FakeTensor, FakeTensorMode, OpOverload, enable_python_dispatcher

aten = torch.ops.aten

COPIED_META = ("module", "source", "nn_module_stack", "stack_trace", "no_grad")


def before(node: fx.Node) -> AbstractContextManager[None]:
    """Context in which new nodes are put in front of `node`."""
    return node.graph.inserting_before(node)


def after(node: fx.Node) -> AbstractContextManager[None]:
    """Context in which new nodes are put right behind `node`."""
    return node.graph.inserting_after(node)


def bring_before(node: fx.Node, values: Iterable[fx.Node]) -> None:
    """Move `values`, and what they depend on, in front of `node`, on which none of them may depend."""
    queue, late = list(values), dict[fx.Node, None]()
    while queue:
        value = queue.pop()
        if value not in late and value > node:
            late[value] = None
            queue += value.all_input_nodes
    for value in sorted(late):
        node.prepend(value)


def call(like: fx.Node, target: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> fx.Node:
    """New `call_function` node at the insertion point of the graph of `like`, with its module path and source line.

    Its `meta["val"]` is computed from the values of its arguments. Raises KeyError when an argument has none.
    """
    assert callable(target), f"{like.name} calls no function: {target}"
    node = like.graph.call_function(target, args, kwargs)
    node.meta |= {key: like.meta[key] for key in COPIED_META if key in like.meta}
    node.meta["val"] = infer(node)
    return node


def cast(node: fx.Node, dtype: torch.dtype, *, like: fx.Node) -> fx.Node:
    """The tensor `node` in `dtype`: itself, or a new `to` at the graph's insertion point."""
    return node if facts.dtype(node) == dtype else call(like, aten.to.dtype, node, dtype)


def infer(node: fx.Node) -> Any:
    """Value of `node` (fake tensor, symbolic int, or a sequence of them) from the values of its arguments."""
    args = map_arg(node.args, lambda n: n.meta["val"])
    kwargs = map_arg(node.kwargs, lambda n: n.meta["val"])
    assert callable(node.target), f"only calls have values to infer, got {node.op} {node.name}"
    mode = fake_mode(node.graph)
    if mode is None:
        return node.target(*args, **kwargs)
    if _makes(node):  # factories carry no device in a captured graph; their value must lie where all other values lie
        kwargs = {**kwargs, "device": device(node.graph)}
    with torch.no_grad(), mode, enable_python_dispatcher():
        return node.target(*args, **kwargs)


def _makes(node: fx.Node) -> bool:
    """Whether `node` makes a tensor of sizes and numbers alone, on a device that it does not name."""
    schema = getattr(node.target, "_schema", None)
    return (
        schema is not None
        and node.kwargs.get("device") is None
        and not any(map(facts.tensors, node.all_input_nodes))
        and any(argument.name == "device" and argument.kwarg_only for argument in schema.arguments)
    )


def fake_mode(graph: fx.Graph) -> FakeTensorMode | None:
    """Fake mode of the values in the graph, or None when the graph holds no fake tensor."""
    found = _first_fake(graph)
    return None if found is None else found.fake_mode


def device(graph: fx.Graph) -> torch.device:
    """Device of the values in the graph (the meta device for a model captured there), "cpu" when there are none."""
    found = _first_fake(graph)
    return torch.device("cpu") if found is None else found.device


def _first_fake(graph: fx.Graph) -> FakeTensor | None:
    """The first fake tensor among the values of the graph."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, FakeTensor):
                return item
    return None


def replace(node: fx.Node, new: fx.Node) -> None:
    """All users of `node` use `new` instead, and `node` goes away."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def merge(node: fx.Node, kept: fx.Node) -> None:
    """All users of `node` use `kept`, which is the same value. It belongs to the innermost module that holds both: one
    that several blocks read is of none of them, or only the first of alike blocks would compute it."""
    paths = [one.meta.get("module", "").split(".") for one in (node, kept)]
    common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*paths, strict=False))
    kept.meta["module"] = ".".join(name for name, _ in common)
    replace(node, kept)


def args_of(node: fx.Node) -> dict[str, Any]:
    """Arguments of an ATen node by the names in the op's schema, defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]
    values: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            values[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            values[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            values[argument.name] = argument.default_value
    return values


def given_by_name(node: fx.Node, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The way back from `args_of`: arguments by name, in the order of the op's schema, as (args, kwargs) of the op of
    `node`."""
    named = {argument.name for argument in node.target._schema.arguments if argument.kwarg_only}  # type: ignore[union-attr]
    return (
        tuple(value for name, value in values.items() if name not in named),
        {name: value for name, value in values.items() if name in named},
    )


def size(node: fx.Node, dim: int) -> int | fx.Node:
    """Size of tensor dim `dim`: an int, or a new `sym_size` node where it is symbolic (at the insertion point)."""
    value = node.meta["val"].shape[dim]
    if isinstance(value, int):
        return value
    if value.node.is_constant():
        return int(value)
    return call(node, aten.sym_size.int, node, dim % node.meta["val"].dim())


def product(like: fx.Node, sizes: list[int | fx.Node]) -> int | fx.Node:
    """Product of sizes that may be symbolic: one int, or a chain of multiplications (at the insertion point)."""
    static = 1
    result: fx.Node | None = None
    for item in sizes:
        if isinstance(item, int):
            static *= item
        else:
            result = item if result is None else call(like, operator.mul, result, item)
    if result is None:
        return static
    return result if static == 1 else call(like, operator.mul, result, static)


def calls(gm: fx.GraphModule, *targets: Callable[..., Any]) -> Iterator[fx.Node]:
    """The `call_function` nodes of these targets (all when none is named), in order; the graph may change meanwhile."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and (not targets or node.target in targets):
            yield node


def call_of(node: Any, *targets: Any) -> fx.Node | None:
    """`node` where it is a call of one of `targets`, else None."""
    return node if isinstance(node, fx.Node) and node.target in targets else None


def part_of(node: Any, number: int) -> Any:
    """The operand of which `node` is item `number`; None where it is no such item."""
    part = call_of(node, operator.getitem)
    return part.args[0] if part is not None and part.args[1] == number else None


def graphs(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graph itself and those inside it: bodies of folded blocks, and regions."""
    return (module for module in gm.modules() if isinstance(module, fx.GraphModule))


def nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of all `graphs`."""
    return (node for graph in graphs(gm) for node in graph.graph.nodes)


def drop_dead(gm: fx.GraphModule) -> None:
    """Removes calls that nothing uses, and constants of the model's graph. Only right when ops are functional, so not
    before `inplace`."""
    for node in reversed(list(gm.graph.nodes)):
        constant = "constants" in gm.meta and node.meta.get("role") == "constant"
        if (constant or node.op not in ("placeholder", "output")) and not node.users:
            gm.graph.erase_node(node)


def rewrite(gm: fx.GraphModule, table: Mapping[Any, Callable[[fx.Node], fx.Node | None]]) -> fx.GraphModule:
    """Replaces each call of an operator in `table` by the node that its function returns (made in front of the call),
    and returns `gm`, finished. Where the function returns None the call stays."""
    for node in calls(gm):
        if node.target in table:
            with before(node):
                new = table[node.target](node)
            if new is not None:
                replace(node, new)
    return finish(gm)


def finish(gm: fx.GraphModule) -> fx.GraphModule:
    """Drops what nothing uses any more, makes the Python code of the graph anew, and returns `gm`."""
    drop_dead(gm)
    gm.recompile()
    return gm


def mutate_buffer(gm: fx.GraphModule, buffer: fx.Node, value: fx.Node, *, behind: fx.Node) -> None:
    """Make `value` the new value of `buffer` (a placeholder) from `behind` on: later reads see it, and it becomes an
    output.

    `gm.meta["outputs"]` gets `{"name", "kind": "mutation", "target": fqn}`. Of two mutations of one buffer the later
    one stays; if it reads the buffer, it is computed from the earlier one.
    """
    redirect_later(buffer, value, behind=behind)
    fqn = buffer.meta["fqn"]
    outputs: list[dict[str, str]] = gm.meta["outputs"]
    last = output_node(gm)
    values = list(last.args[0])  # type: ignore[arg-type]  # what a graph returns
    for index, entry in enumerate(outputs):
        if entry["kind"] == "mutation" and entry["target"] == fqn:
            values[index] = values[index] if behind < values[index] else value
            break
    else:
        outputs.append({"name": fqn, "kind": "mutation", "target": fqn})
        values.append(value)
    last.args = (tuple(values),)


def buffer_of(gm: fx.GraphModule, value: fx.Node) -> fx.Node:
    """The buffer (a placeholder) that `value` reads: the last of `same_memory`, or the buffer whose new value that
    is."""
    held = same_memory(value)[-1]
    if held.op == "placeholder":
        return held
    (fqn,) = mutated(gm)[held]
    return next(node for node in gm.graph.find_nodes(op="placeholder") if node.meta.get("fqn") == fqn)


def same_memory(value: fx.Node) -> list[fx.Node]:
    """`value` and the values before it that have the same memory: the operand of a detach or of an in-place change, its
    operand, and so on."""
    found = [value]
    while value.op == "call_function" and (
        value.target is aten.detach.default
        or (isinstance(value.target, OpOverload) and value.target._schema.is_mutable)
    ):
        value = value.args[0]  # type: ignore[assignment]  # a tensor
        found.append(value)
    return found


def mutated(gm: fx.GraphModule) -> dict[fx.Node, list[str]]:
    """Value -> fqns of the buffers that hold it after the graph ran."""
    found: dict[fx.Node, list[str]] = {}
    for value, entry in zip(output_node(gm).args[0], gm.meta["outputs"], strict=True):  # type: ignore[arg-type]
        if entry["kind"] == "mutation":
            found.setdefault(value, []).append(entry["target"])
    return found


def results(gm: fx.GraphModule) -> list[fx.Node]:
    """What the graph returns beside new values of buffers."""
    pairs = zip(output_node(gm).args[0], gm.meta["outputs"], strict=True)  # type: ignore[arg-type]
    return [value for value, entry in pairs if entry["kind"] != "mutation"]


def drop_mutations(gm: fx.GraphModule, fqns: list[str]) -> None:
    """Remove the new values of the buffers `fqns` from the outputs of this graph, because another graph gives them."""
    last = output_node(gm)
    pairs = list(zip(last.args[0], gm.meta["outputs"], strict=True))  # type: ignore[arg-type]
    kept = [(value, entry) for value, entry in pairs if entry["kind"] != "mutation" or entry["target"] not in fqns]
    last.args = (tuple(value for value, _ in kept),)
    gm.meta["outputs"] = [entry for _, entry in kept]


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of a node in order, repeats kept: `mul(x, x)` has two."""
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return [operand for operand in found if facts.tensors(operand)]


def redirect_later(old: fx.Node, new: fx.Node, *, behind: fx.Node) -> None:
    """Users of `old` that come after `behind` use `new` instead."""
    for user in list(old.users):
        if behind < user and user is not new:
            user.replace_input_with(old, new)


def output_node(gm: fx.GraphModule) -> fx.Node:
    """The output node of the graph (its last node)."""
    return next(iter(reversed(gm.graph.nodes)))
