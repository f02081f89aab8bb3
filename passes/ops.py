"""Plain functions that passes put into graphs where ATen has no op that can be split exactly.

They are what one device computes; `autopar.rules` says how they split and `autopar.runtime` has the split algorithms.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from passes._torch import FakeTensor


def cross_entropy_sum(logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    """Sum over all positions of the cross-entropy of `logits [..., v]` against class numbers `labels [...]`.

    Positions whose label is `ignore_index` count nothing. With smoothing e a position gives
    (1 - e) * -logp[label] + e / v * sum over classes of -logp, as torch.nn.functional.cross_entropy. Result: [], dtype of logits.
    """
    return F.cross_entropy(
        logits.flatten(0, -2) if logits.dim() > 2 else logits,
        labels.flatten() if logits.dim() > 1 else labels,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )


def cross_entropy_each(logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    """Cross-entropy of every position of `logits [..., v]` against `labels [...]`: [...], 0 where the label is ignored."""
    flat = F.cross_entropy(
        logits.flatten(0, -2) if logits.dim() > 2 else logits,
        labels.flatten() if logits.dim() > 1 else labels,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    return flat.reshape(labels.shape)


def count_valid(labels: Tensor, ignore_index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """How many `labels [...]` are not `ignore_index`: [], as a float of `dtype` (that of the loss it divides)."""
    return (labels != ignore_index).sum(dtype=dtype)


def count_each(numbers: Tensor, classes: int) -> Tensor:
    """How often each of 0 ... classes - 1 occurs in the integers `numbers [n]`: [classes], int32; other numbers are left out."""
    named = torch.arange(classes, dtype=numbers.dtype, device=numbers.device)
    return (numbers.unsqueeze(-1) == named).sum(0, dtype=torch.int32)


def grouped_matmul(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows sorted by group, each times the matrix of its group: `[n, k], [g, k, m], [g] -> [n, m]`.

    Group i owns the rows from `ends[i - 1]` (0 for the first) to before `ends[i]`; rows behind the last end give 0.
    """
    if rows.is_meta or isinstance(rows, FakeTensor):  # sizes only: where groups end is data
        return rows.new_empty(rows.shape[0], weights.shape[2])
    starts = [0, *(int(end) for end in ends.tolist())]
    pieces = [rows[start:end] @ weights[group] for group, (start, end) in enumerate(itertools.pairwise(starts))]
    return torch.cat([*pieces, rows.new_zeros(rows.shape[0] - starts[-1], weights.shape[2])])
