"""What two plans say differently: plain data beside plain data, no model is built again.

facts    every field of a plan but its nodes: the sizes that it is for, the cluster, strategy, mesh, stages, and
         what a step is predicted to take
nodes    what is laid out in another way, together where the change is the same; and what only one of the two has
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.plan import Alternative, NodePlan, Plan, Predicted, Stage, changed
from autopar.text import times

Value = str | float | None


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that differs; None where a plan has no such thing. Names that end in `_s` are of seconds, in `_bytes`
    of bytes per device."""

    name: str
    old: Value
    new: Value


@dataclass(frozen=True, slots=True)
class Change:
    """Nodes that differ in the same way: how each is split and how its values lie; empty where a plan has no such
    nodes."""

    nodes: tuple[str, ...]
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Difference:
    """All that differs between two plans; nothing where they are the same. `graph`: where the models are unlike, what
    the names of their nodes say of that."""

    facts: tuple[Fact, ...]
    changes: tuple[Change, ...]
    graph: str = ""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.facts and not self.changes

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {"same": self.same, **asdict(self)}


def diff(old: Plan, new: Plan) -> Difference:
    """What differs from one plan to another one, of the same model or not. Raises PlanError for what is no Plan."""
    for name, given in (("old", old), ("new", new)):
        if not isinstance(given, Plan):
            raise PlanError(
                f"{name} is a {type(given).__name__}; wanted a Plan, as the plan of a compiled model or "
                "Plan.load(file) gives it"
            )
    pairs = [(f.name, getattr(old, f.name), getattr(new, f.name)) for f in fields(Plan) if f.name != "nodes"]
    facts = [fact for name, before, after in pairs if before != after for fact in _facts(name, before, after)]
    graph = changed(old.nodes, new.nodes) if old.graph_hash != new.graph_hash else ""
    return Difference(tuple(facts), tuple(_changes(old, new)), graph)


def _facts(name: str, old: Any, new: Any) -> list[Fact]:
    """What differs of one field."""
    read = _READ.get(name, lambda value: {name: _plain(value)})
    before, after = read(old), read(new)
    if name in _WHOLE and before[_WHOLE[name]] != after[_WHOLE[name]]:
        before, after = ({_WHOLE[name]: each[_WHOLE[name]]} for each in (before, after))
    found = [
        Fact(label, before.get(label), after.get(label))
        for label in dict.fromkeys((*before, *after))
        if before.get(label) != after.get(label)
    ]
    # what stages have beside blocks is said of the nodes
    return found or ([] if name == "stages" else [Fact(name, str(old), str(new))])


def _changes(old: Plan, new: Plan) -> Iterable[Change]:
    """Nodes by how they differ, in the order of the plans."""
    before, after = _in_parts(old, new), _in_parts(new, old)
    found: dict[tuple[str, str], list[str]] = {}
    for node in dict.fromkeys((*before, *after)):
        ways = before.get(node, ""), after.get(node, "")
        if ways[0] != ways[1]:
            found.setdefault(ways, []).append(node)
    return (Change(tuple(nodes), *ways) for ways, nodes in found.items())


def _ways(plan: Plan) -> dict[str, str]:
    """All that a plan says of each node."""
    found = {name: _way(node) for name, node in plan.nodes.items()}
    for number, stage in enumerate(plan.stages):
        for name in stage.nodes:
            found[name] = "; ".join(filter(None, (found.get(name), f"in stage {number}")))
    return found


def _in_parts(plan: Plan, other: Plan) -> dict[str, str]:
    """All that a plan says of each node, by the names of another one where that alone lays out a run of blocks in
    parts: a node of the whole run is in each part that has it, but as what comes into the rest of a block."""
    found: dict[str, str] = {}
    for name, way in _ways(plan).items():
        scope, _, rest = name.rpartition("/")
        begins = {} if scope in plan.parted else other.parted.get(scope, {})
        places = [part for part in (scope, *begins) if f"{part}/{rest}" in other.nodes and begins.get(part) != rest]
        found |= dict.fromkeys([f"{part}/{rest}" for part in places] if begins and places else [name], way)
    return found


def _way(node: NodePlan) -> str:
    """What is split on each axis, and how a node wants and leaves its values."""
    split = ", ".join(
        f"{factor or '-'} ({kind}{f', {run}' if run else ''})"
        for factor, kind, run in zip(node.factors, node.kinds, node.runs, strict=True)
    )
    lies = f"{' '.join(node.ins)} -> {' '.join(node.outs)}".strip()
    return "; ".join(filter(None, (split, lies, f"microbatches {' '.join(node.micro)}" if node.micro else "")))


def _plain(value: Any) -> Value:
    """A value of a plan as text, or a number."""
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value))
    return value if isinstance(value, (str, int, float)) or value is None else str(value)


def _leaves(value: Any, path: str) -> dict[str, Value]:
    """Each entry of nested data by its path."""
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (tuple, list)) else ()
    )
    return (
        {name: leaf for key, each in items for name, leaf in _leaves(each, f"{path} {key}").items()}
        if items
        else {path: _plain(value)}
    )


def _cluster(data: Mapping[str, Any]) -> dict[str, Value]:
    return {"cluster": Cluster.from_dict(dict(data)).label, **_leaves(data, "cluster")}


def _stages(stages: tuple[Stage, ...]) -> dict[str, Value]:
    """Where each stage is, and the blocks that it has."""
    found: dict[str, Value] = {"stages": len(stages)}
    for number, stage in enumerate(stages):
        again = ", ".join(f"{scope} {count} run again" for scope, count in stage.again.items())
        found[f"stage {number}"] = "; ".join(filter(None, (f"place {stage.place}", stage.spans, again)))
    return found


def _alternatives(others: tuple[Alternative, ...]) -> dict[str, Value]:
    """What each strategy that was priced takes; of several alike the fastest."""
    found: dict[str, Value] = {}
    for other in sorted(others, key=lambda other: (other.step_s is None, other.step_s or 0.0)):
        found.setdefault(
            f"{other.name} {times(other.mesh)} step_s", "no price" if other.step_s is None else other.step_s
        )
    return found


def _numbers(predicted: Predicted) -> dict[str, Value]:
    """What a step takes, and each place of a pipeline."""
    return {
        name: leaf
        for key, value in asdict(predicted).items()
        for name, leaf in (
            ((f"place {i} memory_bytes", n) for i, n in enumerate(value)) if key == "places_bytes" else ((key, value),)
        )
    }


_WHOLE = {"cluster": "cluster", "stages": "stages"}
"""Of a field what has one row for all of it where it differs: figures of another cluster, and stages of another number,
have nothing to do with each other."""

_READ: dict[str, Callable[[Any], dict[str, Value]]] = {
    "cluster": _cluster,
    "hints": lambda hints: _leaves(hints, "planned for"),
    "mesh": lambda mesh: {"mesh": times(mesh)},
    "graph_hash": lambda graph: {"graph": graph[:12]},
    "predicted": _numbers,
    "alternatives": _alternatives,
    "stages": _stages,
    "remat": lambda remat: {
        f"{scope} run again, keeping": ", ".join(kept) or "nothing" for scope, kept in remat.items()
    },
    "offload": lambda offload: {"offload": offload or None},
    "parted": lambda parted: _leaves(parted, "in parts") if parted else {},
    "source": lambda source: _leaves(source, "source") if source else {},
    "notes": lambda notes: {f"note: {note}": "said" for note in notes},
}
"""How fields are read that are more than one value, each into things with a name of their own."""
