"""What is known about a node: sizes, dtype, bytes, FLOPs, where it comes from.

Sizes are ints or sympy expressions in the friendly symbols of `gm.meta["symbols"]` (friendly name -> symbol of the
shape environment), for example `b*s` and never `s72*s38`. A fact that a pass should have put there raises and names the
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from passes._torch import free_unbacked_symbols, size_functions

Size: TypeAlias = int | sympy.Expr

UNBOUNDED = 2**31
"""torch gives this or more as the upper bound of a symbol that has none."""


SYMBOLIC = 2
"""The least size that torch treats as symbolic: 0 and 1 always become numbers."""


@cache
def symbol(name: str) -> sympy.Symbol:
    """The friendly symbol of that name (positive integer), as used in every size and formula."""
    return sympy.Symbol(name, integer=True, positive=True)


def symbols(gm: fx.GraphModule) -> dict[str, sympy.Symbol]:
    """Friendly name -> friendly symbol, for all symbolic sizes of the graph."""
    return {name: symbol(name) for name in gm.meta.get("symbols", {})}


def renames(gm: torch.nn.Module | None) -> tuple[tuple[sympy.Symbol, sympy.Symbol], ...]:
    """Pairs (symbol of the shape environment, friendly symbol) of `gm.meta["symbols"]`."""
    named = getattr(gm, "meta", {}).get("symbols", {})
    return tuple((original, symbol(name)) for name, original in named.items())


@lru_cache(maxsize=100_000)
def _rename(expression: sympy.Expr, pairs: tuple[tuple[sympy.Symbol, sympy.Symbol], ...]) -> Size:
    """An expression of a size in friendly symbols and sympy's own operations; an int where it has no symbols."""
    result = _plain(expression.xreplace(dict(pairs)))
    return int(result) if result.is_Integer else result


def _plain(expression: sympy.Expr) -> sympy.Expr:
    """The expression in sympy's own operations, in place of torch's (FloorDiv, Mod, powers, roots), so that sympy can
    simplify it."""
    if not expression.args or expression.is_Symbol:
        return expression
    if type(expression) in ROUNDED:
        return ROUNDED[type(expression)](_before_rounding(expression.args[0]))
    args = [_plain(arg) for arg in expression.args]
    plain = PLAIN.get(type(expression))
    return plain(*args) if plain is not None else expression.func(*args)


def _before_rounding(number: sympy.Expr) -> sympy.Expr:
    """The argument of a rounding (floor, ceil), with the same floating-point result as in Python.

    The order of float operations matters: `ceil(1.1 * (b * s) / 6)` is 55 for 300 tokens, `ceil(0.18333333333333335 * b
    * s)` is 56. Floats that are fractions with a power of two up to EXACT below are exact in any order, and become
    rationals. All others are multiplied and divided in the order of the model."""
    ratios = {held: float(held).as_integer_ratio() for held in number.atoms(sympy.Float)}
    if all(by <= EXACT for _, by in ratios.values()):
        return _plain(number.xreplace({held: sympy.Rational(*ratio) for held, ratio in ratios.items()}))
    return _in_order(number)


def _in_order(number: sympy.Expr) -> sympy.Expr:
    """The expression with float operations as opaque functions, so that sympy does not reorder or merge them."""
    if isinstance(number, size_functions.ToFloat):
        return Grouped(_plain(number.args[0]))
    if isinstance(number, (size_functions.FloatTrueDiv, size_functions.IntTrueDiv)):
        return Over(*map(_in_order, number.args))
    return number.func(*map(_in_order, number.args)) if number.args else number


class Grouped(sympy.Function):
    """A number in parentheses: sympy does not merge it with factors outside."""

    @classmethod
    def eval(cls, number: sympy.Expr) -> sympy.Expr | None:
        """The number itself, where it has no symbols."""
        return number if number.is_number else None


class Over(sympy.Function):
    """A quotient of floats that sympy does not simplify."""

    @classmethod
    def eval(cls, number: sympy.Expr, by: sympy.Expr) -> sympy.Expr | None:
        """Python's float quotient, where both have no symbols."""
        return sympy.Float(float(number) / float(by), 17) if number.is_number and by.is_number else None


def _remainder(number: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
    """Python's remainder: `number - by * floor(number / by)`."""
    return number - by * sympy.floor(number / by)


PLAIN: dict[type, Callable[..., sympy.Expr]] = {
    **dict.fromkeys((size_functions.CleanDiv, size_functions.FloorDiv), lambda number, by: sympy.floor(number / by)),
    **dict.fromkeys((size_functions.Mod, size_functions.PythonMod), _remainder),
    **dict.fromkeys((size_functions.FloatTrueDiv, size_functions.IntTrueDiv), lambda number, by: number / by),
    **dict.fromkeys((size_functions.FloatPow, size_functions.PowByNatural), sympy.Pow),
    size_functions.ToFloat: lambda number: number,
    size_functions.OpaqueUnaryFn_sqrt: sympy.sqrt,
    size_functions.Max: sympy.Max,
    size_functions.Min: sympy.Min,
}
"""torch's functions of sizes -> the same in sympy's own operations."""
ROUNDED: dict[type, Callable[[sympy.Expr], sympy.Expr]] = {
    size_functions.FloorToInt: sympy.floor,
    size_functions.CeilToInt: sympy.ceiling,
}
"""torch's roundings -> sympy's."""
EXACT = 2**20
"""A fraction with a denominator up to this, times a number of tokens, is exact in a float."""


def value(node: fx.Node) -> Any:
    """`meta["val"]` of a node. Raises ValueError when it has none."""
    if "val" not in node.meta:
        raise ValueError(f"node {node.name} ({where(node)}) has no value: capture should have set meta['val']")
    return node.meta["val"]


def as_size(item: int | torch.SymInt, gm: torch.nn.Module | None) -> Size:
    """A size as an int or as a sympy expression in the friendly symbols of `gm`."""
    if isinstance(item, int):
        return item
    return _rename(item.node.expr, renames(gm))


def as_number(item: float | torch.SymInt | torch.SymFloat, gm: torch.nn.Module | None) -> float | sympy.Expr:
    """A number that may be made of sizes, as it is or as a sympy expression in the friendly symbols of `gm`."""
    return item if isinstance(item, float) else as_size(item, gm)  # type: ignore[arg-type]  # its formula is one of sizes


def example(node: fx.Node, size: int | torch.SymInt) -> int:
    """A number for a size: itself, or the value that it had when the graph was traced."""
    known = size if isinstance(size, int) else size.node.hint
    if known is None:
        raise ValueError(
            f"{where(node)}: the size {size} depends on what tensors hold, not on the sizes of the inputs"
            f"{_picked_by(node, size)}; what a plan costs and where it is cut must be known before anything runs: "
            "compute with a mask over all positions instead of picking some of them (of an expert, `out + weight * "
            "expert(x)` with a weight of 0 for the tokens of others)"
        )
    return int(known)


def _picked_by(node: fx.Node, size: int | torch.SymInt) -> str:
    """For messages: the operator in front of `node` whose result has this size first, where it is another one."""
    symbols = free_unbacked_symbols(size)
    for maker in node.graph.nodes:
        if maker is node:
            break
        if maker.op == "call_function" and symbols & free_unbacked_symbols(_sizes(maker.meta.get("val"))):
            name = getattr(maker.target, "__name__", str(maker.target)).partition(".")[0]
            return f" ({name} at {where(maker)} picks by values)"
    return ""


def _sizes(val: object) -> list[int | torch.SymInt]:
    """All sizes of a value, or of a tuple of them."""
    if isinstance(val, torch.Tensor):
        return list(val.shape)
    return [size for each in val for size in _sizes(each)] if isinstance(val, (tuple, list)) else []


def spans(gm: torch.nn.Module | None) -> dict[str, tuple[int, int | None, int]]:
    """Friendly name of each symbolic size of inputs -> (the least size, the greatest size, a number that sizes are
    multiples of) for which the graph is valid; 0 and None where there is no bound."""
    steps: Mapping[str, int] = getattr(gm, "meta", {}).get("steps", {})
    nodes = gm.graph.find_nodes(op="placeholder") if isinstance(gm, fx.GraphModule) else ()
    sizes = [
        (friendly, traced)
        for node in nodes
        if node.meta.get("role") == "input"
        for friendly, traced in zip(shape(node), value(node).shape, strict=True)
    ]
    return {
        str(friendly): (*bounds(traced), steps.get(str(friendly), 1))
        for friendly, traced in sizes
        if isinstance(friendly, sympy.Symbol)
    }


def bounds(size: torch.SymInt) -> tuple[int, int | None]:
    """The least and the greatest size that a symbol stands for; 0 and None where there is no bound."""
    span = size.node.shape_env.var_to_range[size.node.expr]
    least = int(span.lower)
    return least if least > SYMBOLIC else 0, int(
        span.upper
    ) if span.upper.is_Integer and span.upper < UNBOUNDED else None


def shape(node: fx.Node, index: int | None = None) -> tuple[Size, ...]:
    """Sizes of the tensor that `node` gives; `index` picks one of several results.

    Raises ValueError for a node that gives several tensors when no index is named, or no tensor at all.
    """
    tensor = _tensor(node, index)
    return tuple(as_size(size, node.graph.owning_module) for size in tensor.shape)


def rank(node: Any) -> int:
    """Number of dims of the tensor that `node` gives (an fx.Node; torch types arguments of nodes as anything)."""
    return len(shape(node))


def numel(node: fx.Node) -> Size:
    """Number of elements of the tensor that `node` gives."""
    result: Size = 1
    for size in shape(node):
        result = result * size
    return result


def dtype(node: fx.Node, index: int | None = None) -> torch.dtype:
    """Element type of the tensor that `node` gives."""
    return _tensor(node, index).dtype


def kind(node: fx.Node) -> tuple[tuple[Size, ...], torch.dtype]:
    """Sizes and element type of the one tensor that `node` gives."""
    return shape(node), dtype(node)


def nbytes(node: fx.Node) -> Size:
    """Bytes of everything that `node` gives (0 for sizes and other scalars)."""
    result: Size = 0
    gm = node.graph.owning_module
    for tensor in tensors(node):
        count: Size = tensor.element_size()
        for size in tensor.shape:
            count = count * as_size(size, gm)
        result = result + count
    return result


def tensors(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """The fake tensors that `node` gives: one, several, or none for a size."""
    held = value(node)
    items = held if isinstance(held, (tuple, list)) else (held,)
    return tuple(item for item in items if isinstance(item, torch.Tensor))


def is_tensor(node: fx.Node) -> bool:
    """Whether the node gives exactly one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_float(node: fx.Node) -> bool:
    """Whether the node gives a floating point tensor, or several of which one is."""
    return any(tensor.dtype.is_floating_point or tensor.dtype.is_complex for tensor in tensors(node))


def is_trained(node: fx.Node) -> bool:
    """Whether the node is a parameter that is not frozen (`requires_grad`)."""
    return node.meta.get("role") == "param" and bool(node.meta.get("requires_grad", True))


def flops(node: fx.Node) -> Size:
    """Forward FLOPs of the node. Raises ValueError before `annotate_flops` ran."""
    return _annotated(node, "flops", "annotate_flops")


def backward_flops(node: fx.Node) -> Size:
    """FLOPs of the node's backward. Raises ValueError before `annotate_flops` ran."""
    return _annotated(node, "backward_flops", "annotate_flops")


def read_bytes(node: fx.Node) -> Size:
    """Bytes that the node reads from memory in forward. Raises ValueError before `annotate_memory` ran."""
    return _annotated(node, "read_bytes", "annotate_memory")


def written_bytes(node: fx.Node) -> Size:
    """Bytes that the node writes to memory in forward. Raises ValueError before `annotate_memory` ran."""
    return _annotated(node, "written_bytes", "annotate_memory")


def where(node: fx.Node) -> str:
    """Module path and source line of a node for messages: `transformer.h.0.attn (modeling_gpt2.py:41)`. A weight's is
    the module that it is in; of a block's, as for operators, that of the first instance."""
    name = next(iter(node.meta.get("fqns", ())), node.meta.get("fqn", ""))
    module = node.meta.get("module") or str(name).rpartition(".")[0] or "the top module"
    source = node.meta.get("source")
    return f"{module} ({source})" if source else module


def _annotated(node: fx.Node, key: str, pass_name: str) -> Any:
    """`meta[key]` of a node, which the pass `pass_name` puts there."""
    if key not in node.meta:
        raise ValueError(f"node {node.name} ({where(node)}) has no {key}: run the pass {pass_name} first")
    return node.meta[key]


def _tensor(node: fx.Node, index: int | None) -> torch.Tensor:
    """The one tensor that `node` gives, or result number `index`."""
    held = value(node)
    if index is not None:
        held = held[index]
    if not isinstance(held, torch.Tensor):
        raise ValueError(f"node {node.name} ({where(node)}) gives {type(held).__name__}, wanted one tensor")
    return held
