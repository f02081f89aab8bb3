"""Temporary memory of a call under its runtime algorithms, and which operators pass their gradient on without a
copy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from autopar.memory.cpu_temporaries import CPU
from autopar.memory.habits import Habits
from autopar.memory.habitual import LOSSES as COPIED
from autopar.memory.habitual import made_whole
from autopar.memory.local import Local, nothing
from autopar.memory.temporaries import BACKWARD, FORWARD, reduced, same
from autopar.problem.graph import Op
from autopar.problem.view_ops import makes_view
from autopar.rules import tiles
from autopar.rules.algorithms import ALGORITHMS
from autopar.rules.arguments import named
from passes import ops
from passes.annotate_memory import TURNS

aten = torch.ops.aten


SPLIT_LOSS = "cross_entropy"
"""A loss over classes that are split over ranks (runtime/algorithms/vocab_cross_entropy.py), which keeps operand 0;
with `Habits.log_softmax` not."""


def _exponentials(local: Local, habits: Habits, *, backward: bool) -> float:
    """Temporary bytes of a loss over classes. For 16-bit logits a float32 copy, in which the kernel works; else the
    exponentials, which become the gradient in the backward. In addition to a kept log-softmax: exponentials of its
    size, and in the backward the gradient too."""
    if habits.log_softmax:
        return local.ins[0] * (1 + backward)
    itemsize = local.op.call.ins[0].itemsize
    return local.ins[0] * (4 / itemsize if itemsize < 4 else not backward)


_ALL = frozenset(named("cat.default stack.default sum.default sum.dim_IntList view_as_real.default"))
"""Operators whose operands have views of it."""
_COPIES_GRADIENT = (
    aten.expand.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.unbind.int,
    aten.diagonal.default,
    aten.unfold.default,
    aten.imag.default,
    aten.real.default,
)
"""Views whose gradient is a tensor of its own: a sum, or zeros with the gradient put in."""


def copies(op: Op, operand: int, runs: Sequence[str], habits: Habits) -> bool:
    """Whether an operator keeps a tensor of its own for the backward (a log-softmax) instead of operand number
    `operand`."""
    return (
        operand == 0
        and op.target in COPIED
        and (SPLIT_LOSS not in runs or habits.log_softmax)
        and not (habits.loss_in_place or habits.loss_fused)
    )


def in_place(op: Op, habits: Habits) -> bool:
    """Whether an operator works in the memory of its first operand, and writes the gradient there."""
    return habits.loss_in_place and op.target in COPIED


def heads_first(program: Mapping[str, Op], attention: Op) -> set[str]:
    """The operators whose results have a dim of heads in front of that of positions: `attention`, and the views that
    make its query, back to the one that turns these dims."""
    found, query = {attention.name}, program[attention.operands[0][0]]
    while makes_view(query):
        found.add(query.name)
        if query.target in TURNS:
            break
        query = program[query.operands[0][0]]
    return found


def hands_on(op: Op, operand: int, local: Local) -> bool:
    """Whether the gradient of an operand is a view of the gradient of the result."""
    if same(op, operand):
        return math.isclose(local.ins[operand], local.out)
    if op.target is aten.complex.default:
        return math.isclose(2 * local.ins[operand], local.out)
    if op.target in _ALL or op.target is ops.as_complex:
        return True
    return makes_view(op) and op.target not in _COPIES_GRADIENT


def _tiled(local: Local, count: int) -> tuple[float, float]:
    """Temporary bytes, without weights, of a product or lookup in `count` tiles (runtime/algorithms/tiled.py), forward
    and backward: parts of results and gradients; where parts are summed also the one that is added; for 16-bit numbers
    the sum is in float32."""
    (x, *_), y, sums = local.ins, local.out, 2 if local.op.call.outs[0].itemsize < 4 else 1
    if tiles.OPERATORS[local.op.target] == "lookup_tiles":
        return y + 3 * local.ins[1], y + 3 * local.ins[1]  # the rows of a tile, with their places
    if local.op.target in tiles.BY_OUTPUTS:
        return y / count, y / count + sums * x * local.op.call.ins[0].grad
    return x / count + sums * y, x / count


def _by_algorithm(runs: Sequence[str]) -> bool:
    """Whether an algorithm says itself what it takes."""
    return any(ALGORITHMS[run].takes for run in runs if run)


def _tiles(runs: Sequence[str]) -> int:
    """The number of tiles in which a call with these algorithms runs; 1 where it is not tiled."""
    return max(map(tiles.tiles, runs), default=1)


def forward_bytes(local: Local, runs: Sequence[str], habits: Habits) -> float:
    """Temporary bytes of the forward of one call; `runs` are its runtime algorithms."""
    return _forward_bytes(local, runs, habits) + made_whole(local, habits)


def _forward_bytes(local: Local, runs: Sequence[str], habits: Habits) -> float:
    if in_place(local.op, habits) or _by_algorithm(runs):
        return 0.0
    if _tiles(runs) > 1:
        return _tiled(local, _tiles(runs))[0]
    if SPLIT_LOSS in runs:
        return _exponentials(local, habits, backward=False)
    if local.on_cpu and local.op.target in CPU:
        return CPU[local.op.target][0](local)
    return FORWARD.get(local.op.target, nothing)(local)


def backward_bytes(local: Local, runs: Sequence[str], habits: Habits) -> float:
    """Temporary bytes of the backward of one call."""
    return _backward_bytes(local, runs, habits) + made_whole(local, habits)


def _backward_bytes(local: Local, runs: Sequence[str], habits: Habits) -> float:
    if in_place(local.op, habits) or _by_algorithm(runs):
        return 0.0
    if SPLIT_LOSS in runs:
        return _exponentials(local, habits, backward=True)
    if _tiles(runs) > 1:
        return _tiled(local, _tiles(runs))[1]
    if local.on_cpu and local.op.target in CPU:
        return CPU[local.op.target][1](local)
    return BACKWARD.get(local.op.target, nothing)(local) + reduced(local)
