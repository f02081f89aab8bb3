"""What numbers a tensor has: real, complex, or none that have gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def differentiable(x: Tensor) -> bool:
    """Whether a tensor may have a gradient: it has floating or complex numbers."""
    return x.is_floating_point() or x.is_complex()


def as_real(x: Tensor) -> Tensor:
    """`x`, complex numbers as both of their parts, along a new last dim."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
