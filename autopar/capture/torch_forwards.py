"""Replacements for forwards of torch's modules that read values of tensors, by operators with the same results.

Tracing has no values: it cannot read a counter as a number (batch norms without momentum), nor skip the clusters that
no target is in (adaptive softmax).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import MethodType
from typing import Any, get_type_hints

from torch import Tensor, nn
from torch.nn import functional as F


def without_values(twin: nn.Module) -> None:
    """Give the modules of a shadow that have a forward of READING the one that reads no values; a forward of the user's
    own (of a class or of one module) stays."""
    for module in twin.modules():
        reads, forward = READING.get(type(module).forward, (_never, None))
        if forward is not None and "forward" not in vars(module) and reads(module):
            module.forward = MethodType(forward, module)


def _never(module: nn.Module) -> bool:
    return False


def _counts(norm: Any) -> bool:
    """Whether a batch norm takes the means over all batches."""
    return norm.momentum is None and norm.track_running_stats and norm.num_batches_tracked is not None


def _cumulative(norm: Any, x: Tensor) -> Tensor:
    """A batch norm without a momentum: its running statistics are the means over all batches, of which it has a count;
    torch hands 1/count on as a number."""
    norm._check_input_dim(x)
    running = norm.running_mean, norm.running_var
    before = [statistic.clone() for statistic in running]
    # which leaves the statistics of this batch alone, where it trains
    result = F.batch_norm(x, *running, norm.weight, norm.bias, norm.training, 1.0, norm.eps)
    if norm.training:
        norm.num_batches_tracked.add_(1)
        share = 1.0 / norm.num_batches_tracked
        for statistic, old in zip(running, before, strict=True):
            statistic.copy_(old * (1 - share) + statistic * share)
    return result


def _adaptive(softmax: Any, x: Tensor, target: Tensor) -> Any:
    """An adaptive softmax of `x [n, c]` and targets `[n]`: every cluster computes all rows, and those whose target is
    another's count nothing. Each cluster has gradients, of zero where no target is in it."""
    if target.dim() != 1:
        return type(softmax).forward(softmax, x, target)
    places, found = target, x.new_zeros(x.shape[0])
    for number, (low, high) in enumerate(itertools.pairwise(softmax.cutoffs)):
        inside = (target >= low) & (target < high)
        words = (
            F.log_softmax(softmax.tail[number](x), dim=1)
            .gather(1, (target - low).clamp(0, high - low - 1).unsqueeze(1))
            .squeeze(1)
        )
        found = found + words.masked_fill(~inside, 0.0)
        places = places.masked_fill(inside, softmax.shortlist_size + number)
    found = found + F.log_softmax(softmax.head(x), dim=1).gather(1, places.unsqueeze(1)).squeeze(1)
    # its named tuple has no public name
    return get_type_hints(nn.AdaptiveLogSoftmaxWithLoss.forward)["return"](found, -found.mean())


READING: dict[Callable[..., Any], tuple[Callable[[Any], bool], Callable[..., Any]]] = {
    nn.AdaptiveLogSoftmaxWithLoss.forward: (lambda softmax: True, _adaptive),
    nn.BatchNorm1d.forward: (_counts, _cumulative),  # one function for norms of all dims
}
"""Forward of torch -> of which modules it reads values, and the forward without."""
