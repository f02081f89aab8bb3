"""The second step of a verification, on one device and on ranks: gradients of another batch are accumulated onto the
first ones, the optimizer steps again, and an evaluation follows. It finds state that a right first step leaves behind
and later steps must not use: gathered weights, a batch, a gradient."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from passes import edit, facts, ops
from passes.tables import VIEWS

aten = torch.ops.aten

SECOND = {
    "second output": (
        "output",
        "of a second batch",
        "the forward of a second step, with other weights and another batch",
    ),
    "accumulated": (
        "gradient",
        "of two batches added up",
        "the backward of a second step, whose gradients are added to those of the first",
    ),
    "second parameter": ("parameter", "after a second step", "the second step of the optimizer"),
    "evaluated": ("output", "in evaluation after the steps", "evaluation after the steps"),
    "second buffer": ("buffer", "in the end", "the change of buffers in later steps or in evaluation"),
}
"""Kinds of results, in the order in which they are made -> kind and time of their rows, and what is wrong where it is
the first kind with differences."""


def second_wrong(wrong: Iterable[tuple[str, str]]) -> str:
    """The diagnosis where the first step is right and these results (kind, name) of the second are `wrong`, in the
    order of SECOND."""
    kind, name = next(iter(wrong))
    return f"none in the first step: wrong is {SECOND[kind][2]} ({SECOND[kind][0]} {name})"


NOT_FINITE = (
    "the first step alone is compared: on one device the second one, at the rate of this comparison, gives a loss or "
    "outputs that are not finite"
)


LABELS: dict[Any, tuple[int, int]] = {
    ops.cross_entropy_each: (1, 2),
    ops.cross_entropy_sum: (1, 2),
    ops.count_valid: (0, 1),
    ops.weigh_valid: (0, 2),
}
SPECIAL: dict[Any, tuple[int, int]] = {
    aten.embedding.default: (1, 2),
    ops.bag: (1, 4),
    ops.ragged_bags: (1, 5),
    **LABELS,
}
"""Operators that treat one of the whole numbers that they read in another way (a label that does not count, a row
without a gradient) -> the places of these and of that one among their arguments."""


def second_batch(gm: fx.GraphModule, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch of the same sizes with other samples: the first half of them, each twice. They are the same where an
    input has a size that none with samples has (pieces of images): which of them belong to a sample is not known. Whole
    numbers that operators treat in another way are among those that they read: drawn ones seldom are. Inputs that say
    where rows go (image tokens) are those of the first batch: there are as many places as rows."""
    symbol = facts.symbol("b")
    shapes = {node.meta["input"]: facts.shape(node) for node in gm.graph.nodes if node.meta.get("role") == "input"}
    dims = {name: shape.index(symbol) for name, shape in shapes.items() if symbol in shape}
    known = {size for name in dims for size in shapes[name]}
    if any(not isinstance(size, int) and size not in known for shape in shapes.values() for size in shape):
        dims = {}
    special, stay = special_numbers(gm), _tell_places(gm)
    return {
        name: value
        if name in stay
        else _holding(_each_twice(value, dims[name]) if name in dims else value, special.get(name, []))
        for name, value in batch.items()
    }


def _tell_places(gm: fx.GraphModule) -> list[str]:
    """The inputs on which it depends where rows are filled in."""
    pending: list[Any] = [filled.args[1] for filled in edit.calls(gm, ops.fill_rows)]
    found: dict[fx.Node, None] = {}
    while pending:
        if (node := pending.pop()) not in found:
            found[node] = None
            pending += node.all_input_nodes
    return [node.meta["input"] for node in found if node.meta.get("role") == "input"]


def special_numbers(gm: fx.GraphModule) -> dict[str, list[int]]:
    """Input -> the numbers that operators which read it treat in another way. A negative one only where nothing but
    losses read it: others would take it for the number of a row."""
    found = {}
    for node in gm.graph.nodes:
        if node.meta.get("role") == "input":
            readers = list(_readers(node))
            numbers = dict.fromkeys(number for reader in readers if (number := _special(*reader)) is not None)
            labels = all(reader.target in LABELS for reader, _ in readers)
            found[node.meta["input"]] = [number for number in numbers if labels or number >= 0]
    return found


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The operators that read the elements of a value, behind views of it and paddings; with what they read."""
    for user in node.users:
        if user.target in (*VIEWS, aten.pad.default, operator.getitem):
            yield from _readers(user)
        else:
            yield user, node


def _special(reader: fx.Node, read: fx.Node) -> int | None:
    """The number that an operator treats in another way; None where there is none."""
    place, number = SPECIAL.get(reader.target, (0, 0))
    if not number < len(reader.args) or reader.args[place] is not read:
        return None
    found = reader.args[number]
    return found if isinstance(found, int) else None


def _holding(value: Tensor, numbers: Iterable[int]) -> Tensor:
    """`value` with these numbers among its elements, one after the other from behind its middle on."""
    missing = [number for number in numbers if not bool((value == number).any())]
    if not 0 < len(missing) < value.numel():
        return value
    flat = value.flatten().clone()
    begin = min(flat.numel() // 2 + 1, flat.numel() - len(missing))
    flat[begin : begin + len(missing)] = flat.new_tensor(missing)
    return flat.view(value.shape)


def _each_twice(value: Tensor, dim: int) -> Tensor:
    """The first half of `value` along `dim`, each part twice: 0 0 1 1 2."""
    return value.index_select(dim, torch.arange(value.shape[dim], device=value.device) // 2)


def finite(outputs: Mapping[str, Tensor]) -> bool:
    """Whether all floating outputs are numbers; masked logits may be infinite, the loss may not."""
    return not any(
        bool(value.isnan().any()) or (name == "loss" and not bool(value.isfinite().all()))
        for name, value in outputs.items()
    )
