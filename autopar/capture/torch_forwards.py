"""Replacements for forwards and functions of torch that read values of tensors, and for a loss that cannot be split, by
operators with the same results. Called by shadow and export.

Tracing has no values: it cannot read a counter as a number (batch norms without momentum), nor skip the clusters that
no target is in (adaptive softmax).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import MethodType
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def without_values(twin: nn.Module) -> None:
    """Replace the forwards of modules in READING by ones that read no values. A forward of the user's own stays."""
    for module in twin.modules():
        reads, forward = READING.get(type(module).forward, (_never, None))
        if forward is not None and "forward" not in vars(module) and reads(module):
            module.forward = MethodType(forward, module)


class WholeLosses(TorchFunctionMode):
    """A mode in which torch's loss of a linear layer makes all logits, whatever options it has. In chunks it is one
    operator, whose gradients its forward makes: nothing could split it, and every rank would compute all rows."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "linear_cross_entropy":
            kwargs = {**kwargs, "options": None}
        return func(*args, **kwargs)


class KnownCombinations(TorchFunctionMode):
    """A mode in which `torch.combinations` picks elements by their positions. torch makes all tuples and selects some
    by a mask, whose number it does not know without values; it follows from the size, which becomes a number."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") != "combinations":
            return func(*args, **(kwargs or {}))
        return _combined(func, *args, **(kwargs or {}))


def _combined(func: Any, input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """`torch.combinations` of a vector: its rows by the positions of their elements, in its order."""
    if input.dim() != 1 or r < 1:
        return func(input, r, with_replacement)
    pick = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = list(pick(range(int(input.shape[0])), r))
    return input[torch.tensor(places, dtype=torch.int64, device=input.device).reshape(-1, r)]


def _never(module: nn.Module) -> bool:
    return False


def _counts(norm: Any) -> bool:
    """Whether a batch norm averages its statistics over all batches (momentum None)."""
    return norm.momentum is None and norm.track_running_stats and norm.num_batches_tracked is not None


def _cumulative(norm: Any, x: Tensor) -> Tensor:
    """A batch norm without momentum: running statistics are averages over all batches, with 1 / (number of batches) as
    a tensor, which torch reads as a Python number."""
    norm._check_input_dim(x)
    running = norm.running_mean, norm.running_var
    before = [statistic.clone() for statistic in running]
    # which leaves the statistics of this batch alone, where it trains
    result = F.batch_norm(x, *running, norm.weight, norm.bias, norm.training, 1.0, norm.eps)
    if norm.training:
        norm.num_batches_tracked.add_(1)
        # a quotient of whole numbers is float32, also where statistics are float64
        share = 1.0 / norm.num_batches_tracked.to(torch.promote_types(running[0].dtype, torch.float32))
        for statistic, old in zip(running, before, strict=True):
            statistic.copy_(old * (1 - share) + statistic * share)
    return result


def _adaptive(softmax: Any, x: Tensor, target: Tensor) -> Any:
    """Adaptive softmax of `x [n, c]` and targets `[n]`: each cluster computes all rows, and rows with targets in other
    clusters are masked. A cluster without targets has zero gradients."""
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
"""Forward of a torch module -> whether it reads values of tensors for a given module, and a forward that does not."""
