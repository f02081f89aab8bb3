"""Plain functions that passes put into graphs where ATen has no op that can be split exactly.

They are what one device computes; `autopar.rules` says how they split and `autopar.runtime` has the split algorithms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

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


INNER, BIAS = 5, 6
"""Where a call of `experts` has them."""

Inner = Callable[[Tensor], Tensor]
"""What is between the two layers of an expert: `[n, columns of the first] -> [n, rows of the second]`."""


def halves(apply: Callable[[Tensor, Tensor], Tensor]) -> Inner:
    """`apply(first, second)` of the two halves of the columns."""
    return lambda x: apply(*x.chunk(2, -1))


def pairs(apply: Callable[[Tensor, Tensor], Tensor]) -> Inner:
    """`apply(even, odd)` of every other column."""
    return lambda x: apply(x[..., ::2], x[..., 1::2])


def expert_rows(rows: Tensor, up: Tensor, down: Tensor, ends: Tensor, inner: Inner, bias: Tensor | None = None) -> Tensor:
    """Rows sorted by expert, each through the two layers of its expert: `[n, d], [e, d, u], [e, f, o], [e], bias [e, u] -> [n, o]`.

    `inner` goes from the u columns of the first layer to the f rows of the second. Rows behind the last of `ends` give 0.
    """
    first = grouped_matmul(rows, up, ends)
    if bias is not None:
        groups = torch.bucketize(torch.arange(len(rows), device=rows.device), ends, right=True)
        first = first + torch.cat([bias, bias.new_zeros(1, bias.shape[1])])[groups]
    return grouped_matmul(inner(first), down, ends)


@cache
def inner_of(text: str) -> Inner:
    """The function that `text` writes, as `passes.inner.written` does and emitted files have it."""
    found: Inner = eval(text, {"F": F, "halves": halves, "pairs": pairs, "torch": torch})
    return found


def experts(hidden: Tensor, chosen: Tensor, gates: Tensor, up: Tensor, down: Tensor, inner: str | Inner, bias: Tensor | None = None) -> Tensor:
    """A layer of experts: `hidden [..., d]`, the numbers `chosen [..., k]` of the experts of each token and their weights
    `gates [..., k]` in the sum; experts as in `expert_rows`, in graphs with the text of `inner`. Result: `[..., o]`, of the dtype
    that gates and results promote to.

    Numbers that are no expert's (e and above) give 0.
    """
    shape = (*hidden.shape[:-1], down.shape[2])
    if hidden.is_meta or isinstance(hidden, FakeTensor):  # sizes only: who goes where is data
        return hidden.new_empty(shape, dtype=torch.promote_types(hidden.dtype, gates.dtype))
    numbers, order = chosen.flatten().sort(stable=True)
    ends = count_each(numbers, up.shape[0]).cumsum(0)
    results = expert_rows(hidden.flatten(0, -2)[order // chosen.shape[-1]], up, down, ends, inner_of(inner) if isinstance(inner, str) else inner, bias)
    weighted = results * gates.flatten()[order].unsqueeze(-1)
    back = torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=order.device))
    return weighted[back].view(*chosen.shape, down.shape[2]).sum(-2)


def blend(table: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
    """Sums of rows of `table [e, o]`: the rows `chosen [..., k]`, `gates [..., k]` times each. Result: `[..., o]`, of the dtype that both promote to."""
    dtype = torch.promote_types(table.dtype, gates.dtype)
    if chosen.is_meta or isinstance(chosen, FakeTensor):
        return gates.new_empty((*chosen.shape[:-1], table.shape[1]), dtype=dtype)
    return F.embedding_bag(chosen.flatten(0, -2), table.to(dtype), mode="sum", per_sample_weights=gates.flatten(0, -2).to(dtype)).view(*chosen.shape[:-1], table.shape[1])
