"""The rule of a reshape, from the shapes on both sides. Used by rules.views.

The factors are the common refinement of both shapes: `[b, s, 512] -> [b, s, 8, 64]` is `f0 f1 (f2 f3) -> f0 f1 f2
f3`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import sympy

from autopar.rules.language import Call, Size

PROBE = 1_000_003  # symbols are compared with numbers at this value: they outweigh constants


def reshape(call: Call) -> str:
    """The rule of any change of shape that keeps the order of elements.

    `[6, 4] -> [2, 12]` is `(f0 f1) f2 -> f0 (f1 f2)`. Where sizes have no common refinement (`[4, 6] -> [6, 4]`), the
    dims up to the next common boundary stay whole. Dims of size 1 are never split."""
    shapes = call.ins[0].shape, call.outs[0].shape
    # a microbatch that is planned may have a part of a group
    even = math.prod(call.ins[0].sizes) == math.prod(call.outs[0].sizes)
    before, after = map(_Side, _in_groups(*shapes) if even else shapes)
    fresh = (f"f{i}" for i in itertools.count())
    while before.open and after.open:
        shared = _shared(before.rest, after.rest)
        if shared is None:
            _close(before, after, fresh)
        else:
            name = next(fresh)
            before.take(name, shared)
            after.take(name, shared)
    return f"{before.text()} -> {after.text()}"


def _in_groups(before: Sequence[Size], after: Sequence[Size]) -> tuple[Sequence[Size], Sequence[Size]]:
    """Both shapes, `[b] -> [b // 4, 4]` as `[4 g] -> [g, 4]`: a reshape loses no elements, so that b is a multiple of 4
    wherever it runs."""
    rounded = {part for size in (*before, *after) if not isinstance(size, int) for part in size.atoms(sympy.floor)}
    for part in sorted(rounded, key=str):
        share, symbol = part.args[0].as_coeff_Mul()
        if symbol.is_Symbol and (1 / share).is_Integer:
            count = sympy.Dummy(str(part), integer=True, positive=True)
            known = {part: count, symbol: count / share}
            sides = [
                [_number(sympy.sympify(size).subs(known, simultaneous=True)) for size in each]
                for each in (before, after)
            ]
            if not _equal(*map(math.prod, (before, after))) and _equal(*map(math.prod, sides)):
                return sides[0], sides[1]
    return before, after


def _number(size: sympy.Expr) -> Size:
    return int(size) if size.is_Integer else size


class _Side:
    """The shape on one side of the rule, consumed from the left.

    words   the factors of each dim so far
    todo    (dim, size) of the dims that are not complete, the current one first
    done    the product of the current dim's factors so far
    """

    def __init__(self, shape: Sequence[Size]) -> None:
        self.words: list[list[str]] = [[] for _ in shape]
        self.todo = [(i, n) for i, n in enumerate(shape) if n != 1]
        self.done: Size = 1

    @property
    def open(self) -> bool:
        """Whether some dim is not complete."""
        return bool(self.todo)

    @property
    def rest(self) -> Size:
        """The part of the current dim's size that has no factor yet."""
        size = quotient(self.todo[0][1], self.done)
        assert size is not None
        return size

    def take(self, name: str, size: Size) -> None:
        """Give the current dim a factor `name` of `size`; go to the next dim where it is complete."""
        index, whole = self.todo[0]
        self.words[index].append(name)
        self.done = self.done * size
        if _equal(self.done, whole):
            self.todo.pop(0)
            self.done = 1

    def text(self) -> str:
        """The words of this side of the rule string."""
        return " ".join("1" if not w else w[0] if len(w) == 1 else f"({' '.join(w)})" for w in self.words)


def _shared(one: Size, other: Size) -> Size | None:
    """The smaller of two sizes if it divides the larger, else None."""
    if quotient(one, other) is not None:
        return other
    return one if quotient(other, one) is not None else None


def _close(before: _Side, after: _Side, fresh: Iterator[str]) -> None:
    """Give dims whole factors until the products of both sides are equal again, or no dims are left."""
    total: list[Size] = [1, 1]
    sides = (before, after)
    while total[0] == 1 or not _equal(*total):
        number = int(_value(total[0]) > _value(total[1]))
        if not sides[number].open:
            number = 1 - number
        if not sides[number].open:
            return
        size = sides[number].rest
        total[number] = total[number] * size
        sides[number].take(f"{next(fresh)}!", size)


def _equal(one: Size, other: Size) -> bool:
    return bool(sympy.expand(one - other) == 0)


@lru_cache(maxsize=4096)  # the same sizes are divided for every number of ranks
def quotient(one: Size, other: Size) -> Size | None:
    """`one / other` if that is a whole number for all values of the symbols, else None."""
    if isinstance(one, int) and isinstance(other, int):
        return one // other if other and one % other == 0 else None
    found = sympy.cancel(sympy.sympify(one) / other)
    if found.is_Integer:
        return int(found)
    rounded = {
        atom: sympy.Dummy(integer=True, positive=True)
        for atom in found.atoms(sympy.floor, sympy.ceiling, sympy.Min, sympy.Max)
    }
    plain = found.xreplace(rounded)
    if plain.free_symbols and plain.is_polynomial() and all(c.is_Integer for c in sympy.Poly(plain).coeffs()):
        return found
    return None


def _value(size: Size) -> float:
    return float(size) if isinstance(size, int) else float(size.subs(dict.fromkeys(size.free_symbols, PROBE)))
