"""Evaluates values that depend on sizes only (masks, positions), at small numbers for the symbols. Used by
causal_masks, noises and one_sample.

A property seen at small sizes holds at all sizes only if no constant matters in between: a window of 4096 hides nothing
of 8 positions. So each value is evaluated twice: as it is, and with the constants that positions are compared with
scaled down to the tried sizes, keeping their order relative to each other and to the greatest possible size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import sympy
import torch
from torch import fx

from passes import facts
from passes._torch import free_unbacked_symbols

aten = torch.ops.aten

SIZES = (5, 2, 8)
"""Sizes that are tried for each symbol; all pairs and triples are tried, so that batch and sequence differ in some
trials."""

SMALL = 4
"""Constants up to this keep their value (ones, signs, numbers of dims): sizes in SIZES show their effect."""

HIDDEN = -1e4
"""Additive masks have this or less where they hide: exp(-1e4) is 0 in every dtype. Such a constant is not compared with
positions."""

FILLS = (
    aten.fill.Scalar,
    aten.full.default,
    aten.full_like.default,
    aten.masked_fill.Scalar,
    aten.mul.Tensor,
    aten.new_full.default,
    aten.scalar_tensor.default,
    aten.where.Scalar,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
)
"""Operators that put HIDDEN into a mask."""

RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
"""Operators whose number arguments are sizes, unless one of them is symbolic."""

UNFILLED = (aten.empty.memory_format, aten.empty_like.default)
"""Operators whose results are uninitialised."""


@dataclass(frozen=True)
class Trial:
    """One evaluation: sizes for the symbols, and values that replace constants, by magnitude. Those that are not listed
    keep their value."""

    sizes: Mapping[sympy.Symbol, int]
    constants: Mapping[float, int] = field(default_factory=dict)

    def number(self, held: float) -> float:
        """The value of a constant in this trial."""
        scaled = self.constants.get(abs(held))
        return held if scaled is None else type(held)(math.copysign(scaled, held))

    def size(self, held: int | torch.SymInt) -> int:
        """The value of a size in this trial."""
        if isinstance(held, int):
            return held
        scaled = {atom: sympy.Integer(self.number(int(atom))) for atom in held.node.expr.atoms(sympy.Integer)}
        return int(held.node.expr.xreplace({**self.sizes, **scaled}))


MOST = 500
"""Calls that are evaluated at most to know a value that depends on sizes alone."""


def depends_on_sizes_only(node: fx.Node) -> list[fx.Node] | None:
    """The calls that compute `node`, in order, where none reads the content of a placeholder; else None.

    None too where there are more than MOST of them, one is random, or one is a number read from a tensor (only a run
    of the model knows it)."""
    found: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        if one.op != "call_function" or is_random(one) or len(found) >= MOST or _of_values(one):
            return None
        found[one] = None
        if not is_size(one):
            waiting.extend(one.all_input_nodes)
    return sorted(found)


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers."""
    return node.target in UNFILLED or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_size(node: fx.Node) -> bool:
    """Whether the node gives a size (an int or a symbolic int) and not a tensor."""
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _of_values(node: fx.Node) -> bool:
    """Whether the number, or the sizes of the tensor, that `node` gives depend on values of a tensor."""
    held = node.meta.get("val")
    return any(
        bool(free_unbacked_symbols(item))
        for item in (held if isinstance(held, (tuple, list)) else (held,))
        if isinstance(item, (torch.Tensor, torch.SymInt, torch.SymFloat))
    )


def trials(nodes: list[fx.Node], along: Collection[sympy.Symbol]) -> Iterator[Trial]:
    """The trials for these nodes: all combinations of SIZES within the range of each symbol. Where some constant might
    be compared with positions along the symbols `along`, each combination once more with scaled constants."""
    symbols = free_symbols(nodes)
    yield from (Trial(sizes) for sizes in _combinations(symbols, SIZES))
    most = max((upper for symbol, (_, upper) in symbols.items() if symbol in along), default=0)
    constants = sorted({number for node in nodes for number in _constants(node)}) if most else []
    if constants:
        inside = [number for number in constants if number < most]
        top = max(*SIZES, SMALL + len(inside) + 3)
        scaled = {number: SMALL + 1 + index for index, number in enumerate(inside)} | {
            number: math.ceil(number / most * top) for number in constants[len(inside) :]
        }
        yield from (Trial(sizes, scaled) for sizes in _combinations(symbols, (*SIZES, top)))


def _combinations(
    symbols: Mapping[sympy.Symbol, tuple[int, int]], tried: tuple[int, ...]
) -> Iterator[dict[sympy.Symbol, int]]:
    """All combinations of the `tried` sizes, each moved into the range of its symbol."""
    for numbers in itertools.product(dict.fromkeys(tried), repeat=len(symbols)):
        yield {
            symbol: min(max(number, least), most)
            for (symbol, (least, most)), number in zip(symbols.items(), numbers, strict=True)
        }


def free_symbols(nodes: list[fx.Node]) -> dict[sympy.Symbol, tuple[int, int]]:
    """Symbols of the shape environment in the values of these nodes, by name, each with its least and greatest
    value."""
    found: dict[str, tuple[sympy.Symbol, tuple[int, int]]] = {}
    for node in nodes:
        for size in _sizes(node):
            if isinstance(size, torch.SymInt):
                for symbol in size.node.expr.free_symbols:
                    found[str(symbol)] = (symbol, _bounds(size, symbol))
    return dict(found[name] for name in sorted(found))


def _sizes(node: fx.Node) -> list[int | torch.SymInt]:
    """The sizes in the value of a node, symbolic or not."""
    held = node.meta["val"]
    return [held] if is_size(node) else [size for tensor in facts.tensors(node) for size in tensor.shape]


def _bounds(size: torch.SymInt, symbol: sympy.Symbol) -> tuple[int, int]:
    """The least and greatest value of a symbol."""
    span = size.node.shape_env.var_to_range[symbol]
    return int(span.lower), int(span.upper) if span.upper.is_Integer else facts.UNBOUNDED


def _constants(node: fx.Node) -> Iterator[float]:
    """Magnitudes of the constants that positions could be compared with: number arguments of operators, and constants
    in formulas of sizes."""
    if is_size(node):
        size = node.meta["val"]
        yield from (
            (abs(int(atom)) for atom in size.node.expr.atoms(sympy.Integer) if abs(int(atom)) > SMALL)
            if isinstance(size, torch.SymInt)
            else ()
        )
    else:
        yield from (abs(arg) for arg in (*node.args, *node.kwargs.values()) if _compared(arg, node))


def _compared(arg: Any, node: fx.Node) -> TypeGuard[float]:
    """Whether `arg` might be what positions are compared with: a number above SMALL that is no size and is not used to
    hide positions (HIDDEN)."""
    if not isinstance(arg, (int, float)) or isinstance(arg, bool) or not SMALL < abs(arg) < math.inf:
        return False
    if node.target is aten.slice.Tensor:
        source, dim = (*node.args, 0)[:2]
        return isinstance(facts.value(source).shape[dim], torch.SymInt)  # type: ignore[arg-type]
    if node.target in RANGES:
        return any(isinstance(size, torch.SymInt) for size in _sizes(node))
    return arg > HIDDEN or node.target not in FILLS or not facts.dtype(node).is_floating_point


def evaluate(nodes: list[fx.Node], trial: Trial) -> Any:
    """Value of the last of `nodes` (from depends_on_sizes_only) on the CPU, with the numbers of this trial.

    Raises: RuntimeError or IndexError where operators do not take them."""
    held: dict[fx.Node, Any] = {}
    for node in nodes:
        if is_size(node):
            held[node] = trial.size(node.meta["val"])
            continue
        args, kwargs = (
            [trial.number(arg) if _compared(arg, node) else arg for arg in node.args],
            {
                name: trial.number(arg) if _compared(arg, node) else arg
                for name, arg in node.kwargs.items()
                if name != "device"
            },
        )
        args, kwargs = fx.map_arg((args, kwargs), lambda n: held[n])
        held[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return held[nodes[-1]]
