"""Sum of cross-entropies with the classes split over ranks, without ever holding all logits of a row.

For one row with logits x, label y, smoothing e and V classes:

    loss = lse(x) - (1 - e) x[y] - e / V * sum of x,     lse(x) = m + log(sum of exp(x - m)),   m = max of x
    d loss / d x = softmax(x) - (1 - e) onehot(y) - e / V

Two collectives per axis, on one number per row: the maximum m, and the sum of exponentials. The rest is linear, so each
rank returns its part of it, and coordinate 0 adds the lse: a partial sum. (Megatron-LM,
core/tensor_parallel/cross_entropy.py, with the target's logit summed by the caller's reduction instead of a third
collective.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.collectives import all_reduce
from autopar.runtime.count import record
from autopar.runtime.mesh import Mesh


def vocab_cross_entropy_sum(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    vocab: int,
    axes: Sequence[int],
    mesh: Mesh,
) -> Tensor:
    """`logits [..., v_local]`, `labels [...]` in `range(vocab)` or `ignore_index` -> `[]`, a partial sum over `axes`;
    nan where a label is neither, for which one device has an error.

    Its gradient must come back whole on `axes`. Uneven and empty shards are exact. As F.cross_entropy(reduction="sum"),
    whose dtype rules it follows: the result has the dtype of the logits. The backward keeps the logits, not their
    exponentials, which are wider than 16-bit ones.
    """
    out: Tensor = _CrossEntropy.apply(
        logits, labels, ignore_index, float(label_smoothing), mesh.span(vocab, axes)[0], vocab, tuple(axes), mesh
    )
    return out


def _over(x: Tensor, axes: Sequence[int], mesh: Mesh, entry: str) -> Tensor:
    for axis in reversed(axes):
        record("all_reduce", axis, x.numel() * x.element_size(), "vocab_cross_entropy_sum")
        x = all_reduce(x, axis, mesh, entry)
    return x


def _wide(logits: Tensor) -> Tensor:
    """Logits in float32 at least: a copy of narrower ones."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _below(wide: Tensor, top: Tensor, logits: Tensor) -> Tensor:
    """By how much each is below the maximum of its row, in the memory of the copy where `wide` is one."""
    return wide - top.unsqueeze(-1) if wide is logits else wide.sub_(top.unsqueeze(-1))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        ignore_index: int,
        smoothing: float,
        start: int,
        vocab: int,
        axes: tuple[int, ...],
        mesh: Mesh,
    ) -> Tensor:
        wide = _wide(logits)
        valid = labels != ignore_index
        width = logits.shape[-1]
        top = wide.amax(-1) if width else wide.new_full(labels.shape, -math.inf)
        top = _over(top, axes, mesh, "Pmax")
        at = labels - start
        here = valid & (at >= 0) & (at < width)
        at = at.where(here, 0)
        part = -(smoothing / vocab) * wide.sum(-1) if smoothing else torch.zeros_like(top)
        if width:
            part = part - (1 - smoothing) * wide.gather(-1, at.unsqueeze(-1)).squeeze(-1).where(here, 0.0)
        exps = _below(wide, top, logits).exp_()
        log_total = _over(exps.sum(-1), axes, mesh, "P").log()
        if all(mesh.coord[axis] == 0 for axis in axes):
            part = part + top + log_total
        ctx.save_for_backward(logits, top, log_total, at, here, valid)
        ctx.smoothing, ctx.vocab = smoothing, vocab
        known = (labels >= 0) & (labels < vocab)  # to raise an error would be to wait for the device
        return part.where(known, math.nan).where(valid, 0.0).sum().to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, top, log_total, at, here, valid = ctx.saved_tensors
        grad = _below(_wide(logits), top, logits).sub_(log_total.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            grad.sub_(ctx.smoothing / ctx.vocab)
        if grad.shape[-1]:
            grad.scatter_add_(-1, at.unsqueeze(-1), (here.to(grad.dtype) * (ctx.smoothing - 1)).unsqueeze(-1))
        grad.mul_((valid * grads[0].to(grad.dtype)).unsqueeze(-1))
        return grad.to(logits.dtype), None, None, None, None, None, None, None
