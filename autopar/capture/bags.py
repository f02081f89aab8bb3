"""Bags of as many rows for each sample (`F.embedding_bag` of a matrix of numbers), traced with one bag for each sample.

torch makes the ends of the bags `arange(0, b * n, n)`, of which nobody can tell that they are b.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F


@contextmanager
def bags_of_samples() -> Iterator[None]:
    """Inside, the bags that a matrix of numbers is begin at multiples of its width, one for each row."""
    original = F.embedding_bag

    def embedding_bag(input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2, scale_grad_by_freq: bool = False,  # torch's names
                      mode: str = "mean", sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
                      padding_idx: int | None = None) -> Any:
        if input.dim() == 2 and offsets is None:
            offsets = torch.arange(input.shape[0], device=input.device) * input.shape[1]
            per_sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
            input = input.reshape(-1).long()
        return original(input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx)

    with mock.patch.object(F, "embedding_bag", embedding_bag):
        yield
