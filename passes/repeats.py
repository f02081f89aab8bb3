"""Finds runs of alike blocks in a flat graph.

Candidates are the children of a container by module path (`model.layers.0`, `.1`, ...), and the calls of one module
that is called several times (ALBERT's layer; its container is `model.layer@`). Two are alike when their operators,
static arguments and sizes agree node by node, and the same of their weights train; a run is a chain when every outside
value of instance i+1 is either the same as that of instance i (invariant) or one fixed result of instance i (carried).
Each may give new values to buffers of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from passes import edit, facts
from passes.running_sums import running_sums

_CHILD = re.compile(r"(.*?)\.(\d+)(?=\.|$)")
_CALL = re.compile(r"@(\d+)$")  # behind the key of a module's second call and those after it, by torch.export
MAX_PERIOD = 8
"""Longest pattern of different blocks that is looked for (A B A B has period 2)."""
NOWHERE = 1 << 30
"""The number of a block behind all blocks."""


@dataclass
class Instance:
    """One block (or `period` blocks in a row): its calls in order, and the values that it reads from outside in order
    of first use ("outside slots").

    `mutated` says which values are new values of buffers (`edit.mutated`). `writes` are those of this instance: the
    index of the call that computes it, and the outside slot of the buffer (-1 if the instance does not read it)."""

    start: int
    nodes: list[fx.Node]
    mutated: Mapping[fx.Node, list[str]] = field(default_factory=dict)
    outside: list[fx.Node] = field(default_factory=list)
    signature: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        index = {node: position for position, node in enumerate(self.nodes)}
        slots: dict[fx.Node, int] = {}

        def name(operand: fx.Node) -> tuple[Any, ...]:
            if operand in index:
                return ("in", index[operand])
            slot = slots.setdefault(operand, len(slots))
            return (
                "out",
                slot,
                is_weight(operand),
                bool(operand.meta.get("requires_grad")) and is_weight(operand),
                _facts(operand),
            )

        rows = []
        for node in self.nodes:
            arguments = map_arg((node.args, node.kwargs), name)
            rows.append((node.op, str(node.target), repr(arguments), _facts(node)))
        self.outside = list(slots)
        buffers = {value.meta["fqn"]: slot for value, slot in slots.items() if is_weight(value)}
        self.writes = [(index[node], buffers.get(fqn, -1)) for node in self.nodes for fqn in self.mutated.get(node, ())]
        self.signature = (*rows, ("writes", *self.writes))
        self.index = index


@dataclass
class Run:
    """Alike instances in a row. `carried`: outside slot -> index of the call in the previous instance whose result it
    is."""

    container: str
    period: int
    instances: list[Instance]
    carried: dict[int, int]

    @property
    def of_calls(self) -> bool:
        """Whether the instances are calls of one module."""
        return self.container.endswith("@")

    @property
    def path(self) -> str:
        """The path of the module that has the instances, or is called for each."""
        return self.container.removesuffix("@")

    @property
    def nodes(self) -> list[fx.Node]:
        """All calls of all instances."""
        return [node for instance in self.instances for node in instance.nodes]


def is_weight(node: fx.Node) -> bool:
    """Whether the node is a parameter, buffer or constant placeholder."""
    return node.op == "placeholder" and node.meta.get("role") in ("param", "buffer", "constant")


def containers(gm: fx.GraphModule) -> list[str]:
    """Paths that have numbered children in the module paths of the graph, and those of modules with weights that are
    called several times, with `@` behind; outermost first."""
    found: dict[str, None] = {}
    for node in gm.graph.nodes:
        for match in _CHILD.finditer(node.meta.get("module", "")):
            found[node.meta["module"][: match.end(1)]] = None
        again = next((path for path, number in calls(node).items() if number), None)
        if again and any(is_weight(operand) for operand in node.all_input_nodes):
            found[f"{again}@"] = None
    return sorted(found, key=lambda path: path.count("."))


def calls(node: fx.Node) -> dict[str, int]:
    """The modules in whose calls the node was traced, outermost first: path -> number of the call, from 0."""
    stack = node.meta.get("nn_module_stack") or {}
    return {path: int(found.group(1)) if (found := _CALL.search(key)) else 0 for key, (path, _) in stack.items()}


def _child(node: fx.Node, container: str) -> int | None:
    """The number of the child of the container that the node is in; None where it is in none."""
    if container.endswith("@"):
        return calls(node).get(container[:-1])
    path: str = node.meta.get("module", "")
    number = path.removeprefix(f"{container}.").partition(".")[0] if path.startswith(f"{container}.") else ""
    return int(number) if number.isdecimal() else None


def find_runs(gm: fx.GraphModule, container: str) -> list[Run]:
    """Longest runs of at least two alike, chained instances of the container's children; they do not overlap."""
    blocks, mutated = _blocks(gm, container), edit.mutated(gm)
    order = sorted(blocks)
    longest = 1 if container.endswith("@") else MAX_PERIOD
    runs: list[Run] = []
    position = 0
    while position < len(order):
        best: Run | None = None
        for period in range(1, min(longest, (len(order) - position) // 2) + 1):
            run = _run_from(container, blocks, order[position:], period, mutated)
            if run and (best is None or len(run.nodes) > len(best.nodes)):
                best = run
        if best is None:
            position += 1
        else:
            runs.append(best)
            position += best.period * len(best.instances)
    return runs


def _blocks(gm: fx.GraphModule, container: str) -> dict[int, list[fx.Node]]:
    """Calls per child of the container, in graph order: those of `places`; additions to a sum over the blocks (`x = x +
    block(x)`) with the block whose result is added; and other calls between two blocks, or between two parts of one,
    with the block that reads them first."""
    place, latest = places(gm, container)
    read = _first_reader(gm, place)
    place |= running_sums(gm.graph, place, latest)
    added = _first_reader(gm, place)  # what a block reads and a sum before it as well is of the block of the sum
    blocks: dict[int, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        between = node.op == "call_function" and 0 <= latest[node] <= read[node] < NOWHERE
        home = place.get(node, added[node] if between else -1)
        if home >= 0:
            blocks.setdefault(home, []).append(node)
    return blocks


def _first_reader(gm: fx.GraphModule, place: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Of every node the first block that depends on it; NOWHERE where none does."""
    found: dict[fx.Node, int] = {}
    for node in reversed(gm.graph.nodes):
        found[node] = min([place.get(user, found[user]) for user in node.users], default=NOWHERE)
    return found


def places(gm: fx.GraphModule, container: str) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """The child of the container that each call is in, by its module path; sizes that one block alone uses are in that
    block. Then, of every node, the last block that it depends on, -1 where on none."""
    place: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        child = _child(node, container)
        if child is not None and node.op == "call_function" and facts.tensors(node):
            place[node] = child
    for node in reversed(gm.graph.nodes):
        homes = {place.get(user, -1) for user in node.users}
        if node.op == "call_function" and not facts.tensors(node) and len(homes) == 1 and min(homes) >= 0:
            place[node] = homes.pop()
    latest: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        latest[node] = max([place.get(node, -1), *(latest[operand] for operand in node.all_input_nodes)])
    return place, latest


def feeds_all(container: str, place: Mapping[fx.Node, int], latest: Mapping[fx.Node, int]) -> Callable[[fx.Node], bool]:
    """Whether a call is of the code around the blocks and depends on none, given their `places`: where it is written in
    a loop over them, all of them may read one result of it."""

    def around(node: fx.Node) -> bool:
        path = node.meta.get("module", "")
        lists = [path[: match.end(2)] for match in _CHILD.finditer(path)]
        return latest[node] < 0 and node not in place and all(f"{container}.".startswith(f"{own}.") for own in lists)

    return around


def _run_from(
    container: str,
    blocks: dict[int, list[fx.Node]],
    order: list[int],
    period: int,
    mutated: Mapping[fx.Node, list[str]],
) -> Run | None:
    """The longest run of this period that starts at the first block of `order`."""
    instances: list[Instance] = []
    carried: dict[int, int] | None = None
    for first in range(0, len(order) - period + 1, period):
        children = order[first : first + period]
        if children != list(range(order[0] + first, order[0] + first + period)):
            break
        following = Instance(children[0], sorted(node for child in children for node in blocks[child]), mutated)
        if instances:
            links = _links(instances[-1], following)
            if links is None or (carried is not None and links != carried):
                break
            carried = links
        instances.append(following)
    while len(instances) >= 2 and carried is not None:
        run = Run(container, period, instances, carried)
        if _owned(run) and _closed(run):
            return run
        instances = instances[:-1]
    return None


def _links(before: Instance, after: Instance) -> dict[int, int] | None:
    """The carried slots from one instance to the next; None where they are not alike or not a chain."""
    if before.signature != after.signature:
        return None
    carried: dict[int, int] = {}
    for slot, (old, new) in enumerate(zip(before.outside, after.outside, strict=True)):
        if new in before.index:
            carried[slot] = before.index[new]
        elif old is not new and not (is_weight(old) and is_weight(new)):
            return None
    return carried


def _owned(run: Run) -> bool:
    """Whether each instance writes only to buffers that no other instance reads."""
    return not any(
        slot < 0 or slot in run.carried or same_everywhere(run.instances, slot) for _, slot in run.instances[0].writes
    )


def _closed(run: Run) -> bool:
    """Whether nothing outside reads other results of the run than the carried values of the last instance and new
    values of buffers."""
    gm = run.nodes[0].graph.owning_module
    assert gm is not None
    returned = dict.fromkeys(edit.results(gm))
    invariant = [slot for slot in range(len(run.instances[0].outside)) if slot not in run.carried]
    inside = {node: number for number, instance in enumerate(run.instances) for node in instance.nodes}
    passed_on = list(run.carried.values())
    for number, instance in enumerate(run.instances):
        last = number == len(run.instances) - 1
        for position, node in enumerate(instance.nodes):
            for user in node.users:
                if inside.get(user) == number or (user.op == "output" and node not in returned):
                    continue
                if position not in passed_on or not (inside.get(user) == number + 1 or (last and user not in inside)):
                    return False
        for slot in invariant:
            value = instance.outside[slot]
            if not same_everywhere(run.instances, slot) and any(inside.get(user) != number for user in value.users):
                return False  # a weight of one instance is used elsewhere too
    return not _needs_itself(run, inside)


def _needs_itself(run: Run, inside: Mapping[fx.Node, int]) -> bool:
    """Whether an operand of the run depends on its results, so that one call cannot replace it."""
    queue, found = users_outside(run), dict[fx.Node, None]()
    while queue:
        user = queue.pop()
        if user not in found and user not in inside:
            found[user] = None
            queue += user.users
    return any(value in found for instance in run.instances for value in instance.outside)


def same_everywhere(instances: list[Instance], slot: int) -> bool:
    """Whether all instances get the very same value there."""
    return all(instance.outside[slot] is instances[0].outside[slot] for instance in instances)


def users_outside(run: Run) -> list[fx.Node]:
    """Nodes outside the run that use a result of it."""
    inside = set(run.nodes)
    return [user for node in run.nodes for user in node.users if user not in inside]


def _facts(node: fx.Node) -> str:
    """Sizes and dtypes of what a node gives, as text that two nodes can be compared by."""
    held = node.meta.get("val")
    if held is None:
        return "none"
    if not facts.tensors(node):
        return str(facts.as_number(held, node.graph.owning_module)) if not isinstance(held, (tuple, list)) else "none"
    gm = node.graph.owning_module
    return str([([facts.as_size(size, gm) for size in t.shape], t.dtype) for t in facts.tensors(node)])
