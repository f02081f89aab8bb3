"""The second step of a verification, on one device and on ranks: gradients of another batch are accumulated onto the
first ones, the optimizer steps again, and an evaluation follows. It finds state that a right first step leaves behind
and later steps must not use: gathered weights, a batch, a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, fx

from passes import facts

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


def second_batch(gm: fx.GraphModule, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch of the same sizes with other samples: the first half of them, each twice. It is the same batch where an
    input has a size that none with samples has (pieces of images): which of them belong to a sample is not known."""
    symbol = facts.symbol("b")
    shapes = {node.meta["input"]: facts.shape(node) for node in gm.graph.nodes if node.meta.get("role") == "input"}
    dims = {name: shape.index(symbol) for name, shape in shapes.items() if symbol in shape}
    known = {size for name in dims for size in shapes[name]}
    if any(not isinstance(size, int) and size not in known for shape in shapes.values() for size in shape):
        return dict(batch)
    return {name: _each_twice(value, dims[name]) if name in dims else value for name, value in batch.items()}


def _each_twice(value: Tensor, dim: int) -> Tensor:
    """The first half of `value` along `dim`, each part twice: 0 0 1 1 2."""
    return value.index_select(dim, torch.arange(value.shape[dim], device=value.device) // 2)


def finite(outputs: Mapping[str, Tensor]) -> bool:
    """Whether all floating outputs are numbers; masked logits may be infinite, the loss may not."""
    return not any(
        bool(value.isnan().any()) or (name == "loss" and not bool(value.isfinite().all()))
        for name, value in outputs.items()
    )
