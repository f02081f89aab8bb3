"""What operators take for themselves while they run, and which of them hand their gradient on without a copy.

Read off torch's derivatives.yaml and FunctionsManual.cpp, and the runtime's own algorithms; the tests compare with what is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autopar.memory.habits import Habits
from autopar.problem.graph import Op
from autopar.problem.looking import looks
from autopar.rules import tiles
from passes import ops
from passes.tables import BINARY

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Local:
    """One call on one rank: bytes of operands and results, of what its backward keeps beside them, and whether it runs on a CPU."""

    op: Op
    ins: Sequence[float]
    outs: Sequence[float]
    extra: float = 0.0
    on_cpu: bool = False

    @property
    def out(self) -> float:
        return self.outs[0] if self.outs else 0.0


Bytes = Callable[[Local], float]
COPIED = (ops.cross_entropy_sum, ops.cross_entropy_each)
"""Operators that keep a tensor of the size of operand 0, their log-softmax, and not operand 0."""


def nothing(local: Local) -> float:
    """No bytes."""
    return 0.0


def _results(times: float) -> Bytes:
    return lambda local: times * local.out


def _operand(times: float) -> Bytes:
    return lambda local: times * local.ins[0]


def _scores(times: float) -> Bytes:
    """Of attention that is not fused, which keeps its scores: as many again."""
    return lambda local: times * local.extra if local.op.copies else 0.0


def _reduced(local: Local) -> float:
    """A product with an operand that is broadcast: its gradient is made at full size, then summed."""
    return local.out if any(0 < nbytes < local.out for nbytes in local.ins) else 0.0


def _quotient(local: Local) -> float:
    """-gradient * ((x / y) / y) at full size, where y has a gradient."""
    return 2 * local.out if len(local.ins) > 1 and local.op.call.ins[1].grad else 0.0


def _wide(local: Local) -> float:
    """Rows in the dtype in which the plain operators of a norm compute: float32 at least."""
    itemsize = local.op.call.outs[0].itemsize
    return local.out * max(1.0, 4 / itemsize)


def _norm(local: Local) -> float:
    """What is wider than the result, before it is cast."""
    return _wide(local) if _wide(local) > local.out else 0.0


def _norm_back(local: Local) -> float:
    """Of rows: that of what the weight is multiplied with, theirs from the product, that of the mean, and two of the power; by then what was kept for the weight's own gradient is gone, and so is
    that of the result where it needed no cast. Of the weight alone its own at full size, and the gradient cast."""
    rows, *weight = (each.grad for each in local.op.call.ins)
    if not rows:
        return _wide(local) + _norm(local)
    return (5 - any(weight)) * _wide(local) - local.ins[0] - local.out * (_norm(local) == 0.0)


FORWARD: dict[object, Bytes] = {
    aten.scaled_dot_product_attention.default: _scores(1.0),
    ops.experts: lambda local: 0.5 * local.extra,  # results put in order and weighted
}
"""Bytes beside operands, results and what is kept, while the forward runs."""

BACKWARD: dict[object, Bytes] = {
    aten.pow.Tensor_Scalar: _operand(2.0),  # gradient * (n * x ** (n - 1))
    aten.square.default: _operand(2.0),  # a power, too
    aten.mul.Tensor: _reduced,
    aten.div.Tensor: _quotient,
    aten.scaled_dot_product_attention.default: _scores(2.0),
    ops.cross_entropy_sum: _operand(1.0),  # gradient of the log-softmax, then that of the logits
    ops.cross_entropy_each: _operand(1.0),
    ops.experts: lambda local: 0.5 * local.extra,
}
"""Bytes beside gradients of operands and results, while the backward runs."""

ON_CPU: dict[object, tuple[Bytes, Bytes]] = {aten.rms_norm.default: (_norm, _norm_back)}
"""Both of operators that run as plain ones on a CPU (layer_norm.cpp, rms_norm_composite)."""

SPLIT_LOSS: tuple[Bytes, Bytes] = (_operand(1.0), _operand(2.0))
"""Of a loss over classes that are split over ranks (runtime/algorithms/vocab_cross_entropy.py): forward and backward."""

_ADDED = (aten.add.Tensor, aten.sub.Tensor)
_COPIES_GRADIENT = (aten.expand.default, aten.select.int, aten.slice.Tensor, aten.narrow.default, aten.split.Tensor,
                    aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, aten.diagonal.default, aten.unfold.default)
"""Views whose gradient is a tensor of its own: a sum, or zeros with the gradient put in."""


PRODUCTS = (aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default, ops.affine)
"""Operators whose kernels read the gradient as rows in memory."""


def made_whole(local: Local, gradient_bytes: float) -> float:
    """Bytes of the gradient of a result as rows, where it is that of a sum: one number, seen at full size."""
    return local.out if local.op.target in PRODUCTS and gradient_bytes < local.out else 0.0


def in_place(op: Op, habits: Habits) -> bool:
    """Whether an operator works in the memory of its first operand, and leaves the gradient there."""
    return habits.loss_in_place and op.target in COPIED


def hands_on(op: Op, operand: int, local: Local) -> bool:
    """Whether the gradient of an operand looks at the memory of that of the result."""
    if op.target in _ADDED:
        return math.isclose(local.ins[operand], local.out) and (operand == 0 or op.target is aten.add.Tensor)
    if op.target in (aten.sum.default, aten.sum.dim_IntList, aten.cat.default):
        return True
    return looks(op) and op.target not in _COPIES_GRADIENT


def _tiled(local: Local, count: int) -> tuple[float, float]:
    """Of a product or lookup in `count` tiles (runtime/algorithms/tiled.py), beside weights: forward and backward. Parts of results and gradients, and where
    parts add up the one that is added; of 16-bit numbers the sum is as wide as two of them."""
    (x, *_), y, sums = local.ins, local.out, 2 if local.op.call.outs[0].itemsize < 4 else 1
    if tiles.OPERATORS[local.op.target] == "lookup_tiles":
        return y + 3 * local.ins[1], y + 3 * local.ins[1]  # the rows of a tile, with their places
    if local.op.target in tiles.BY_OUTPUTS:
        return y / count, y / count + sums * x * local.op.call.ins[0].grad
    return x / count + sums * y, x / count


def _tiles(runs: Sequence[str]) -> int:
    return max(map(tiles.tiles, runs), default=1)


def forward_bytes(local: Local, runs: Sequence[str], habits: Habits) -> float:
    """Temporaries of the forward of one call; `runs` are its runtime algorithms."""
    if in_place(local.op, habits):
        return 0.0
    if _tiles(runs) > 1:
        return _tiled(local, _tiles(runs))[0]
    if local.on_cpu and local.op.target in ON_CPU:
        return ON_CPU[local.op.target][0](local)
    return SPLIT_LOSS[0](local) if "cross_entropy" in runs else FORWARD.get(local.op.target, nothing)(local)


def backward_bytes(local: Local, runs: Sequence[str], habits: Habits) -> float:
    """Temporaries of the backward of one call."""
    if in_place(local.op, habits):
        return 0.0
    if "cross_entropy" in runs:
        return SPLIT_LOSS[1](local)
    if _tiles(runs) > 1:
        return _tiled(local, _tiles(runs))[1]
    if local.on_cpu and local.op.target in ON_CPU:
        return ON_CPU[local.op.target][1](local)
    if local.op.target in BINARY and local.op.target not in BACKWARD:
        return _reduced(local)
    return BACKWARD.get(local.op.target, nothing)(local)
