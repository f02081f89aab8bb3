"""Replaces a run of alike blocks by one call of their common body.

    h = block0(h, mask); h = block1(h, mask); ...; h = block31(h, mask)
        ->   (h,) = body(h, mask)   meta["repeat"] = 32

So what is solved and emitted depends on the number of different blocks, not on depth. See docs/internals.md, "Folding".
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes._torch import make_graph_module
from passes.equal_views import merge_equal
from passes.grads import needs_grad
from passes.repeats import Run, containers, feeds_all, find_runs, is_weight, places, same_everywhere, users_outside
from passes.running_sums import in_order_of_blocks


def fold_repeats(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: a flat, normalized graph; `gm.meta["repeat_counts"]` where capture shortened a container.
    does: computes once what the code around blocks computes anew for each; writes sums over what blocks give in the
        order of the blocks; finds runs of alike chained blocks by module
        path and structure, and replaces each by one `call_module`.
    gives: bodies as submodules, `meta["repeat"]`; ValueError when a shortened container does not fold."""
    declared = {path: list(entries) for path, entries in gm.meta.get("repeat_counts", {}).items()}
    for container in containers(gm):
        found = places(gm, container)
        merge_equal(gm, feeds_all(container, *found))  # which moves nothing from or to a block
        in_order_of_blocks(gm, *found)
    carries = needs_grad(gm)
    for container in containers(gm):
        while runs := find_runs(gm, container):  # anew each time: the next run may read what this one gave
            _fold(gm, runs[0], _total(runs[0], declared), carries)
    for path, entries in declared.items():
        if entries:
            raise ValueError(
                f"the blocks of {path} from {entries[0][0]} on were captured as {entries[0][2]} for {entries[0][3]}, "
                "but they are not alike in the graph or not a chain: capture the model without shortening it"
            )
    return edit.finish(gm)


def _total(run: Run, declared: dict[str, list[tuple[int, int, int, int]]]) -> int:
    """The number of instances that the run stands for in the whole model. Removes the entries of `declared` that it
    accounts for."""
    here = len(run.instances)
    first, last = run.instances[0].start, run.instances[-1].start + run.period
    total = here
    for entry in list(declared.get(run.container, [])):
        start, period, shown, meant = entry
        fits = period % run.period == 0 and first <= start and start + period * shown <= last
        if fits:
            total += (meant - shown) * (period // run.period)
            declared[run.container].remove(entry)
    return total


def _fold(gm: fx.GraphModule, run: Run, total: int, carries: dict[fx.Node, bool]) -> None:
    """Replace one run by a call of its body, with readers of its results changed."""
    first = run.instances[0]
    constant = [
        slot
        for slot, value in enumerate(first.outside)
        if slot not in run.carried and same_everywhere(run.instances, slot)
    ]
    weights = [slot for slot in range(len(first.outside)) if slot not in run.carried and slot not in constant]
    idle = _idle(gm, run, total)
    body = _body(gm, run, constant, weights, idle, total, carries)
    edit.drop_mutations(gm, [i.outside[slot].meta["fqn"] for i in run.instances for _, slot in i.writes])
    name = _free_name(gm, f"{run.path}_{first.start}")
    gm.add_submodule(name, body)
    users = users_outside(run)
    if users:  # two passes through the same blocks (texts and documents): what the second one reads is made before both
        inside = set(run.nodes)
        edit.bring_before(min(users), [v for i in run.instances for v in i.outside if v not in inside])
    with edit.before(min(users) if users else edit.output_node(gm)):
        args = tuple(first.outside[slot] for slot in [*run.carried, *constant])
        call = gm.graph.call_module(name, args)
        call.meta.update(_call_meta(run, total))
        carries[call] = True
        results = [gm.graph.call_function(operator.getitem, (call, place)) for place in range(len(run.carried))]
    last = run.instances[-1]
    for result, source in zip(results, run.carried.values(), strict=True):
        node = last.nodes[source]
        result.meta.update(val=node.meta["val"], module=run.path, source=node.meta.get("source", ""))
        carries[result] = carries[node]
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user in users)
    for node in reversed(run.nodes):
        gm.graph.erase_node(node)
    for value in [
        *(instance.outside[slot] for instance in run.instances for slot in weights),
        *(value for values in idle for value in values),
    ]:
        if not value.users:
            gm.graph.erase_node(value)


def _idle(gm: fx.GraphModule, run: Run, total: int) -> list[list[fx.Node]]:
    """The weights of the blocks that no call reads, each with those of all instances: they belong to the block too."""
    found: list[list[fx.Node]] = []
    unread = {
        node.meta["fqn"]: node for node in gm.graph.find_nodes(op="placeholder") if is_weight(node) and not node.users
    }
    for offset in range(run.period):
        prefixes = [f"{run.container}.{instance.start + offset}." for instance in run.instances]
        for rest in [name.removeprefix(prefixes[0]) for name in unread if name.startswith(prefixes[0])]:
            values = [unread.get(prefix + rest) for prefix in prefixes]
            if all(value is not None for value in values):
                found.append([value for value in values if value is not None])
            elif total != len(run.instances):
                raise ValueError(
                    f"{prefixes[0]}{rest} is read by no operator, and its like is in other blocks of {run.container}: "
                    f"cannot name all {total}"
                )
    return found


def _call_meta(run: Run, total: int) -> dict[str, Any]:
    """`meta` of the call that stands for a run of `total` blocks."""
    last = run.instances[-1]
    return {
        "repeat": total,
        "module": run.path,
        "source": run.instances[0].nodes[0].meta.get("source", ""),
        "val": tuple(last.nodes[source].meta["val"] for source in run.carried.values()),
    }


def _body(
    gm: fx.GraphModule,
    run: Run,
    constant: list[int],
    weights: list[int],
    idle: list[list[fx.Node]],
    total: int,
    carries: dict[fx.Node, bool],
) -> fx.GraphModule:
    """The body of a run: a graph of its first instance, whose placeholders are carried values, then `constant` ones
    (the same for all instances), then `weights` and `idle` weights."""
    first, second = run.instances[0], run.instances[1]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for slot in [*run.carried, *constant, *weights]:
        value = first.outside[slot]
        holder = graph.placeholder(value.name)
        holder.meta.update(value.meta)
        if slot in weights:
            holder.meta.update(_weight_names(run, [instance.outside[slot] for instance in run.instances], total))
        else:
            holder.meta.pop("role", None)  # only weights have a role in a body
            holder.meta["port"] = "carried" if slot in run.carried else "invariant"
            # The first instance may get a carried value that no gradient flows into, the others do not.
            holder.meta["requires_grad"] = carries[value] or carries[second.outside[slot]]
        env[value] = holder
    for values in idle:
        graph.placeholder(values[0].name).meta.update(values[0].meta | _weight_names(run, values, total))
    for node in first.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
    writes = [(first.nodes[source], env[first.outside[slot]]) for source, slot in first.writes]
    graph.output((*(env[first.nodes[source]] for source in run.carried.values()), *(env[value] for value, _ in writes)))
    body = make_graph_module(torch.nn.Module(), graph)
    body.meta["symbols"] = gm.meta.get("symbols", {})
    body.meta["outputs"] = [
        *({"name": f"carried_{i}", "kind": "output", "target": ""} for i in range(len(run.carried))),
        *({"name": holder.meta["fqn"], "kind": "mutation", "target": holder.meta["fqn"]} for _, holder in writes),
    ]
    body.meta.update(container=run.container, start=first.start, period=run.period, class_name=_class_name(run))
    return body


def _weight_names(run: Run, values: list[fx.Node], total: int) -> dict[str, Any]:
    """The names of one weight in all instances (`fqns`), checked against `values`, those in the graph; and its name in
    the block (`fqn`): relative to the block's module, `up.weight`; in a period of several modules after the number of
    its module, `1.up.weight`; for a weight elsewhere the whole name of the first instance, with underscores."""
    known = [value.meta["fqn"] for value in values]
    elsewhere = known[0].replace(".", "_")
    start = run.instances[0].start
    match = re.fullmatch(re.escape(run.container) + r"\.(\d+)\.(.*)", known[0])
    if match is None:
        if total != len(known):
            raise ValueError(
                f"{known[0]} is used by blocks of {run.container} but is not in it: cannot name all {total}"
            )
        return {"fqn": elsewhere, "fqns": known}
    offset, rest = int(match.group(1)) - start, match.group(2)
    fqns = [f"{run.container}.{start + number * run.period + offset}.{rest}" for number in range(total)]
    if fqns[: len(known)] != known and total == len(known):
        return {"fqn": elsewhere, "fqns": known}
    if fqns[: len(known)] != known:
        raise ValueError(f"weights of the blocks of {run.container} are named {known}, wanted {fqns[: len(known)]}")
    if not 0 <= offset < run.period:
        return {"fqn": elsewhere, "fqns": fqns}
    return {"fqn": rest if run.period == 1 else f"{offset}.{rest}", "fqns": fqns}


def _class_name(run: Run) -> str:
    """Class of the folded block (that of the first one when a period has several), "" when export did not record it."""
    path = run.path if run.of_calls else f"{run.path}.{run.instances[0].start}"
    for node in run.instances[0].nodes:
        for where, class_name in (node.meta.get("nn_module_stack") or {}).values():
            if where == path:
                return str(class_name).rsplit(".", 1)[-1]
    return ""


def _free_name(gm: fx.GraphModule, wanted: str) -> str:
    """`wanted`, or the same with a number where the graph has a submodule of that name."""
    base = re.sub(r"\W", "_", wanted)
    name, number = base, 0
    while hasattr(gm, name):
        number += 1
        name = f"{base}_{number}"
    return name


def is_folded(node: fx.Node) -> bool:
    """Whether the node stands for a run of blocks."""
    return node.op == "call_module" and "repeat" in node.meta


def body_of(node: fx.Node) -> fx.GraphModule:
    """The body that a folded node stands for `meta["repeat"]` times. Raises ValueError for any other node."""
    gm = node.graph.owning_module
    if not is_folded(node) or gm is None:
        raise ValueError(f"node {node.name} ({facts.where(node)}) is a {node.op}, wanted a folded call_module")
    body = gm.get_submodule(str(node.target))
    assert isinstance(body, fx.GraphModule)
    return body


def targets(body: fx.GraphModule) -> list[list[str]]:
    """For each mutation among the outputs of a body, behind the carried values: the buffer's original name in each
    instance."""
    names = {node.meta["fqn"]: node.meta["fqns"] for node in body.graph.nodes if "fqns" in node.meta}
    return [names[entry["target"]] for entry in body.meta["outputs"] if entry["kind"] == "mutation"]


__all__ = ["body_of", "fold_repeats", "is_folded", "targets"]
