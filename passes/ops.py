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

from passes._torch import FakeTensor, assert_async


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, weight: Tensor | None = None
) -> Tensor:
    """Sum over all positions of the cross-entropy of `logits [..., v]` against class numbers `labels [...]`.

    Positions whose label is `ignore_index` count nothing. With smoothing e a position gives
    (1 - e) * -logp[label] + e / v * sum over classes of -logp, as torch.nn.functional.cross_entropy; each -logp times
    that of its class where there are weights, `weight [v]`. Result: [], dtype of logits.
    """
    return _cross_entropy(logits, labels, ignore_index, label_smoothing, weight, "sum")


def cross_entropy_each(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, weight: Tensor | None = None
) -> Tensor:
    """Cross-entropy of every position of `logits [..., v]` against `labels [...]`, as in `cross_entropy_sum`: [...], 0
    where the label is ignored."""
    return _cross_entropy(logits, labels, ignore_index, label_smoothing, weight, "none").reshape(labels.shape)


def _cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, weight: Tensor | None, reduction: str
) -> Tensor:
    """torch's cross_entropy of flattened positions; classes are the last dim of `logits`."""
    return F.cross_entropy(
        logits.flatten(0, -2) if logits.dim() > 2 else logits,
        labels.flatten() if logits.dim() > 1 else labels,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def ctc_each(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """CTC loss of every sample of `log_probs [t, b, c]` against the first of its `targets [b, s]`, as many as
    `target_lengths [b]` says, in the first `input_lengths [b]` steps: [b]."""
    return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity)


def noised(x: Tensor, noise: Tensor, keep: float) -> Tensor:
    """`x / keep * noise` in training, `noise` of sizes that broadcast to those of `x`; a model that evaluates has `x`
    instead. Result: as `x`."""
    return x / keep * noise


def statistic(total: Tensor, count: int, running: Tensor) -> Tensor:
    """A mean over a batch: `total [1, c, 1, ...]` over `count`, in training; a model that evaluates has `running [c]`
    instead. Result: as `total`."""
    return total / count


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x [..., i] @ weight [i, o] + bias [o]` in one kernel: [..., o]."""
    return F.linear(x, weight.t(), bias)


def as_complex(parts: Tensor) -> Tensor:
    """Complex numbers of their parts `[..., 2]`, which may lie in memory in any order: [...]."""
    return torch.view_as_complex(parts.contiguous())


def count_valid(labels: Tensor, ignore_index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """How many `labels [...]` are not `ignore_index`: [], as a float of `dtype` (that of the loss it divides)."""
    return (labels != ignore_index).sum(dtype=dtype)


def weigh_valid(labels: Tensor, weight: Tensor, ignore_index: int) -> Tensor:
    """Sum of the weights, `weight [v]`, of the classes `labels [...]` that are not `ignore_index`: [], dtype of the
    weights."""
    ignored = labels == ignore_index
    return weight.take(labels.masked_fill(ignored, 0)).masked_fill(ignored, 0).sum()


def count_each(numbers: Tensor, classes: int) -> Tensor:
    """How often each of 0 ... classes - 1 occurs in the integers `numbers [n]`: [classes], int32; other numbers are
    left out."""
    named = torch.arange(classes, dtype=numbers.dtype, device=numbers.device)
    return (numbers.unsqueeze(-1) == named).sum(0, dtype=torch.int32)


def grouped_matmul(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows sorted by group, each times the matrix of its group: `[n, k], [g, k, m], [g] -> [n, m]`.

    Group i owns the rows from `ends[i - 1]` (0 for the first) to before `ends[i]`; rows behind the last end give 0.
    """
    if rows.is_meta or isinstance(rows, FakeTensor):  # sizes only: where groups end is data
        return rows.new_empty(rows.shape[0], weights.shape[2])
    lengths = [end - start for start, end in itertools.pairwise((0, *ends.tolist(), len(rows)))]
    # the gradients of slices, one by one, would each be a tensor of the size of all rows, or of all weights
    *pieces, behind = rows.split(lengths)
    made = [piece @ weight for piece, weight in zip(pieces, weights.unbind(), strict=True)]
    return torch.cat([*made, behind.new_zeros(len(behind), weights.shape[2])])


UP, INNER, BIAS = 3, 5, 6
"""The positions of these arguments in a call of `experts`."""
MODE = 3
"""The position of this argument in a call of `bag`."""

Inner = Callable[[Tensor], Tensor]
"""The function between both layers of an expert: `[n, columns of the first] -> [n, rows of the second]`."""


def halves(apply: Callable[[Tensor, Tensor], Tensor]) -> Inner:
    """`apply(first, second)` of the two halves of the columns."""
    return lambda x: apply(*x.chunk(2, -1))


def pairs(apply: Callable[[Tensor, Tensor], Tensor]) -> Inner:
    """`apply(even, odd)` of every other column."""
    return lambda x: apply(*x.unflatten(-1, (-1, 2)).unbind(-1))


def expert_rows(
    rows: Tensor, up: Tensor, down: Tensor, ends: Tensor, inner: Inner, bias: Tensor | None = None
) -> Tensor:
    """Rows sorted by expert, each through the two layers of its expert: `[n, d], [e, d, u], [e, f, o], [e], bias [e, u]
    -> [n, o]`.

    `inner` goes from the u columns of the first layer to the f rows of the second. Rows behind the last of `ends` give
    0.
    """
    first = grouped_matmul(rows, up, ends)
    if bias is not None:
        groups = torch.bucketize(torch.arange(len(rows), device=rows.device), ends, right=True)
        first = first + torch.cat([bias, bias.new_zeros(1, bias.shape[1])])[groups]
    return grouped_matmul(inner(first), down, ends)


@cache
def inner_of(text: str) -> Inner:
    """The function that `text` writes, as `passes.expert_activation.written` does and emitted files have it."""
    found: Inner = eval(text, {"F": F, "halves": halves, "pairs": pairs, "torch": torch})
    return found


def experts(
    hidden: Tensor,
    chosen: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    inner: str | Inner,
    bias: Tensor | None = None,
) -> Tensor:
    """A layer of experts: `hidden [..., d]`, the numbers `chosen [..., k]` of the experts of each token and their
    weights `gates [..., k]` in the sum; experts as in `expert_rows`, in graphs with the text of `inner`. Result: `[...,
    o]`, of the dtype that gates and results promote to.

    Numbers that are no expert's (e and above) give 0.
    """
    shape = (*hidden.shape[:-1], down.shape[2])
    if hidden.is_meta or isinstance(hidden, FakeTensor):  # sizes only: who goes where is data
        return hidden.new_empty(shape, dtype=torch.promote_types(hidden.dtype, gates.dtype))
    numbers, order = chosen.flatten().sort(stable=True)
    ends = count_each(numbers, up.shape[0]).cumsum(0)
    results = expert_rows(
        hidden.flatten(0, -2)[order // chosen.shape[-1]],
        up,
        down,
        ends,
        inner_of(inner) if isinstance(inner, str) else inner,
        bias,
    )
    weighted = results * gates.flatten()[order].unsqueeze(-1)
    back = torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=order.device))
    return weighted[back].view(*chosen.shape, down.shape[2]).sum(-2)


def bag(table: Tensor, chosen: Tensor, gates: Tensor | None = None, mode: str = "sum", padding: int = -1) -> Tensor:
    """Of each bag of rows of `table [v, d]`, `chosen [..., n]`, their sum, mean or max by `mode`; in sums each `gates
    [..., n]` times. Row `padding` (-1: none) counts nothing. Result: `[..., d]`, of the dtype that table and gates
    promote to.
    """
    dtype = table.dtype if gates is None else torch.promote_types(table.dtype, gates.dtype)
    if chosen.is_meta or isinstance(chosen, FakeTensor):
        return table.new_empty((*chosen.shape[:-1], table.shape[1]), dtype=dtype)
    weights = None if gates is None else gates.reshape(-1, chosen.shape[-1]).to(dtype)
    found = F.embedding_bag(
        chosen.reshape(-1, chosen.shape[-1]),
        table.to(dtype),
        mode=mode,
        per_sample_weights=weights,
        padding_idx=padding if padding >= 0 else None,
    )
    return found.view(*chosen.shape[:-1], table.shape[1])


def ragged_bags(
    table: Tensor,
    chosen: Tensor,
    starts: Tensor,
    gates: Tensor | None = None,
    mode: str = "sum",
    padding: int = -1,
    last: bool = False,
) -> Tensor:
    """As `bag`, of bags of several lengths: one behind the other in `chosen [n]`, and `gates [n]`, from `starts [b]` on
    (with `last` also the end of the last one, `[b + 1]`). Result: `[b, d]`.
    """
    if chosen.is_meta or isinstance(chosen, FakeTensor):
        return table.new_empty((starts.shape[0] - last, table.shape[1]))
    return F.embedding_bag(
        chosen,
        table,
        starts,
        mode=mode,
        per_sample_weights=gates,
        include_last_offset=last,
        padding_idx=padding if padding >= 0 else None,
    )


def picked_places(mask: Tensor, count: int) -> Tensor:
    """The `count` places of each row of `mask [..., n]` where it is true, in order: [..., count].

    Where a row has more or fewer of them a ValueError is raised (on a GPU, which is not waited for, its own assertion
    fails).
    """
    if mask.is_meta or isinstance(mask, FakeTensor):  # sizes only: how many there are is data
        return mask.new_empty((*mask.shape[:-1], count), dtype=torch.int64)
    found = mask.sum(-1)
    if found.device.type == "cpu" and bool((found != count).any()):
        raise ValueError(
            f"a mask in a buffer picks {found.flatten().tolist()[:8]} of {mask.shape[-1]}, and the program was made "
            f"for {count}: the sizes of a program are fixed. Compile the model again with the mask that it has now"
        )
    assert_async((found == count).all(), f"a mask in a buffer does not pick {count}, for which the program was made")
    return mask.int().argsort(dim=-1, descending=True, stable=True)[..., :count].contiguous()


CHECKED_PLACES = torch.library.custom_op(
    "autopar::picked_places", picked_places, mutates_args=(), schema="(Tensor mask, int count) -> Tensor"
)
"""`picked_places` as an operator, which an export leaves as it is."""
CHECKED_PLACES.register_fake(picked_places)


def fill_rows(x: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """`x [b, s, d]` with `rows [b, n, d]`, one after the other, in the rows where `places [b, s]` is true: image
    features for image tokens.

    There are as many places as rows, in each part that samples are cut into, or a ValueError is raised (on a GPU, which
    is not waited for, its own assertion fails).
    """
    if x.is_meta or isinstance(x, FakeTensor):  # sizes only: how many places there are is data
        return torch.empty_like(x)
    wanted, found = rows.shape[0] * rows.shape[1], places.sum()
    said = f"wanted {wanted} places for as many rows, {rows.shape[1]} for each of {rows.shape[0]} samples"
    if found.device.type == "cpu" and int(found) != wanted:
        raise ValueError(
            f"{said}; got {int(found)} places, {places.sum(1).tolist()} in these samples. A batch that is cut by "
            "samples needs as many image tokens in each part as there are features of its images: put as many images "
            "into each sample"
        )
    assert_async(found == wanted, f"{said}: image tokens and image features of this part of the batch do not match")
    return x.masked_scatter(places.unsqueeze(-1), rows)
