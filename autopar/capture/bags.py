"""`F.embedding_bag` of a matrix of indices (one bag of n rows per sample), traced so that its result visibly has b
rows. Used by export.

torch makes the offsets `arange(0, b * n, n)`, whose symbolic length does not simplify to b.
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
    """A context in which the offsets of such bags are computed as `arange(b) * n`."""
    original = F.embedding_bag

    # torch's names
    def embedding_bag(
        input: Tensor,
        weight: Tensor,
        offsets: Tensor | None = None,
        max_norm: float | None = None,
        norm_type: float = 2,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        per_sample_weights: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> Any:
        if input.dim() == 2 and offsets is None:
            offsets = torch.arange(input.shape[0], device=input.device) * input.shape[1]
            per_sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
            input = input.reshape(-1).long()
        return original(
            input,
            weight,
            offsets,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            per_sample_weights,
            include_last_offset,
            padding_idx,
        )

    with mock.patch.object(F, "embedding_bag", embedding_bag):
        yield
