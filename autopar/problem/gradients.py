"""Which values get a gradient: those from which the loss is reached without a detach.

A value may come from parameters and yet get none: the batch statistics that only update running averages, a metric.
Autograd moves nothing back through them, so nothing may be priced or emitted for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from passes import edit, facts
from passes.grads import NO_GRADIENT


def reaching(gm: fx.GraphModule) -> dict[fx.Node, None]:
    """Nodes of `gm` and of its bodies that the loss depends on differentiably. Of the values that a run of blocks
    carries on these are the same in all of its blocks."""
    (output,) = [node for node in gm.graph.nodes if node.op == "output"]
    results = zip(output.args[0], gm.meta["outputs"], strict=True)
    return _walk(gm, [node for node, about in results if about["kind"] == "loss" and isinstance(node, fx.Node)])


def carried_on(gm: fx.GraphModule, call: fx.Node, reached: Collection[fx.Node], given: Sequence[bool]) -> list[bool]:
    """Which of the values that a run of blocks carries on have a gradient in its later blocks, where `given` of its
    tensor arguments have one. A part of a run has the layouts of the whole, so also one of a single block is taken to
    have later ones."""
    body, ports = _opened(gm, call)
    count = len(edit.results(body))
    if not _many(call):
        return list(given[:count])
    flags = list(given)
    while True:
        graded = _graded(
            body, [port for port, flag in zip(ports, flags, strict=True) if flag and port in reached], reached
        )
        later = [
            flag or (port in reached and result in graded)
            for flag, port, result in zip(flags, ports, edit.results(body), strict=False)
        ]
        if later == flags[:count]:
            return later
        flags[:count] = later


def _graded(gm: fx.GraphModule, given: Collection[fx.Node], reached: Collection[fx.Node]) -> dict[fx.Node, None]:
    """The nodes of a body that have a gradient, where the placeholders `given` have one."""
    found = dict.fromkeys(given)
    for node in gm.graph.nodes:
        if node not in reached:
            continue
        if node.op == "placeholder":
            graded = facts.is_trained(node) and facts.is_float(node)
        elif node.op == "call_module":
            feeds = [arg in found for arg in node.args if isinstance(arg, fx.Node) and facts.tensors(arg)]
            graded = any(_after(gm, node, reached, feeds))
        else:
            graded = (
                node.target not in NO_GRADIENT
                and facts.is_float(node)
                and any(source in found for source in node.all_input_nodes)
            )
        if graded:
            found[node] = None
    return found


def _after(gm: fx.GraphModule, call: fx.Node, reached: Collection[fx.Node], given: Sequence[bool]) -> list[bool]:
    """Which results of a run have a gradient."""
    body, ports = _opened(gm, call)
    flags = [*carried_on(gm, call, reached, given), *given[len(edit.results(body)) :]]
    graded = _graded(body, [port for port, flag in zip(ports, flags, strict=True) if flag], reached)
    return [result in graded for result in edit.results(body)]


def _many(call: fx.Node) -> bool:
    """Whether a run is of several blocks, or a part of one that is."""
    return int(call.meta.get("of", call.meta["repeat"])) > 1


def _opened(gm: fx.GraphModule, call: fx.Node) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The body of a run of blocks, and the placeholders of it that take what the run is fed or carries."""
    body = gm.get_submodule(str(call.target))
    assert isinstance(body, fx.GraphModule)
    return body, [
        node
        for node in body.graph.nodes
        if node.op == "placeholder" and "fqns" not in node.meta and facts.tensors(node)
    ]


def _walk(gm: fx.GraphModule, ends: list[fx.Node]) -> dict[fx.Node, None]:
    """`ends` and everything in `gm` that leads to them, last first."""
    found = dict.fromkeys(ends)
    for node in reversed(gm.graph.nodes):
        if node in found and node.op == "call_module":
            found |= _body(gm, node, found)
        elif node in found and node.op == "call_function" and _differentiable(node):
            found |= dict.fromkeys(node.all_input_nodes)
    return found


def _body(gm: fx.GraphModule, call: fx.Node, found: Collection[fx.Node]) -> dict[fx.Node, None]:
    """The nodes inside the body of a run that those of its results depend on which `found` reads or later blocks need,
    and the arguments of the run that these need. One encoder that is gone through twice, once without a gradient, has
    results of both passes, of which one is needed."""
    body, ports = _opened(gm, call)
    results, inside = edit.results(body), dict[fx.Node, None]()
    wanted, read = dict[int, None](), {user.args[1]: None for user in call.users if user in found}
    while not read.keys() <= wanted.keys():
        wanted |= read  # type: ignore[arg-type]  # places of results are numbers
        inside = _walk(body, [results[place] for place in wanted])
        if _many(call):
            read = {place: None for place, port in enumerate(ports[: len(results)]) if port in inside}
    feeds = [node for node in call.args if isinstance(node, fx.Node) and facts.tensors(node)]
    later = wanted if "part" in body.meta else {}  # the part before it has the gradients of the run, as it has
    return inside | {
        feed: None
        for place, (port, feed) in enumerate(zip(ports, feeds, strict=True))
        if port in inside or place in later
    }


def _differentiable(node: fx.Node) -> bool:
    """Whether autograd records a node."""
    return node.target not in NO_GRADIENT and (not facts.tensors(node) or facts.is_float(node))
