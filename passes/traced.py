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


def traced(node: fx.Node, function: Callable[..., Any]) -> None:
    """Replace `node` by the operators that `function` runs for its arguments; it stays where that is NotImplemented.

    They are those below autograd: torch's own composite operators are seen as what they consist of.
    """
    operands = node.all_input_nodes

    def run(*values: Any) -> Any:
        held = dict(zip(operands, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), held.__getitem__)
        return function(*args, **kwargs)

    mode = edit.fake_mode(node.graph)
    assert mode is not None
    with torch.no_grad(), mode, enable_python_dispatcher():
        body = drop_devices(make_fx(run)(*map(facts.value, operands)))
    if edit.output_node(body).args == (NotImplemented,):
        return
    for new in body.graph.nodes:
        new.meta = {"val": new.meta.get("val"), **edit.origin(node)}
    results = edit.copied_in(body, operands, node)
    if isinstance(results, fx.Node):
        edit.replace(node, results)
        return
    for user in list(node.users):
        edit.replace(user, results[user.args[1]])
    node.graph.erase_node(node)
