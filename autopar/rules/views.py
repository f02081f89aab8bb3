"""Views and data movement: transpose, expand, cat, split, slice and similar (reshape has a file of its own)."""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.arguments import Spec, dims, given, line, rank_of, rule, words
from autopar.rules.language import Call
from autopar.rules.reshapes import reshape
from autopar.rules.rule import Rule
from passes import ops

aten = torch.ops.aten


def permute(call: Call) -> str:
    """Dims in the order of `dims`."""
    before = words(rank_of(call))
    return rule([" ".join(before)], [" ".join(before[d] for d in dims(given(call)["dims"], len(before)))])


def transpose(call: Call) -> str:
    """Two dims are exchanged."""
    after = words(rank_of(call))
    if after:  # torch takes a scalar too
        one, other = (d % len(after) for d in call.args[1:3])
        after[one], after[other] = after[other], after[one]
    return rule([line(len(after))], [" ".join(after)])


def turn(call: Call) -> str:
    """Dims in reverse order: a transposed matrix."""
    before = words(rank_of(call))
    return rule([" ".join(before)], [" ".join(reversed(before))])


def expand(call: Call) -> str:
    """New and broadcast dims are factors that the operand lacks; its gradient is summed over them."""
    before, after = call.ins[0].shape, call.outs[0].shape
    extra = len(after) - len(before)
    left = [f"d{extra + i}" if old == after[extra + i] else "1" for i, old in enumerate(before)]
    return rule([" ".join(left)], [line(len(after))])


def unsqueeze(call: Call) -> str:
    """A new dim of size 1."""
    rank = len(call.outs[0].shape)
    new = call.args[1] % rank
    out = words(rank, {new: "1"})
    return rule([" ".join(out[:new] + out[new + 1 :])], [" ".join(out)])


def squeeze(call: Call) -> str:
    """The listed dims of size 1 are removed. A listed dim of another size stays whole: its shard might have size
    1."""
    shape = call.ins[0].shape
    asked = given(call)["dim"]
    listed = () if asked == [] else dims(asked, len(shape))
    left = words(len(shape), {d: "1" if shape[d] == 1 else f"d{d}!" for d in listed})
    return rule([" ".join(left)], [" ".join(w for d, w in enumerate(left) if not (d in listed and shape[d] == 1))])


def split(call: Call) -> str:
    """Sections of one dim. They are all cut together, each in its section; or another dim is cut."""
    rank, pieces = rank_of(call), [f"p{i}" for i in range(len(call.outs))]
    dim = given(call)["dim"] % rank
    return rule([line(rank, {dim: _side_by_side(pieces)})], [line(rank, {dim: p}) for p in pieces])


def chunk(call: Call) -> str:
    """As `split` where all chunks have the same size; else the dim stays whole."""
    dim = given(call)["dim"] % rank_of(call)
    alike = all(t.shape[dim] == call.outs[0].shape[dim] for t in call.outs)
    return split(call) if alike else whole_pieces(call)


def whole_pieces(call: Call) -> str:
    """Sections of a dim that stays whole."""
    rank = rank_of(call)
    dim = given(call)["dim"] % rank
    return rule([line(rank, {dim: "y!"})], [line(rank, {dim: f"z{i}!"}) for i in range(len(call.outs))])


def unbind(call: Call) -> str:
    """One output per index of a dim that stays whole."""
    left = words(rank_of(call), {given(call)["dim"] % rank_of(call): "y!"})
    return rule([" ".join(left)], [" ".join(w for w in left if w != "y!") for _ in call.outs])


def cat(call: Call) -> str:
    """Operands concatenated along one dim. They are all cut together, each in its section; or another dim is cut. Torch
    skips empty operands of one dim, whatever the rank of the others."""
    rank = len(call.outs[0].shape)
    dim = given(call)["dim"] % rank
    sides = [f"p{i}!" if len(t.shape) < rank else line(rank, {dim: f"p{i}"}) for i, t in enumerate(call.ins)]
    pieces = [f"p{i}" for i, t in enumerate(call.ins) if len(t.shape) == rank]
    return rule(sides, [line(rank, {dim: _side_by_side(pieces)})])


def stack(call: Call) -> str:
    """Operands along a new dim, which stays whole."""
    rank = len(call.outs[0].shape)
    out = words(rank, {given(call)["dim"] % rank: "n!"})
    return rule([" ".join(w for w in out if w != "n!") for _ in call.ins], [" ".join(out)])


def _side_by_side(pieces: list[str]) -> str:
    return "{" + "|".join(pieces) + "}" if len(pieces) > 1 else pieces[0]


def along(name: str = "dim") -> Spec:
    """Operators that need the dims in argument `name` whole, and act on all others alike (slice, roll, flip,
    unfold)."""

    def spec(call: Call) -> str:
        rank = rank_of(call)
        whole = dims(given(call)[name], rank)
        new = {i: f"t{i}!" for i in range(rank, len(call.outs[0].shape))}
        return rule(
            [line(rank, {d: f"y{d}!" for d in whole})],
            [line(len(call.outs[0].shape), {d: f"z{d}!" for d in whole} | new)],
        )

    return spec


def select(call: Call) -> str:
    """One index of a dim that stays whole."""
    left = words(rank_of(call), {call.args[1] % rank_of(call): "y!"})
    return rule([" ".join(left)], [" ".join(w for w in left if w != "y!")])


def pad(call: Call) -> str:
    """Padded dims stay whole; `pad` lists (before, after) from the last dim to the first."""
    rank = rank_of(call)
    amounts = given(call)["pad"]
    whole = [rank - 1 - i // 2 for i in range(0, len(amounts), 2) if amounts[i] != 0 or amounts[i + 1] != 0]
    return rule([line(rank, {d: f"y{d}!" for d in whole})], [line(rank, {d: f"z{d}!" for d in whole})])


def _pads_zeros(call: Call) -> str:
    return "" if given(call)["value"] not in (None, 0, 0.0) else "all"


def repeat(call: Call) -> str:
    """Copies side by side: a cut of the operand cuts each copy, section by section."""
    before, after = call.ins[0].shape, call.outs[0].shape
    extra = len(after) - len(before)
    right = [f"n{i}!" for i in range(extra)]
    right += [f"d{i}" if old == after[extra + i] else f"(n{extra + i}! d{i})" for i, old in enumerate(before)]
    return rule([line(len(before))], [" ".join(right)])


def pixel_shuffle(call: Call) -> str:
    """Channels become positions: `[..., c r r, h, w] -> [..., c, h r, w r]`."""
    return "... (c r! q!) h w -> ... c (h r!) (w q!)"


MOVES: dict[Any, Spec] = {
    aten.cat.default: cat,
    aten.chunk.default: chunk,
    aten.expand.default: expand,
    aten.flip.default: along("dims"),
    aten.permute.default: permute,
    aten.pixel_shuffle.default: pixel_shuffle,
    aten.repeat.default: repeat,
    aten.reshape.default: reshape,
    aten.roll.default: along("dims"),
    aten.select.int: select,
    aten.slice.Tensor: along(),
    aten.split.Tensor: whole_pieces,
    aten.split_with_sizes.default: split,
    aten.squeeze.dim: squeeze,
    aten.squeeze.dims: squeeze,
    aten.stack.default: stack,
    aten.t.default: turn,
    aten.transpose.int: transpose,
    aten.unbind.int: unbind,
    aten.unfold.default: along("dimension"),
    aten.unsqueeze.default: unsqueeze,
}
"""Operators that only move elements, so all are linear."""

RULES: dict[Any, Rule] = {
    **{op: Rule(spec, linear="all") for op, spec in MOVES.items()},
    aten.constant_pad_nd.default: Rule(pad, linear=_pads_zeros),
    aten.pad.default: Rule(pad, linear=_pads_zeros),
    aten.tril.default: Rule("... r! c! -> ... r! c!", linear="all"),
    aten.triu.default: Rule("... r! c! -> ... r! c!", linear="all"),
    ops.as_complex: Rule("... c! -> ...", linear="all"),
    aten.view_as_real.default: Rule("... -> ... c!", linear="all"),
}
