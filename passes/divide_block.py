"""Takes one block apart, so that a stage of a pipeline can end inside of it. Called by passes.part_runs; joint.inside
asks where that can be.

    (h,) = layers_12(h, mask)  x 1       ->      (g,) = layers_12(h, mask)       up to the operator `add_6`, g
                                                 (h,) = layers_12_rest(g, mask)  all behind it

A block can be divided behind an operator whose result is all that the rest of the block reads of what is before it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from passes import edit, facts
from passes._torch import make_graph_module
from passes.fold_repeats import body_of
from passes.grads import needs_grad


@dataclass(frozen=True, slots=True)
class Point:
    """Where a block can be divided: the operators in front, and the carried values that the rest reads too."""

    front: tuple[str, ...]
    passed: tuple[str, ...]


def divide_block(gm: fx.GraphModule, call: fx.Node, name: str, behind: str) -> None:
    """Divide the block that `call` stands for behind the operator `behind` of its body, in place; what follows becomes
    the body `name`. Raises ValueError where it cannot be divided so."""
    body = body_of(call)
    if call.meta["repeat"] != 1 or behind not in points(body):
        raise ValueError(
            f"{call.target} ({call.meta['repeat']} x) cannot be divided behind {behind}: wanted one block, and one of "
            f"{', '.join(points(body)) or 'no operators'}"
        )
    last = next(node for node in body.graph.nodes if node.name == behind)
    front = _before(last)
    back = [node for node in body.graph.nodes if node.op == "call_function" and node not in front]
    given = dict(zip(_ports(body), call.args, strict=True))
    scope, part = str(call.target), body.meta.get("part", (str(call.target), 0))
    halves = _half(body, None, list(front), [last]), _half(body, last, back, edit.results(body))
    halves[0].meta["half"], halves[1].meta["half"] = f", up to {behind}", f", behind {behind}"
    halves[1].meta["part"] = part
    for which, half in zip((scope, name), halves, strict=True):
        gm.add_submodule(which, half)
    with edit.before(call):
        first = _call(gm, call, scope, [given[port] for port in _kept(body, front)], [last])
        item = gm.graph.call_function(operator.getitem, (first, 0))
        item.meta.update(val=last.meta["val"], module=call.meta["module"], source=call.meta["source"])
        rest = _call(gm, call, name, [item, *(given[port] for port in _kept(body, back))], edit.results(body))
    call.replace_all_uses_with(rest)
    gm.graph.erase_node(call)


def points(body: fx.GraphModule) -> dict[str, Point]:
    """The operators behind which a block can be divided, in order: none where it changes buffers."""
    if any(entry["kind"] != "output" for entry in body.meta["outputs"]):
        return {}
    nodes = [node for node in body.graph.nodes if node.op == "call_function"]
    return {node.name: point for node in nodes if (point := _point(body, nodes, node)) is not None}


def _point(body: fx.GraphModule, nodes: Sequence[fx.Node], node: fx.Node) -> Point | None:
    """What is on both sides of `node`. None where the rest of the block reads something else of what it is made of, or
    a weight of that; or where a half is fed no carried value, or has more results than values that it is fed."""
    results, front = edit.results(body), _before(node)
    if not isinstance(node.meta.get("val"), torch.Tensor) or node in results or node.target is operator.getitem:
        return None
    back = [other for other in nodes if other not in front]
    held = [
        {operand for other in half for operand in other.all_input_nodes if _holds(operand)} for half in (front, back)
    ]
    alone = all(user in front for other in front if other is not node for user in other.users)
    fed = [[port for port in _kept(body, half) if facts.tensors(port)] for half in (front, back)]
    carried = [[port.name for port in ports if port.meta["port"] == "carried"] for ports in fed]
    able = alone and not held[0] & held[1] and all(result in back for result in results)
    if not able or not carried[0] or len(results) > 1 + len(fed[1]):
        return None
    return Point(tuple(other.name for other in front), tuple(carried[1]))


def _before(node: fx.Node) -> dict[fx.Node, None]:
    """The calls that `node` is made of, and itself, in order."""
    found, queue = {node}, [node]
    while queue:
        for operand in queue.pop().all_input_nodes:
            if operand.op == "call_function" and operand not in found:
                found.add(operand)
                queue.append(operand)
    return dict.fromkeys(other for other in node.graph.nodes if other in found)


def _holds(node: fx.Node) -> bool:
    """Whether a placeholder of a body is a weight, which each instance has of its own."""
    return node.op == "placeholder" and "fqns" in node.meta


def _ports(body: fx.GraphModule) -> list[fx.Node]:
    """The placeholders of a body that its call has arguments for."""
    return [node for node in body.graph.find_nodes(op="placeholder") if not _holds(node)]


def _kept(body: fx.GraphModule, calls: Iterable[fx.Node]) -> list[fx.Node]:
    """Those that `calls` read."""
    read = {operand for call in calls for operand in call.all_input_nodes}
    return [port for port in _ports(body) if port in read]


def _half(
    body: fx.GraphModule, given: fx.Node | None, calls: Sequence[fx.Node], results: Sequence[fx.Node]
) -> fx.GraphModule:
    """A body of some of the calls of another one, which is given the result of `given`. Weights that no call reads are
    in the half that is given nothing."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    if given is not None:
        env[given] = graph.placeholder(given.name)
        env[given].meta.update(
            {key: given.meta[key] for key in ("val", "module", "source") if key in given.meta},
            port="carried",
            requires_grad=needs_grad(body)[given],
        )
    read = {operand for call in calls for operand in call.all_input_nodes}
    for node in body.graph.find_nodes(op="placeholder"):
        if node in read or (given is None and _holds(node) and not node.users):
            env[node] = graph.node_copy(node)
    for node in calls:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in results))
    half = make_graph_module(torch.nn.Module(), graph)
    half.meta.update(body.meta)
    half.meta["outputs"] = [{"name": f"carried_{i}", "kind": "output", "target": ""} for i in range(len(results))]
    return half


def _call(
    gm: fx.GraphModule, whole: fx.Node, name: str, args: Sequence[fx.node.Argument], results: Sequence[fx.Node]
) -> fx.Node:
    """A call of the body `name`, once, in place of `whole`."""
    call = gm.graph.call_module(name, tuple(args))
    call.meta.update({**whole.meta, "repeat": 1, "of": 1, "val": tuple(node.meta["val"] for node in results)})
    return call
