"""The activation between the two layers of an expert, as source of a function for the emitted file. Used by experts and
expert_loops.

    silu(first half) * second half                          halves(lambda first, second: F.silu(first) * second)
    clamped, gated by itself, every other column
                                                            pairs(lambda even, odd: (torch.clamp(odd, -7.0, 7.0) + 1) *
                                                            ...)
    relu                                                    lambda x: F.relu(x)

Only pointwise operators of one or two tensors (addcmul: three), or of a tensor and a number: they act on each column by
itself, so that the layers can be split by width. Values that are read more than once get a variable.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes.tables import BINARY, UNARY

aten = torch.ops.aten

NAMES = {"x": ("x",), "halves": ("first", "second"), "pairs": ("even", "odd")}
"""How columns are taken -> the names of the function's arguments."""

CUTS = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)
LAST = 2**63 - 1  # where a slice without end ends
INFIX: dict[Any, str] = {aten.add.Tensor: "+", aten.div.Tensor: "/", aten.mul.Tensor: "*", aten.sub.Tensor: "-"}
FUNCTIONS: dict[Any, str] = {
    aten.addcmul.default: "torch.addcmul",
    aten.clamp.default: "torch.clamp",
    aten.exp.default: "torch.exp",
    aten.gelu.default: "F.gelu",
    aten.relu.default: "F.relu",
    aten.sigmoid.default: "torch.sigmoid",
    aten.silu.default: "F.silu",
    aten.softplus.default: "F.softplus",
    aten.tanh.default: "torch.tanh",
}
"""Operators -> the shorter name of a function with the same arguments."""


def written(result: Any, *sources: Any) -> str | None:
    """The function that makes `result` of the columns of one source `[n, u]`, or of two that are the halves of one;
    None where it is not one of those columns and pointwise operators."""
    found = _Text(sources)
    try:
        body = found.of(result)
    except _OtherError:
        return None
    if not found.kinds:
        return None
    (kind,) = found.kinds
    names = ", ".join(NAMES[kind])
    text = f"lambda {names}: {body if result in found.named else _bare(body)}"  # an assignment needs its brackets
    return text if kind == "x" else f"{kind}({text})"


class _OtherError(Exception):
    """The activation has something else than columns of the sources, numbers and pointwise operators."""


class _Text:
    """Writes nodes as Python expressions. `kinds` are the ways (keys of NAMES) in which columns of `sources` were
    taken; `named` are values that are read more than once, with their variables."""

    def __init__(self, sources: tuple[Any, ...]) -> None:
        self.sources = sources
        self.kinds: dict[str, None] = {}
        self.named: dict[fx.Node, str] = {}

    def of(self, node: Any) -> str:
        """The text of a node or of a number."""
        if not isinstance(node, fx.Node):
            return _plain(node)
        if (column := self._column(node)) is not None:
            kind, number = column
            self.kinds[kind] = None
            if len(self.kinds) > 1:
                raise _OtherError
            return NAMES[kind][number]
        if node in self.named:
            return self.named[node]
        text = self._call(node)
        if len(node.users) < 2:
            return text
        self.named[node] = f"y{len(self.named)}"
        return f"({self.named[node]} := {_bare(text)})"

    def _call(self, node: fx.Node) -> str:
        """The text of a pointwise operator. Raises _OtherError for any other call."""
        pointwise = (
            node.target in BINARY
            or node.target is aten.addcmul.default
            or (node.target in UNARY and node.target is not aten.dropout.default)
        )
        if node.op != "call_function" or not pointwise or (node.target in INFIX and node.kwargs):
            raise _OtherError
        args = [self.of(arg) for arg in node.args]
        if node.target in INFIX:
            return f"({args[0]} {INFIX[node.target]} {args[1]})"
        if node.target is aten.to.dtype:
            if len(args) != 2 or node.kwargs:
                raise _OtherError
            return f"{args[0]}.to({args[1]})"
        given = [*map(_bare, args), *(f"{name}={_plain(value)}" for name, value in node.kwargs.items())]
        return f"{FUNCTIONS.get(node.target, f'torch.ops.{node.target}')}({', '.join(given)})"

    def _column(self, node: fx.Node) -> tuple[str, int] | None:
        """How `node` takes columns of the sources (a key of NAMES), and which of its names stands for it; None where it
        does not."""
        if node in self.sources:
            return ("x", 0) if len(self.sources) == 1 else ("halves", self.sources.index(node))
        if len(self.sources) > 1:
            return None
        if node.target is operator.getitem:
            cut: Any = node.args[0]
            return (
                ("halves", int(node.args[1]))  # type: ignore[arg-type]
                if cut.target in CUTS and cut.args[0] in self.sources and _in_halves(cut)
                else None
            )
        if node.target is not aten.slice.Tensor or node.args[0] not in self.sources:
            return None
        given, width = edit.args_of(node), facts.shape(node.args[0])[-1]  # type: ignore[arg-type]
        start, end, step = given["start"] or 0, LAST if given["end"] in (None, width) else given["end"], given["step"]
        if given["dim"] not in (-1, 1) or not isinstance(width, int):
            return None
        taken = {
            (0, LAST, 2): ("pairs", 0),
            (1, LAST, 2): ("pairs", 1),
            (0, width // 2, 1): ("halves", 0),
            (width // 2, LAST, 1): ("halves", 1),
        }
        return taken.get((start, end, step)) if width % 2 == 0 else None


def _in_halves(cut: fx.Node) -> bool:
    """Whether `cut` divides the last dim into two halves."""
    sizes = [tensor.shape for tensor in facts.tensors(cut)]
    return len(sizes) == 2 and sizes[0] == sizes[1] and 2 * sizes[0][-1] == facts.shape(cut.args[0])[-1]  # type: ignore[arg-type]


def _plain(value: Any) -> str:
    """A number, dtype or None as Python writes it. Raises _OtherError for anything else."""
    if (
        value is None
        or isinstance(value, (int, str, torch.dtype))
        or (isinstance(value, float) and math.isfinite(value))
    ):
        return repr(value)
    raise _OtherError


def _bare(text: str) -> str:
    """The text without brackets around all of it."""
    return text[1:-1] if text.startswith("(") and _whole(text) else text


def _whole(text: str) -> bool:
    """Whether the first bracket closes at the end."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return at == len(text) - 1
    return False
