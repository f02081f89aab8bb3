"""Evaluates what depends on sizes only, with numbers put in for the symbols."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import fx

from passes import facts
from passes._torch import free_unbacked_symbols

aten = torch.ops.aten

SIZES = (5, 2, 8)
"""Numbers put in for each symbol; all pairs and triples are tried, so batch and sequence differ in some."""

RANDOM = (aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low, aten.randperm.default,
          aten.bernoulli.default, aten.dropout.default, aten.empty.memory_format, aten.empty_like.default)  # fmt: skip


def depends_on_sizes_only(node: fx.Node, *, limit: int = 500) -> list[fx.Node] | None:
    """The calls that `node` is made of, in order, when none reads the content of a placeholder; else None.

    None too when there are more than `limit` of them, one is random, or one is a number that was read off a tensor: only its run knows it.
    """
    found: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        if one.op != "call_function" or one.target in RANDOM or len(found) >= limit or _of_values(one):
            return None
        found[one] = None
        if not is_size(one):
            waiting.extend(one.all_input_nodes)
    return sorted(found)


def is_size(node: fx.Node) -> bool:
    """Whether the node gives a size (an int or a symbolic int) and not a tensor."""
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _of_values(node: fx.Node) -> bool:
    """Whether the sizes or the number that `node` gives follow from the values of a tensor."""
    held = node.meta.get("val")
    return any(bool(free_unbacked_symbols(item)) for item in (held if isinstance(held, (tuple, list)) else (held,))
               if isinstance(item, (torch.Tensor, torch.SymInt, torch.SymFloat)))


def tried_sizes(nodes: list[fx.Node]) -> Iterator[dict[sympy.Symbol, int]]:
    """Numbers for the symbols of these nodes: all combinations of SIZES, within what each symbol may be."""
    symbols = free_symbols(nodes)
    for numbers in itertools.product(SIZES, repeat=len(symbols)):
        yield {symbol: min(max(number, least), most) for (symbol, (least, most)), number in zip(symbols.items(), numbers, strict=True)}


def free_symbols(nodes: list[fx.Node]) -> dict[sympy.Symbol, tuple[int, int]]:
    """Symbols of the shape environment in the values of these nodes, by name, each with its least and greatest value."""
    found: dict[str, tuple[sympy.Symbol, tuple[int, int]]] = {}
    for node in nodes:
        held = node.meta["val"]
        sizes = [held] if is_size(node) else [size for tensor in facts.tensors(node) for size in tensor.shape]
        for size in sizes:
            if isinstance(size, torch.SymInt):
                for symbol in size.node.expr.free_symbols:
                    found[str(symbol)] = (symbol, _bounds(size, symbol))
    return dict(found[name] for name in sorted(found))


def _bounds(size: torch.SymInt, symbol: sympy.Symbol) -> tuple[int, int]:
    span = size.node.shape_env.var_to_range[symbol]
    upper = int(span.upper) if span.upper.is_Integer else 2**31
    return int(span.lower), upper


def evaluate(nodes: list[fx.Node], numbers: dict[sympy.Symbol, int]) -> Any:
    """Value of the last of `nodes` (from depends_on_sizes_only) on the CPU, with these numbers for the symbols."""
    held: dict[fx.Node, Any] = {}
    for node in nodes:
        if is_size(node):
            size = node.meta["val"]
            held[node] = size if isinstance(size, int) else int(size.node.expr.xreplace(numbers))
            continue
        args = fx.map_arg(node.args, lambda n: held[n])
        kwargs = fx.map_arg({k: v for k, v in node.kwargs.items() if k != "device"}, lambda n: held[n])
        held[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return held[nodes[-1]]
