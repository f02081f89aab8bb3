"""Einsums of at most two operands, in which each summed letter is in both.

    einsum("btd,dr,re->bte", x, u, v)      einsum("btr,re->bte", einsum("btd,dr->btr", x, u), v)
    einsum("btd,de->be", x, w)             einsum("bd,de->be", x.sum(1), w)

torch does the same inside one call. As separate operators each product has its own FLOPs, and intermediate results that
are kept for the backward are counted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from string import ascii_letters
from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes.facts import Size

aten = torch.ops.aten

Term = tuple[fx.Node, str]
"""An operand, and a letter for each of its dims."""


def einsums(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops.
    does: multiplies more than two operands pair by pair, in torch's own order (from the left, or along the path that
           the call names); and sums letters that only one operand has, before that.
    gives: einsums of one operand, or of two that share each letter that is summed."""
    return edit.rewrite(gm, {aten.einsum.default: _by_pairs})


def _by_pairs(node: fx.Node) -> fx.Node | None:
    """An einsum as einsums of two operands; None where it is one already."""
    equation, operands = node.args[:2]
    ins, out = spelled(str(equation), [facts.shape(operand) for operand in operands])  # type: ignore[union-attr, arg-type]  # a list of nodes
    terms = list(zip(operands, ins, strict=True))  # type: ignore[arg-type]  # the same
    if len(terms) < 2 or (len(terms) == 2 and not any(_lone(terms, term, out) for term in terms)):
        return None
    return _pairwise(node, [_narrowed(node, terms, term, out) for term in terms], out)


def spelled(equation: str, shapes: Sequence[tuple[Size, ...]]) -> tuple[list[str], str]:
    """The equation with one letter for each dim of each operand and of the result: `...` is written out as letters, and
    the implicit result is made explicit."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    words = [re.findall(r"\.\.\.|[A-Za-z]", word) for word in left.split(",")]
    letters = [letter for word in words for letter in word]
    if not arrow:
        right = "..." * ("..." in letters) + "".join(
            sorted(letter for letter in letters if letter != "..." and letters.count(letter) == 1)
        )
    covered = [len(shape) - len(word) + 1 for word, shape in zip(words, shapes, strict=True) if "..." in word]
    fresh = "".join([letter for letter in ascii_letters if letter not in equation][: max(covered, default=0)])
    ins = [
        "".join(_covering(fresh, len(shape) - len(word) + 1) if letter == "..." else letter for letter in word)
        for word, shape in zip(words, shapes, strict=True)
    ]
    return ins, right.replace("...", fresh)


def _covering(fresh: str, count: int) -> str:
    """The last `count` of the letters that stand for `...`: broadcast dims are aligned at the right."""
    return fresh[len(fresh) - count :]


def sizes_of(ins: Sequence[str], shapes: Sequence[tuple[Size, ...]]) -> dict[str, Size]:
    """The size of each letter; of a broadcast letter the one that is not 1."""
    found: dict[str, Size] = {}
    for letters, shape in zip(ins, shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            if found.get(letter, 1) == 1:
                found[letter] = size
    return found


def _sizes(terms: Sequence[Term]) -> dict[str, Size]:
    """The size of each letter of some operands."""
    return sizes_of([letters for _, letters in terms], [facts.shape(operand) for operand, _ in terms])


def _stretched(terms: Sequence[Term], term: Term) -> list[int]:
    """The dims of `term` that have size 1 and whose letter is larger in another operand: torch ignores such dims."""
    sizes, (operand, letters) = _sizes(terms), term
    return [
        dim
        for dim, (letter, size) in enumerate(zip(letters, facts.shape(operand), strict=True))
        if size == 1 and sizes[letter] != 1
    ]


def _without(letters: str, dims: Sequence[int]) -> str:
    """The letters but those of `dims`."""
    return "".join(letter for dim, letter in enumerate(letters) if dim not in dims)


def _lone(terms: Sequence[Term], term: Term, out: str) -> str:
    """The letters that neither the result nor another operand has."""
    held = [set(_without(letters, _stretched(terms, (operand, letters)))) for operand, letters in terms]
    return "".join(
        letter
        for letter in dict.fromkeys(term[1])
        if letter not in out and sum(letter in letters for letters in held) == 1
    )


def _narrowed(node: fx.Node, terms: Sequence[Term], term: Term, out: str) -> Term:
    """`term` without broadcast dims, and with the letters that it alone has summed."""
    operand, letters = term
    lone = _lone(terms, term, out)
    gone = _stretched(terms, term)
    if gone:
        operand, letters = edit.call(node, aten.squeeze.dims, operand, gone), _without(letters, gone)
    dims = [dim for dim, letter in enumerate(letters) if letter in lone]
    if not dims:
        return operand, letters
    left = _without(letters, dims)
    if len(set(letters)) < len(letters):  # the sum of a diagonal
        return edit.call(node, aten.einsum.default, f"{letters}->{left}", [operand]), left
    return edit.call(node, aten.sum.dim_IntList, operand, dims), left


def _pairwise(node: fx.Node, terms: list[Term], out: str) -> fx.Node:
    """The einsum as products of two operands in torch's order: from the left, each result being the first operand of
    the next product; or along the path of the call, where results go to the end of the list."""
    order = out + "".join(sorted({letter for _, letters in terms for letter in letters} - set(out)))
    path: Sequence[int] = edit.args_of(node)["path"] or ()
    steps: Iterator[Any] = iter(zip(path[::2], path[1::2], strict=True) if path else [(0, 1)] * (len(terms) - 1))
    for step in steps:
        (first, one), (second, other) = (terms[place] for place in sorted(step))
        terms = [term for place, term in enumerate(terms) if place not in step]
        wanted = set(out).union(*(letters for _, letters in terms))
        kept = "".join(letter for letter in order if letter in one + other and letter in wanted)
        product = edit.call(node, aten.einsum.default, f"{one},{other}->{kept}", [first, second])
        terms.insert(len(terms) if path else 0, (product, kept))
    ((product, _),) = terms
    return product
