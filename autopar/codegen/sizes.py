"""Sizes in emitted code: global sizes are formulas in the symbolic dims, local ones follow from the layout.

global  s*b        ->  "b * s"
local   b, S0 on the axis of 4 ranks that cuts the batch  ->  "b // 4"
local   s or 50257, which may be cut unevenly  ->  "MESH.local(s, (1,))"  (differs from rank to rank)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cache

import sympy
from sympy.printing.pycode import PythonCodePrinter

from autopar.errors import PlanError
from autopar.layout import Layout, cutters, dim_of, is_shard, sections_of, ways_of
from autopar.rules.language import Size
from passes import facts

BATCH = facts.symbol("b")


@cache
def text(size: float | sympy.Expr) -> str:
    """A global size, or a number computed from sizes, as Python source in the names of the symbolic dims. Raises
    PlanError where it has no source form."""
    if isinstance(size, (int, float)):
        return str(size)
    return _Plain().doprint(sympy.factor_terms(size))


class _Plain(PythonCodePrinter):
    """Prints formulas of sizes in integer arithmetic and without module names: `s // 64` for `math.floor(s / 64)`,
    which divides floats."""

    def _print_floor(self, expr: sympy.Expr) -> str:
        number, by = expr.args[0].as_numer_denom()
        return _whole(expr, f"(({self._print(number)}) // {self._divisor(by)})")

    def _print_ceiling(self, expr: sympy.Expr) -> str:
        number, by = expr.args[0].as_numer_denom()
        return _whole(expr, f"(-(-({self._print(number)}) // {self._divisor(by)}))")

    def _divisor(self, by: sympy.Expr) -> str:
        """`by` behind `//`: a product is divided by as a whole."""
        return str(self._print(by)) if by.is_Atom else f"({self._print(by)})"

    def _print_Float(self, expr: sympy.Float) -> str:
        return repr(float(expr))

    def _print_Grouped(self, expr: sympy.Expr) -> str:
        return f"({self._print(expr.args[0])})"

    def _print_Over(self, expr: sympy.Expr) -> str:
        return f"(({self._print(expr.args[0])}) / ({self._print(expr.args[1])}))"

    def _print_Pow(self, expr: sympy.Expr, rational: bool = True) -> str:
        return str(super()._print_Pow(expr, rational=rational))

    def _print_Function(self, expr: sympy.Expr) -> str:
        raise PlanError(
            f"a number that the model makes of its sizes, {expr}, has no source form: {expr.func} is none of +, -, *, "
            "/, //, %, **, min, max, math.floor and math.ceil; make it of those, or pass it as an input"
        )


def _whole(expr: sympy.Expr, text: str) -> str:
    """`text`, the source of the floor or ceiling `expr`, converted to int where its argument may be a float (a root, or
    a decimal fraction)."""
    return text if expr.args[0].is_rational_function() and not expr.has(sympy.Float) else f"int{text}"


def local(
    size: Size, layout: Layout, dim: int, mesh: Sequence[int], exact: Collection[int] = (), parts: int = 1
) -> str:
    """The size of tensor dim `dim` on this rank, as Python source. `exact`: the axes that cut the inputs' batch, which
    therefore divides by them; other symbolic sizes may be cut unevenly. `parts`: the number of microbatches that share
    the dim, evenly."""
    axes = cutters(layout, dim)
    if not axes and parts == 1:
        return text(size)
    ways = math.prod(mesh[a] for a in axes) * parts
    if isinstance(size, int):
        if size % ways == 0:
            return str(size // ways)
        assert parts == 1, f"{parts} microbatches cannot share a dim of size {size}"
        assert len(sections_of(layout[axes[0]])) == 1, f"sections of a dim of size {size} cut {ways} ways must be even"
        return f"MESH.local({size}, {axes})"
    if quotient := _quotient(size, ways):
        return quotient
    body = text(size)
    body = body if size.is_Symbol or (size.is_Mul and "/" not in body and "+" not in body) else f"({body})"
    if axes and not _batch_divides(size, axes, exact):
        return f"MESH.local({body if parts == 1 else f'{body} // {parts}'}, {axes})"
    return f"{body} // {ways}"


def _batch_divides(size: sympy.Expr, axes: Sequence[int], exact: Collection[int]) -> bool:
    """Whether `axes` cut a size evenly because they cut the batch evenly (`exact`), of which it is a multiple."""
    return all(axis in exact for axis in axes) and _is_multiple(size)


@cache
def _is_multiple(size: sympy.Expr) -> bool:
    """Whether a size is a multiple of the batch."""
    return bool(sympy.cancel(size / BATCH).is_polynomial())


@cache
def _quotient(size: sympy.Expr, ways: int) -> str:
    """`size / ways` as source where it is an integer for all values of the symbolic dims; else empty."""
    found = sympy.cancel(size / ways)
    if found.is_number:
        return text(int(found))
    return text(found) if found.is_polynomial() and all(c.is_Integer for c in sympy.Poly(found).coeffs()) else ""


def must_divide(
    before: Sequence[Size],
    src: Layout,
    after: Sequence[Size],
    dst: Layout,
    exact: Collection[int],
) -> list[tuple[Size, tuple[int, ...]]]:
    """The sizes, each with the axes that cut it, that must divide evenly so that reshaping the local parts gives the
    local parts of the reshaped tensor. Where the batch is merged with heads, uneven chunks of `b` rows are not the
    uneven chunks of `b * h` rows."""
    found = []
    for i, size in enumerate(before):
        for j, other in enumerate(after):
            axes = cutters(src, i)
            if not axes or axes != cutters(dst, j) or size == other or isinstance(size, int) or isinstance(other, int):
                continue
            smaller = size if sympy.fraction(sympy.cancel(other / size))[1] == 1 else other
            if not _batch_divides(smaller, axes, exact):
                found.append((smaller, axes))
    return found


def sections_must_divide(
    sizes: Sequence[Size], layout: Layout, exact: Collection[int]
) -> list[tuple[Size, tuple[int, ...]]]:
    """The sizes of the sections in which samples lie side by side, each with the axes that must cut it evenly."""
    found = []
    for dim in {dim_of(entry) for entry in layout if is_shard(entry) and len(sections_of(entry)) > 1}:
        axes, size = cutters(layout, dim), sizes[dim]
        if not isinstance(size, int) and not _batch_divides(size, axes, exact):
            found += [(sympy.cancel(size / len(sections_of(layout[a]))), axes) for a in axes]
    return found


def shape(
    sizes: Sequence[Size],
    layout: Layout,
    mesh: Sequence[int],
    exact: Collection[int] = (),
    micro: str = "R",
    parts: int = 1,
) -> list[str]:
    """All local sizes of a tensor; `exact` as for `local`. `micro` says how `parts` microbatches share it."""
    cut = dim_of(micro) if is_shard(micro) else -1
    return [local(size, layout, dim, mesh, exact, parts if dim == cut else 1) for dim, size in enumerate(sizes)]


def comment(sizes: Sequence[Size], layout: Layout, mesh: Sequence[int], micro: str = "R", parts: int = 1) -> str:
    """Local sizes for a reader: `b/4 s 512`."""
    words = []
    cut = dim_of(micro) if is_shard(micro) else -1
    for dim, size in enumerate(sizes):
        ways = ways_of(layout, dim, mesh) * (parts if dim == cut else 1)
        if isinstance(size, int):
            words.append(str(size // ways) if size % ways == 0 else f"{size}/{ways}")
        else:
            words.append(text(size).replace(" ", "") + (f"/{ways}" if ways > 1 else ""))
    return " ".join(words)
