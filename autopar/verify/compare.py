"""The one measure of difference that a verification uses, for whole tensors and for the parts that ranks have."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.tensors import as_real

CHUNK = 1 << 20  # elements compared at a time: the difference of two large tensors needs no third one beside them


def difference(got: Tensor | None, wanted: Tensor) -> float:
    """Largest absolute difference relative to `scale(wanted)`; infinity where shapes differ, one is missing or not a
    number."""
    return gap(got, wanted) / scale(wanted)


def scale(wanted: Tensor) -> float:
    """What differences are relative to: max(1, largest absolute value that is finite)."""
    if wanted.numel() == 0:
        return 1.0
    wanted = as_real(wanted)
    low, high = map(float, wanted.to(torch.uint8).aminmax() if wanted.dtype == torch.bool else wanted.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        return scale(wanted[wanted.isfinite()])
    return max(1.0, abs(low), abs(high))


def gap(got: Tensor | None, wanted: Tensor) -> float:
    """Largest absolute difference, found on the device of `got`, none between infinities of one sign (logits that are
    masked); infinity where shapes differ, `got` is missing, one is complex and the other is not, or a difference is not
    a number."""
    if got is None or got.shape != wanted.shape or got.is_complex() != wanted.is_complex():
        return math.inf
    if wanted.numel() == 0:
        return 0.0
    got, wanted = as_real(got), as_real(wanted.to(got.device))
    if got.dtype != wanted.dtype or not wanted.is_floating_point():
        got, wanted = got.double(), wanted.double()
    if wanted.dim() == 0:
        got, wanted = got[None], wanted[None]
    rows = max(1, CHUNK * wanted.shape[0] // wanted.numel())
    found = [
        float((a - b).abs().masked_fill_(a == b, 0.0).max())
        for a, b in zip(got.split(rows), wanted.split(rows), strict=True)
    ]
    return math.inf if any(map(math.isnan, found)) else max(found)
