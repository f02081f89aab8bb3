"""The schema of a plan file: a check for each field of its data, made before a Plan is made of it. Called by
Plan.from_json.

`FIELDS` has a check for each field; `agreeing` checks fields against each other. What needs the graph of the plan is
checked by autopar.plan_suits_graph. Every refusal names the field, as `nodes.linear.ins[0]`, with the value got and
what is wanted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from autopar.cost.memory import HOSTED, ITEMSIZES, POLICIES
from autopar.errors import LayoutError, PlanError
from autopar.layout import NO_GRAD, parse
from autopar.optimizers import OPTIMIZERS
from autopar.text import SHOWN, shown

Check = Callable[[str, Any], None]  # of the field's name and its value; raises PlanError

KINDS = ("sample", "operator", "attribute", "parameter", "replicate", "partial")
PRECISIONS = (*POLICIES, *(dtype for dtype in ITEMSIZES if "float" in dtype))
MOST = 1 << 62  # of any whole number: what torch takes
DEEPEST = 64  # levels of JSON: more than any plan has, and fewer than Python's own functions on nested data take


def fail(path: str, got: object, wanted: str) -> NoReturn:
    """Raise PlanError: what is malformed, got and wanted."""
    raise PlanError(f"plan is malformed: {path} is {shown(got)}; wanted {wanted}")


@dataclass(frozen=True, slots=True)
class _Repeated:
    """The values of a key that a JSON object has more than once."""

    values: tuple[Any, ...]


def keyed(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of one JSON object, for json.loads. Python's own reader keeps the last value of a repeated key; here
    all are kept, for `check_keys` to refuse."""
    found = dict(pairs)
    if len(found) < len(pairs):
        for key in found:
            values = tuple(value for name, value in pairs if name == key)
            if len(values) > 1:
                found[key] = _Repeated(values)
    return found


def check_keys(data: Any) -> None:
    """Raise PlanError where an object of JSON that was read by `keyed` has a key more than once, or lies deeper than
    DEEPEST."""
    todo: list[tuple[str, int, Any]] = [("", 0, data)]
    while todo:
        path, depth, value = todo.pop()
        if isinstance(value, _Repeated):
            raise PlanError(
                f"plan is malformed: {path} is there {len(value.values)} times, as "
                f"{' and '.join(map(shown, value.values))}; wanted each key once"
            )
        if depth > DEEPEST:
            raise PlanError(f"plan is malformed: {path[:SHOWN]}... lies {depth} levels deep; wanted at most {DEEPEST}")
        if isinstance(value, dict):
            todo += [(f"{path}.{key}" if path else key, depth + 1, item) for key, item in value.items()]
        elif isinstance(value, list):
            todo += [(f"{path}[{index}]", depth + 1, item) for index, item in enumerate(value)]


def text(path: str, value: Any) -> None:
    """Any text."""
    if not isinstance(value, str):
        fail(path, value, "text")


def one_of(names: Collection[str]) -> Check:
    """A check that takes one of some names."""

    def check(path: str, value: Any) -> None:
        if not isinstance(value, str) or value not in names:
            fail(path, value, f"one of {', '.join(map(repr, names))}")

    return check


def whole(least: int | None = None, most: int = MOST) -> Check:
    """A check that takes a whole number of at least `least` and at most `most`."""
    wanted = (
        f"a whole number{'' if least is None else f' of at least {least}'}{'' if most == MOST else f', at most {most}'}"
    )

    def check(path: str, value: Any) -> None:
        if type(value) is not int or value > most or (least is not None and value < least):
            fail(path, value, wanted)

    return check


def amount(path: str, value: Any) -> None:
    """Seconds or bytes."""
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        fail(path, value, "a number of at least 0 that is not infinite")


def optional(check: Check) -> Check:
    """A check that takes null, or what `check` takes."""
    return lambda path, value: None if value is None else check(path, value)


def listed(check: Check, least: int = 0) -> Check:
    """A check that takes a list of at least `least` items, each of which `check` takes."""

    def each(path: str, value: Any) -> None:
        if not isinstance(value, (list, tuple)) or len(value) < least:
            fail(path, value, f"a list{f' of at least {least}' if least else ''}")
        for index, item in enumerate(value):
            check(f"{path}[{index}]", item)

    return each


def table(check: Check) -> Check:
    """A check that takes an object whose values `check` takes."""

    def each(path: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            fail(path, value, "a table")
        for key, item in value.items():
            check(f"{path}.{key}", item)

    return each


def record(fields: Mapping[str, Check], left_out: Collection[str] = ()) -> Check:
    """A check that takes an object with just these fields; those in `left_out` may be missing."""

    def each(path: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            fail(path, value, f"a table with {', '.join(fields)}")
        missing = [key for key in fields if key not in value and key not in left_out]
        unknown = [key for key in value if key not in fields]
        if missing or unknown:
            said = [
                f"{what} {', '.join(map(repr, keys))}"
                for what, keys in (("missing", missing), ("unknown", unknown))
                if keys
            ]
            raise PlanError(f"plan is malformed: {path} has {' and '.join(said)}; wanted {', '.join(fields)}")
        for key, item in value.items():
            fields[key](f"{path}.{key}", item)

    return each


def anything(path: str, value: Any) -> None:
    """Any value: the field is not read by autopar, or is checked elsewhere."""


def span(path: str, value: Any) -> None:
    """`[first, stop)`."""
    if (
        not isinstance(value, (list, tuple))
        or len(value) != 2
        or any(type(n) is not int for n in value)
        or not 0 <= value[0] < value[1]
    ):
        fail(path, value, "[first, stop] of instances, first before stop")


def pair(path: str, value: Any) -> None:
    """The layouts of a value and of its gradient, `S0,R|S0,P`."""
    text(path, value)
    parts = value.split("|")
    if len(parts) != 2:
        fail(path, value, "two layouts with | between, of the value and of its gradient")
    try:
        parse(parts[0])
        if NO_GRAD not in parts[1]:
            parse(parts[1])
    except LayoutError as error:
        fail(path, value, f"two layouts ({error})")
    if NO_GRAD in parts[1] and set(parts[1].split(",")) != {NO_GRAD}:
        fail(path, value, f"a gradient on all axes or on none ({NO_GRAD})")


def entry(path: str, value: Any) -> None:
    """How microbatches share a value: a layout with one entry."""
    text(path, value)
    try:
        if len(parse(value)) == 1:
            return
    except LayoutError:
        pass
    fail(path, value, "a layout of one entry, as S0, P or R")


def _beginning(path: str, value: Any) -> None:
    """Where a part of a run of blocks begins: the number of an instance, or the name of an operator."""
    if not isinstance(value, str) and (type(value) is not int or value < 1):
        fail(path, value, "a whole number of at least 1, or the name of an operator")


def _name(path: str, value: Any) -> None:
    """A Python identifier."""
    if not isinstance(value, str) or not value.isidentifier():
        fail(path, value, "an identifier")


NODE = record(
    {
        "ins": listed(pair),
        "outs": listed(pair),
        "factors": listed(text),
        "kinds": listed(one_of(KINDS)),
        "runs": listed(text),
        "micro": listed(entry),
    },
    left_out=("micro",),
)
STAGE = record({"nodes": listed(text), "blocks": table(span), "place": whole(0), "again": table(whole(0))})
PREDICTED = record(
    {
        **dict.fromkeys(("step_s", "memory_bytes", "compute_s", "exposed_s", "hidden_s", "bound_s"), amount),
        "places_bytes": listed(amount),
    },
    left_out=("bound_s", "places_bytes"),
)
ALTERNATIVE = record(
    {
        "name": text,
        "mesh": listed(whole(1)),
        "step_s": optional(amount),
        "memory_bytes": optional(amount),
        "why": text,
        "how": text,
    },
    left_out=("why", "how"),
)

FIELDS: dict[str, Check] = {
    "model": text,
    "graph_hash": text,
    "mode": one_of(("train", "inference")),
    "precision": one_of(PRECISIONS),
    "optimizer": one_of(OPTIMIZERS),
    "hints": table(whole(1)),
    "cluster": table(anything),
    "axes": listed(_name),
    "mesh": listed(whole(1)),
    "strategy": text,
    "seed": whole(),
    "nodes": table(NODE),
    "predicted": PREDICTED,
    "alternatives": listed(ALTERNATIVE),
    "stages": listed(STAGE, 1),
    "schedule": text,
    "microbatches": whole(1),
    "remat": table(listed(text)),
    "offload": one_of(HOSTED),
    "parted": table(table(_beginning)),
    "totals": listed(text),
    "shared": listed(text),
    "source": table(anything),
    "notes": listed(text),
    "schema": whole(),
}
"""The fields of a plan, with what each may be."""


def check(data: Mapping[str, Any]) -> None:
    """Raises PlanError unless the data of a plan is well formed."""
    for name, value in data.items():
        FIELDS[name](name, value)
    agreeing(data)


def agreeing(data: Mapping[str, Any]) -> None:
    """Raise PlanError where fields contradict each other."""
    axes, mesh = data["axes"], data["mesh"]
    if len(axes) != len(mesh) or len(set(axes)) != len(axes):
        fail("axes", axes, f"{len(mesh)} different names, one for each size of mesh")
    for name, node in data["nodes"].items():
        _node(f"nodes.{name}", node, len(mesh), data["microbatches"])
    places = [stage["place"] for stage in data["stages"]]
    for index, place in enumerate(places):
        if place > max(places[:index], default=-1) + 1:
            fail(
                f"stages[{index}].place",
                place,
                f"at most {max(places[:index], default=-1) + 1}: the first stage of each place comes in the order of "
                "the places",
            )
    batch = data["hints"].get("b")
    if batch is not None and batch % data["microbatches"]:
        fail("microbatches", data["microbatches"], f"a number into which the batch of {batch} divides (hints.b)")
    count = len(data["predicted"].get("places_bytes", ()))
    if count not in (0, max(places) + 1):
        fail(
            "predicted.places_bytes",
            data["predicted"]["places_bytes"],
            f"the bytes of {max(places) + 1} places, or none",
        )


def _node(path: str, node: Mapping[str, Sequence[str]], axes: int, microbatches: int) -> None:
    """Check the layouts and factors of one node against the number of mesh axes and of microbatches."""
    for key in ("factors", "kinds", "runs"):
        if len(node[key]) != axes:
            fail(f"{path}.{key}", node[key], f"one for each of the {axes} axes of mesh")
    for key in ("ins", "outs"):
        for index, uses in enumerate(node[key]):
            if any(len(layout.split(",") if layout else ()) != axes for layout in uses.split("|")):
                fail(
                    f"{path}.{key}[{index}]",
                    uses,
                    f"an entry for each of the {axes} axes of mesh, of the value and of its gradient",
                )
    wanted = len(node["outs"]) if microbatches > 1 else 0
    if len(node.get("micro", ())) != wanted:
        fail(f"{path}.micro", node.get("micro", ()), f"{wanted or 'no'} entries, with {microbatches} microbatches")
