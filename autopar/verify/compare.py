"""The one measure of difference that a verification uses."""

from __future__ import annotations

from torch import Tensor


def difference(got: Tensor | None, wanted: Tensor) -> float:
    """Largest absolute difference relative to max(1, largest wanted absolute value); infinity where shapes differ or one is missing."""
    if got is None or got.shape != wanted.shape:
        return float("inf")
    if wanted.numel() == 0:
        return 0.0
    gap = (got.double() - wanted.double()).abs().max().item()
    scale = max(1.0, wanted.double().abs().max().item())
    return float("inf") if gap != gap else gap / scale
