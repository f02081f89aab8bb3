"""Values that other software holds otherwise than an emitted module: those of a loss that is fused or taken in chunks,
frozen weights in fewer bits, results that are made again (memory.Habits). Used by all of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.memory.habits import Habits
from autopar.memory.local import Local
from autopar.memory.storages import Storage
from autopar.problem.graph import Op
from autopar.problem.kernels import multiplies
from passes import ops

LOSSES = (ops.cross_entropy_sum, ops.cross_entropy_each)
"""Losses over classes."""


def of_losses(program: Mapping[str, Op], habits: Habits) -> dict[str, tuple[float, float]]:
    """Of each value that a loss over classes is made of, from the logits on: the shares of its bytes, and of those of
    its gradient, that are there at once. Empty where habits take losses as the graph has them."""
    if not habits.loss_fused and habits.loss_chunks == 1:
        return {}
    part = 1 / habits.loss_chunks
    found = {}
    for op in program.values():
        if op.target in LOSSES:
            behind, made = [], program[op.operands[0][0]]
            while made.role == "op" and not multiplies(made) and made.operands:  # casts and views behind the matmul
                behind.append(made)
                made = program[made.operands[0][0]]
            found[made.name] = part if habits.chunked_logits else 1.0, part
            for each in behind:
                as_logits = made.out_dtypes[0].itemsize / each.out_dtypes[0].itemsize
                found[each.name] = (0.0, part * as_logits) if habits.loss_fused else (part, part)
    return found


def in_fewer_bits(op: Op) -> bool:
    """Whether an op is a matrix of a block that is not trained, which may rest in fewer bits."""
    made = op.call.outs
    return op.role == "param" and bool(op.scope) and not made[0].grad and len(made[0].sizes) == 2


def made_whole(local: Local, habits: Habits) -> float:
    """Bytes of the weights that an operator makes of such with fewer bits, while it runs."""
    if not habits.frozen_bytes or not reads_frozen(local.op):
        return 0.0
    return sum(nbytes for nbytes, weight in zip(local.ins, local.op.weight, strict=True) if weight)


def reads_frozen(op: Op) -> bool:
    """Whether an operator multiplies with a matrix of a block that is not trained."""
    frozen = (
        weight and not each.grad and len(each.sizes) == 2 for each, weight in zip(op.call.ins, op.weight, strict=True)
    )
    return bool(op.scope) and any(frozen) and multiplies(op)


def in_registers(op: Op, read: Sequence[Storage], nbytes: float, habits: Habits, *, of_loss: bool) -> bool:
    """Whether a fused kernel makes the result of an operator, of `nbytes`, for its reader, so that it has no memory and
    what the operator `read` is kept in its place."""
    if habits.loss_fused and of_loss and not multiplies(op):
        return True
    saved = all(i in op.saves for i, each in enumerate(op.call.ins) if each.grad)
    sums = habits.keeps_sums and not saved and sum(storage.nbytes for storage in read) >= 2 * nbytes
    return habits.fused and not op.leads and not op.free and not sums
