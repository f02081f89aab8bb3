"""What each Op can do on one mesh axis, before any recipe or merging.

Operators follow their rule; a parameter may rest replicated or cut along any dim, or be whole for its readers while it
rests, and is updated, cut (ZeRO-1 and 2, `problem.at_rest`); buffers and constants are replicated; inputs are
replicated or cut along the batch; a port passes anything through; the loss must come out whole on every rank, other
outputs may stay cut (they are handed out as DTensors).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy

from autopar.layout import dim_of, is_shard, shard
from autopar.layout import sections_of as weights_of
from autopar.problem.at_rest import EACH
from autopar.problem.graph import Op, Program, Ref
from autopar.rules import options_for
from autopar.rules.language import Option, Size, Use
from autopar.rules.matches import options
from autopar.rules.reshapes import quotient
from autopar.rules.rule import Rule
from autopar.rules.tiles import in_tiles

Sections = tuple[tuple[int, ...], ...]


Tiles = Callable[[Op, int], Sequence[int]]
"""In how many tiles the weight of an Op may be gathered on an axis of so many ranks: the numbers that are offered."""


def untiled(op: Op, ways: int) -> Sequence[int]:
    """No weight is gathered in tiles."""
    return ()


def table_of(
    program: Program, ways: int, sections: Sections, rules: Mapping[Any, Rule] | None, tiles: Tiles = untiled
) -> dict[str, list[Option]]:
    """The options of every Op on an axis of `ways` ranks, by name."""
    known: dict[object, list[Option]] = {}  # parts of a run have the same operators
    found: dict[str, list[Option]] = {}
    for op in program.ops.values():
        if (key := program.same_as(op)) not in known:
            known[key] = options_of(op, ways, sections, rules)
        found[op.name] = known[key]
    for op in program.ops.values():
        if counts := tiles(op, ways):
            found[op.name] = found[op.name] + in_tiles(op.target, found[op.name], counts)
    for name in program.following:
        found[name] = found[name] + _of_gathered(found[name])
    return found


def _of_gathered(found: list[Option]) -> list[Option]:
    """Further options of operators that reorder or cast a parameter, whose options are `found`: where the parameter
    rests cut and its leaf is whole, they compute the whole result, and its gradient is cut as the parameter is."""
    cut = [
        option
        for option in found
        if not option.run and option.ins[0].grad == option.ins[0].value and is_shard(option.ins[0].value)
    ]
    return [
        Option(f"{option.factor}/once", (Use("R", option.ins[0].grad),), (Use("R", option.outs[0].grad),))
        for option in cut
    ]


def options_of(op: Op, ways: int, sections: Sections, rules: Mapping[Any, Rule] | None) -> list[Option]:
    """The options of one Op on an axis of `ways` ranks."""
    if op.role in ("op", "port"):
        found = (
            options_for(op.call, ways, sections=sections, rules=rules)
            if op.role == "op"
            else options("... -> ...", op.call, ways, linear="all", sections=sections)
        )
        return [option for option in found if not _needs_planned_sizes(op, option)]
    if op.role == "param":
        return _parameter_options(op, ways, sections)
    if op.samples is not None and splits_samples(op, ways):
        return [_at_rest("", op, "R"), _at_rest("b", op, shard(op.samples))]
    if op.role == "output":
        entries = ["R", *(shard(d) for d, n in enumerate(op.call.ins[0].sizes) if n >= ways)]
        return [Option(entry, (Use(entry, "-"),), (), split=entry != "R") for entry in entries]
    if op.role in ("loss", "mutation"):
        return [Option("", (Use("R", "R" if op.call.ins[0].grad else "-"),), ())]
    return [_at_rest("", op, "R")]


def splits_samples(op: Op, ways: int) -> bool:
    """Whether an Op is an input whose samples can be split over `ways` ranks."""
    return op.samples is not None and op.call.outs[0].sizes[op.samples] % ways == 0


def _needs_planned_sizes(op: Op, option: Option) -> bool:
    """Whether the option cuts a dim of symbolic size in sections of which only the planned sizes say how many there are
    or where they end: with another batch or sequence such a layout would name other elements than the operator gives.
    Samples side by side (`torch.cat([chosen, rejected])`: sections of b samples each) are as many for all sizes."""
    uses = zip((*option.ins, *option.outs), op.tensors, op.batch, strict=True)
    cut = [(use.value, tensor.shape[dim_of(use.value)], batch) for use, tensor, batch in uses if is_shard(use.value)]
    plain = [size for entry, size, _ in cut if len(weights_of(entry)) == 1]
    by_itself = "/" in option.factor  # cut as other operators show: all tensors are cut in the same sections
    return any(
        len(weights_of(entry)) > 1
        and not isinstance(size, int)
        and not (
            dim_of(entry) in batch
            and (section := _section(entry, size)) is not None
            and (bool(plain) or by_itself)
            and all(sympy.expand(section - other) == 0 for other in plain)
        )
        for entry, size, batch in cut
    )


def _section(entry: str, size: Size) -> Size | None:
    """The size of each section of a cut dim; None where they are not alike for all sizes of the inputs."""
    weights = weights_of(entry)
    return quotient(size, len(weights)) if set(weights) == {1} else None


def _at_rest(factor: str, op: Op, entry: str) -> Option:
    """The option of a value at rest with layout `entry`, whose gradient has the same layout: the optimizer then steps
    the part that the rank holds."""
    grad = entry if op.call.outs[0].grad else "-"
    return Option(factor, (), (Use(entry, grad),), split=entry != "R")


def _parameter_options(op: Op, ways: int, sections: Sections) -> list[Option]:
    """The options of a parameter."""
    found = [_at_rest("", op, "R")]
    for dim, size in enumerate(op.call.outs[0].sizes):
        if _can_be_cut(op, size, ways):
            found.append(_at_rest(f"d{dim}", op, shard(dim)))
        found += [
            _at_rest(f"d{dim}/{':'.join(map(str, cut))}", op, shard(dim, cut))
            for cut in sections
            if sum(cut) == size and all(n % ways == 0 for n in cut)
        ]
    return found + [_gathered(op, dim, run) for dim in _even_dims(op, ways) for run in ("", EACH)]


def _can_be_cut(op: Op, size: int, ways: int) -> bool:
    """Whether a parameter can rest cut along a dim of `size`. A complex one only evenly: optimizers see it as real, and
    of uneven shards DTensor makes a copy for that (torch 2.13), so that the parameter would never change."""
    return size >= ways and (size % ways == 0 or not op.out_dtypes[0].is_complex)


def _gathered(op: Op, dim: int, run: str) -> Option:
    """A parameter that its readers see whole and that rests cut along `dim`, where its gradient is scattered to."""
    return Option(f"d{dim}{'' if not run else '/' + run}", (), (Use("R", shard(dim)),), run, split=True)


def _even_dims(op: Op, ways: int) -> list[int]:
    """The dims along which a trained parameter may rest cut where its leaf is whole. Readers see no difference, so only
    the two dims that divide most evenly are offered, the first ones of equals; two, because another mesh axis may cut
    one of them."""
    tensor = op.call.outs[0]
    if ways < 2 or not tensor.grad:
        return []
    longest = {
        dim: -(-size // ways) * ways / size for dim, size in enumerate(tensor.sizes) if _can_be_cut(op, size, ways)
    }
    return sorted(longest, key=lambda dim: (longest[dim], dim))[:2]


def sections_of(program: Program, rules: Mapping[Any, Rule] | None = None) -> Sections:
    """The sections that dims of fused projections fall into (q, k, v in one weight), and those of samples side by side,
    in absolute sizes.

    Projections show where an operator takes their output apart: a split, or a view whose outer factor is not the one
    to cut. Only dims that come straight from a weight count, so that the halves of rotary embeddings do not. Samples
    show where an operator puts them together.
    """
    found: dict[tuple[int, ...], None] = {}
    for op in {program.same_as(op): op for op in program.ops.values()}.values():
        if op.role != "op" or not op.operands:
            continue
        for option in options_for(op.call, 1, rules=rules):
            found |= _of_samples(op, option)
            for index, use in enumerate(option.ins):
                if (
                    "/" in use.value
                    and (cut := _absolute(op, index, use.value))
                    and _from_weight(program, op.operands[index], sum(cut))
                ):
                    found[cut] = None
    return tuple(found)


def _of_samples(op: Op, option: Option) -> dict[tuple[int, ...], None]:
    """The sections, in absolute sizes, in which outputs of `op` have samples side by side under an option."""
    if _needs_planned_sizes(op, option):
        return {}
    return {
        (tensor.sizes[dim_of(use.value)] // count,) * count: None
        for use, tensor in zip(option.outs, op.call.outs, strict=True)
        if is_shard(use.value)
        and (count := len(weights_of(use.value))) > 1
        and not isinstance(tensor.shape[dim_of(use.value)], int)
    }


def _absolute(op: Op, index: int, entry: str) -> tuple[int, ...] | None:
    size = op.call.ins[index].shape[dim_of(entry)]
    weights = weights_of(entry)
    if not isinstance(size, int) or size % sum(weights) or len(weights) > 4:
        return None
    return tuple(w * (size // sum(weights)) for w in weights)


def _from_weight(program: Program, ref: Ref, size: int) -> bool:
    """Whether the last dim of `ref`, of that size, is an output dim of a weight a few same-shaped operators up."""
    for _ in range(6):
        op = program.ops[ref[0]]
        if op.role != "op":
            return False
        if any(w and size in t.sizes for w, t in zip(op.weight, op.call.ins, strict=True)):
            return True
        here = op.call.outs[ref[1]].sizes
        same = [r for r, t in zip(op.operands, op.call.ins, strict=True) if math.prod(t.sizes) == math.prod(here)]
        if not same:
            return False
        ref = same[0]
    return False
