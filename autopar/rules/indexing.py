"""Reading and writing at positions: gather, scatter, index, masks as indices, searchsorted, one-hot.

The indexed dim is always whole. Other dims can be cut, and so can the positions where they are only read."""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.arguments import given, line, rank_of, replicated, rule, words
from autopar.rules.language import Call, Tensor
from autopar.rules.rule import Rule
from passes import ops

aten = torch.ops.aten


def gather(call: Call) -> str:
    """The indexed dim is whole, the positions along it can be cut; another dim can be cut where both operands have the
    same size."""
    return _elementwise(call, given(call)["dim"], ins=(0, 1), out=1, read=True)


def scatter(call: Call) -> str:
    """As `gather` for writing: the positions are whole too."""
    return _elementwise(call, given(call)["dim"], ins=tuple(range(len(call.ins))), out=0, read=False)


def _elementwise(call: Call, dim: int, *, ins: tuple[int, ...], out: int, read: bool) -> str:
    """The rule of operators with positions for each element: `ins` are operands whose shapes matter, `out` is the one
    with the shape of the output, `read` says that positions are read and may be cut."""
    rank = rank_of(call)
    if not rank:
        return replicated(call)
    shapes = [call.ins[i].shape for i in ins if len(call.ins[i].shape) == rank]
    free = [i for i in range(rank) if i != dim % rank and all(s[i] == shapes[0][i] for s in shapes)]
    sides = []
    for number in ins:
        other = {
            i: (f"z{i}" if read and number == out and i == dim % rank else f"x{number}n{i}!")
            for i in range(rank)
            if i not in free
        }
        sides.append(line(rank, other) if len(call.ins[number].shape) == rank else "")
    return rule(sides, [sides[out]])


def index_select(call: Call) -> str:
    """Rows by their numbers, which can be cut."""
    rank = rank_of(call)
    if not rank or len(call.ins[1].shape) != 1:
        return replicated(call)
    dim = given(call)["dim"] % rank
    return rule([line(rank, {dim: "y!"}), "z"], [line(rank, {dim: "z"})])


def index_write(call: Call) -> str:
    """index_add, index_copy, index_fill: the written dim and the positions are whole."""
    rank = rank_of(call)
    if not rank:
        return replicated(call)
    dim = given(call)["dim"] % rank
    rest = [line(rank, {dim: "z!"}) if len(t.shape) == rank else "" for t in call.ins[2:]]
    return rule([line(rank, {dim: "y!"}), "z!" if call.ins[1].shape else "", *rest], [line(rank, {dim: "y!"})])


def repeated(call: Call) -> str:
    """repeat_interleave with a tensor of counts: the repeated dim is whole; all of them where no dim is named."""
    dim, rank = given(call)["dim"], rank_of(call)
    if dim is None or not rank:
        return replicated(call)
    return rule([line(rank, {dim % rank: "y!"}), "n!"], [line(rank, {dim % rank: "z!"})])


def index(call: Call) -> str:
    """Several index tensors, broadcast against each other to one block of dims. The block is where the first index is,
    or in front where the indices are not adjacent. Indexed dims are whole; the block and all other dims can be cut."""
    places = [i for i, item in enumerate(given(call)["indices"]) if isinstance(item, Tensor)]
    rank = rank_of(call)
    block = max(len(t.shape) for t in call.ins[1:])
    left = words(rank, {i: f"y{i}!" for i in places})
    sides = [_block(t, block, "") for t in call.ins[1:]]
    out = _placed(left, places, _joined(sides, block))
    if _has_mask(call) or len(call.outs[0].shape) != len(out):
        return replicated(call)
    return rule([" ".join(left), *sides], [" ".join(out)])


def index_put(call: Call) -> str:
    """As `index` for writing: the block of positions is whole too."""
    indices = given(call)["indices"]
    places = [i for i, item in enumerate(indices) if isinstance(item, Tensor)]
    positions, values = call.ins[1:-1], call.ins[-1]
    rank, block = rank_of(call), max(len(t.shape) for t in positions)
    left = words(rank, {i: f"y{i}!" for i in places})
    out = _placed(left, places, [f"z{i}!" for i in range(block)])
    if _has_mask(call) or len(values.shape) > len(out):
        return replicated(call)
    last = out[len(out) - len(values.shape) :]
    written = " ".join("1" if n == 1 else w for w, n in zip(last, values.shape, strict=True))
    return rule([" ".join(left), *(_block(t, block, "!") for t in positions), written], [" ".join(left)])


def _has_mask(call: Call) -> bool:
    """Whether an index is a mask (bool or uint8), which consumes as many dims as it has and gives a number of rows that
    depends on data."""
    return any(item.itemsize == 1 for item in given(call)["indices"] if isinstance(item, Tensor))


def _block(tensor: Tensor, rank: int, mark: str) -> str:
    """The words of one index tensor, aligned at the right of the block of `rank` dims."""
    extra = rank - len(tensor.shape)
    return " ".join("1" if n == 1 else f"z{extra + i}{mark}" for i, n in enumerate(tensor.shape))


def _joined(sides: list[str], rank: int) -> list[str]:
    """The words of the whole block; `1` where all index tensors have size 1."""
    named = {word for side in sides for word in side.split()}
    return [word if (word := f"z{i}") in named else "1" for i in range(rank)]


def _placed(left: list[str], places: list[int], block: list[str]) -> list[str]:
    """The words of the result: those of the operand with the block in place of the indexed dims."""
    rest = [w for i, w in enumerate(left) if i not in places]
    neighbours = places == list(range(places[0], places[0] + len(places)))
    at = places[0] if neighbours else 0
    return [*rest[:at], *block, *rest[at:]]


def segments(call: Call) -> str:
    """segment_reduce: sections of a whole dim, each reduced; the dims before it are those of the lengths too."""
    axis, rank = given(call)["axis"] % max(1, rank_of(call)), rank_of(call)
    inside = " ".join(words(axis))
    return rule(
        [line(rank, {axis: "y!"}), *(f"{inside} n{i}!" for i in range(len(call.ins) - 1))], [line(rank, {axis: "z!"})]
    )


def part_write(call: Call) -> str:
    """slice_scatter, select_scatter: a tensor written into part of a whole dim."""
    rank = rank_of(call)
    dim = given(call)["dim"] % rank
    source = words(rank, {dim: "z!"})
    if len(call.ins[1].shape) < rank:
        source.remove("z!")
    return rule([line(rank, {dim: "y!"}), " ".join(source)], [line(rank, {dim: "y!"})])


def searchsorted(call: Call) -> str:
    """Boundaries, and their order where it is given, are whole along their last dim. The values that are searched can
    be cut; where boundaries have rows of their own, together with these."""
    ordered = len(call.ins) > 2
    if len(call.ins[0].shape) == 1:
        return f"n!, ...{', n!' * ordered} -> ..."
    return f"... n!, ... m{', ... n!' * ordered} -> ... m"


def isin(call: Call) -> str:
    """Any dim of the elements can be cut; the set that they are looked up in is whole."""
    return rule(["...", line(len(call.ins[1].shape), {d: f"n{d}!" for d in range(len(call.ins[1].shape))})], ["..."])


def _writes_linear_in(call: Call) -> str:
    """The linearity (Rule.linear) of writes, whether they accumulate or overwrite: in target and source together."""
    return f"0+{len(call.ins) - 1}" if call.ins[-1].floating else ""


RULES: dict[Any, Rule] = {
    aten.bincount.default: Rule(replicated),
    aten.bucketize.Tensor: Rule("..., n! -> ..."),
    aten.gather.default: Rule(gather, linear="first"),
    aten.histc.default: Rule(replicated),
    aten.index.Tensor: Rule(index, linear="first"),
    aten.index_add.default: Rule(index_write, linear=_writes_linear_in),
    aten.index_copy.default: Rule(index_write, linear=_writes_linear_in),
    aten.index_fill.int_Scalar: Rule(index_write),
    aten.index_put.default: Rule(index_put, linear=_writes_linear_in),
    aten.index_reduce.default: Rule(index_write),
    aten.index_select.default: Rule(index_select, linear="first"),
    aten.isin.Tensor_Tensor: Rule(isin),
    aten.masked_scatter.default: Rule(replicated),
    aten.multinomial.default: Rule("... n! -> ... k!", random=True),
    aten.one_hot.default: Rule("... -> ... n!"),
    aten.repeat_interleave.self_Tensor: Rule(repeated, linear="first"),
    aten.scatter.src: Rule(scatter, linear=_writes_linear_in),
    aten.scatter.value: Rule(scatter),
    aten.scatter_add.default: Rule(scatter, linear=_writes_linear_in),
    aten.scatter_reduce.two: Rule(scatter),
    aten.searchsorted.Tensor: Rule(searchsorted),
    aten.segment_reduce.default: Rule(segments),
    aten.select_scatter.default: Rule(part_write, linear="all"),
    aten.slice_scatter.default: Rule(part_write, linear="all"),
    ops.fill_rows: Rule("b s! d, b s!, b n! d -> b s! d", linear="0+2"),
    ops.picked_places: Rule("... n! -> ... k!"),
}
