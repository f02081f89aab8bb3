"""Views and data movement: reshape, transpose, expand, cat, split, slice and friends.

A reshape is written by matching the sizes of both sides into groups of equal product; inside a group the finer side names the
factors, so `[b, s, 64] -> [b, s, 8, 8]` becomes `d0 d1 (d2 d3) -> d0 d1 d2 d3`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from autopar.rules.language import Call, Shape, Size
from autopar.rules.rule import Rule

aten = torch.ops.aten
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def names(rank: int, offset: int = 0) -> list[str]:
    """Factor names of `rank` dims."""
    return list(LETTERS[offset:offset + rank])


def reshape(call: Call) -> str:
    """Any change of sizes that keeps the order of elements."""
    before, after = call.ins[0].shape, call.outs[0].shape
    left: list[str] = []
    right: list[str] = []
    for number, (ins, outs) in enumerate(_groups(before, after)):
        one, other = _group_words(f"{LETTERS[number]}", ins, outs)
        left += one
        right += other
    return f"{' '.join(left)} -> {' '.join(right)}"


def _groups(before: Shape, after: Shape) -> list[tuple[list[Size], list[Size]]]:
    """Smallest runs of dims on both sides with equal products, size-1 dims in runs of their own."""
    found: list[tuple[list[Size], list[Size]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        if i < len(before) and before[i] == 1:
            found.append(([1], []))
            i += 1
        elif j < len(after) and after[j] == 1:
            found.append(([], [1]))
            j += 1
        else:
            ins, outs, i, j = _group(before, after, i, j)
            found.append((ins, outs))
    return found


def _group(before: Shape, after: Shape, i: int, j: int) -> tuple[list[Size], list[Size], int, int]:
    ins, outs = [before[i]], [after[j]]
    i, j = i + 1, j + 1
    while sympy.expand(math.prod(ins) - math.prod(outs)) != 0:
        if _smaller(math.prod(ins), math.prod(outs)) and i < len(before):
            ins.append(before[i])
            i += 1
        elif j < len(after):
            outs.append(after[j])
            j += 1
        else:
            ins, outs = [*ins, *before[i:]], [*outs, *after[j:]]
            return ins, outs, len(before), len(after)
    return ins, outs, i, j


def _smaller(one: Size, other: Size) -> bool:
    """Compare sizes by value at a probing point where they are symbolic: large, so that symbols outweigh constants."""
    values = [float(x) if isinstance(x, int) else float(x.subs(dict.fromkeys(x.free_symbols, 1_000_003))) for x in (one, other)]
    return values[0] < values[1]


def _group_words(name: str, ins: Sequence[Size], outs: Sequence[Size]) -> tuple[list[str], list[str]]:
    if not ins or not outs:
        return ["1"] * len(ins), ["1"] * len(outs)
    if len(ins) == 1 and len(outs) == 1:
        return [name], [name]
    if len(ins) > 1 and len(outs) > 1:  # [a, b] -> [c, d] with no common refinement by name: cannot be cut
        return [f"{name}{i}!" for i in range(len(ins))], [f"{name}{i + len(ins)}!" for i in range(len(outs))]
    fine = outs if len(ins) == 1 else ins
    words = [f"{name}{i}" for i in range(len(fine))]
    joined = [f"({' '.join(words)})"]
    return (joined, words) if len(ins) == 1 else (words, joined)


def transpose(call: Call) -> str:
    rank = len(call.ins[0].shape)
    before = names(rank)
    after = list(before)
    one, other = call.args[1] % rank, call.args[2] % rank
    after[one], after[other] = after[other], after[one]
    return f"{' '.join(before)} -> {' '.join(after)}"


def permute(call: Call) -> str:
    rank = len(call.ins[0].shape)
    before = names(rank)
    return f"{' '.join(before)} -> {' '.join(before[d % rank] for d in call.args[1])}"


def turn(call: Call) -> str:
    before = names(len(call.ins[0].shape))
    return f"{' '.join(before)} -> {' '.join(reversed(before))}"


def expand(call: Call) -> str:
    """New and stretched dims are dims that the operand lacks: its gradient is summed over them."""
    before, after = call.ins[0].shape, call.outs[0].shape
    out = names(len(after))
    extra = len(after) - len(before)
    left = [name if old == new else "1" for name, old, new in zip(out[extra:], before, after[extra:], strict=True)]
    return f"{' '.join(left)} -> {' '.join(out)}"


def unsqueeze(call: Call) -> str:
    rank = len(call.outs[0].shape)
    out = names(rank)
    out[call.args[1] % rank] = "1"
    return f"{' '.join(w for i, w in enumerate(out) if i != call.args[1] % rank)} -> {' '.join(out)}"


def squeeze(call: Call) -> str:
    """Only dims of size 1 go, so the two sides are a reshape."""
    return reshape(call)


def split(call: Call) -> str:
    """Pieces of one dim: all of them are cut together, section by section, or the other dims are."""
    rank = len(call.ins[0].shape)
    dim = (call.args[2] if len(call.args) > 2 else call.kwargs.get("dim", 0)) % rank
    pieces = [f"p{i}" for i in range(len(call.outs))]
    return f"{_with(rank, dim, _side_by_side(pieces))} -> {', '.join(_with(rank, dim, p) for p in pieces)}"


def cat(call: Call) -> str:
    rank = len(call.outs[0].shape)
    dim = (call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)) % rank
    pieces = [f"p{i}" for i in range(len(call.ins))]
    return f"{', '.join(_with(rank, dim, p) for p in pieces)} -> {_with(rank, dim, _side_by_side(pieces))}"


def stack(call: Call) -> str:
    rank = len(call.outs[0].shape)
    dim = (call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)) % rank
    out = names(rank)
    out[dim] = "n!"
    part = " ".join(w for i, w in enumerate(out) if i != dim)
    return f"{', '.join(part for _ in call.ins)} -> {' '.join(out)}"


def _side_by_side(pieces: Sequence[str]) -> str:
    return "{" + "|".join(pieces) + "}" if len(pieces) > 1 else pieces[0]


def _with(rank: int, dim: int, word: str) -> str:
    out = names(rank)
    out[dim] = word
    return " ".join(out)


def along(position: int = 1, default: Any = 0) -> Any:
    """A rule for operators that need one dim whole on both sides and act alike on all others (slice, pad of one dim, roll)."""
    def spec(call: Call) -> str:
        rank = len(call.ins[0].shape)
        dim = (call.args[position] if len(call.args) > position else call.kwargs.get("dim", default)) % rank
        return f"{_with(rank, dim, 'y!')} -> {_with(rank, dim, 'z!')}"
    return spec


def select(call: Call) -> str:
    rank = len(call.ins[0].shape)
    dim = call.args[1] % rank
    return f"{_with(rank, dim, 'y!')} -> {' '.join(w for i, w in enumerate(names(rank)) if i != dim)}"


def pad(call: Call) -> str:
    """Dims that are padded must be whole; `args[1]` lists (before, after) from the last dim on."""
    before, after = call.ins[0].shape, call.outs[0].shape
    out = names(len(after))
    left = [w if old == new else f"{w}!" for w, old, new in zip(out, before, after, strict=True)]
    right = [w if old == new else f"{w}2!" for w, old, new in zip(out, before, after, strict=True)]
    return f"{' '.join(left)} -> {' '.join(right)}"


def diff(call: Call) -> str:
    """Neighbours are subtracted along a dim, with another tensor put in front of it when given."""
    rank = len(call.ins[0].shape)
    dim = (call.args[2] if len(call.args) > 2 else -1) % rank
    ins = [_with(rank, dim, f"y{i}!") for i in range(len(call.ins))]
    return f"{', '.join(ins)} -> {_with(rank, dim, 'z!')}"


def repeat(call: Call) -> str:
    """A dim that is not repeated can be cut."""
    before, after = call.ins[0].shape, call.outs[0].shape
    extra = len(after) - len(before)
    out = names(len(after))
    left = [w if old == new else f"{w}!" for w, old, new in zip(out[extra:], before, after[extra:], strict=True)]
    right = [f"{w}!" for w in out[:extra]] + [w if old == new else f"{w}2!" for w, old, new in
                                              zip(out[extra:], before, after[extra:], strict=True)]
    return f"{' '.join(left)} -> {' '.join(right)}"


RULES: dict[Any, Rule] = {
    aten.cat.default: Rule(cat, linear="all"),
    aten.constant_pad_nd.default: Rule(pad),
    aten.diff.default: Rule(diff, linear="all"),
    aten.expand.default: Rule(expand, linear="all"),
    aten.flip.default: Rule(lambda call: _flip(call), linear="all"),
    aten.pad.default: Rule(pad),
    aten.permute.default: Rule(permute, linear="all"),
    aten.repeat.default: Rule(repeat, linear="all"),
    aten.reshape.default: Rule(reshape, linear="all"),
    aten.roll.default: Rule(lambda call: _roll(call), linear="all"),
    aten.select.int: Rule(select, linear="all"),
    aten.slice.Tensor: Rule(along(), linear="all"),
    aten.split_with_sizes.default: Rule(split, linear="all"),
    aten.squeeze.default: Rule(squeeze, linear="all"),
    aten.squeeze.dim: Rule(squeeze, linear="all"),
    aten.squeeze.dims: Rule(squeeze, linear="all"),
    aten.stack.default: Rule(stack, linear="all"),
    aten.t.default: Rule(turn, linear="all"),
    aten.transpose.int: Rule(transpose, linear="all"),
    aten.unsqueeze.default: Rule(unsqueeze, linear="all"),
    aten.view.default: Rule(reshape, linear="all"),
}


def _flip(call: Call) -> str:
    rank = len(call.ins[0].shape)
    flipped = {d % rank for d in call.args[1]}
    words = [f"{w}!" if i in flipped else w for i, w in enumerate(names(rank))]
    return f"{' '.join(words)} -> {' '.join(words)}"


def _roll(call: Call) -> str:
    rank = len(call.ins[0].shape)
    dims = call.args[2] if len(call.args) > 2 else range(rank)
    rolled = {d % rank for d in dims}
    words = [f"{w}!" if i in rolled else w for i, w in enumerate(names(rank))]
    return f"{' '.join(words)} -> {' '.join(words)}"
