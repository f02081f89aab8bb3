"""Calls written as what a function of tensors computes, or as what torch itself composes them of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from passes import edit, facts
from passes._torch import enable_python_dispatcher, make_fx
from passes.drop_devices import drop_devices

Bodies = dict[Any, fx.GraphModule]
"""What was traced, by function and arguments: calls that differ in their operands alone are traced once."""


def traced(node: fx.Node, function: Callable[..., Any], bodies: Bodies) -> None:
    """Replace `node` by the operators that `function` runs for its arguments; it stays where that gives None.

    They are those below autograd: torch's own composite operators are seen as what they consist of.
    """
    operands = node.all_input_nodes
    key = node.target, repr(map_arg((node.args, node.kwargs), lambda one: f"{operands.index(one)} {_kind(one)}"))
    if key not in bodies:
        bodies[key] = _body(node, function)
    body = bodies[key]
    if edit.output_node(body).args == (None,):
        return
    env = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    with edit.before(node):
        for one in edit.calls(body):
            args, kwargs = map_arg((one.args, one.kwargs), env.__getitem__)
            env[one] = edit.call(node, one.target, *args, **kwargs)
    results: Any = map_arg(edit.output_node(body).args[0], env.__getitem__)
    if isinstance(results, fx.Node):
        edit.replace(node, results)
        return
    for user in list(node.users):
        edit.replace(user, results[user.args[1]])
    node.graph.erase_node(node)


def _body(node: fx.Node, function: Callable[..., Any]) -> fx.GraphModule:
    """The graph of `function` for the arguments of `node`; its inputs are the operands."""
    operands, mode = node.all_input_nodes, edit.fake_mode(node.graph)
    assert mode is not None

    def run(*values: Any) -> Any:
        held = dict(zip(operands, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), held.__getitem__)
        return function(*args, **kwargs)

    with torch.no_grad(), mode, enable_python_dispatcher():
        return drop_devices(make_fx(run)(*map(facts.value, operands)))


def _kind(node: fx.Node) -> Any:
    """What a trace depends on of an operand."""
    held = facts.value(node)
    return (held.shape, held.stride(), held.dtype) if isinstance(held, torch.Tensor) else held
