"""`F.embedding_bag` of a matrix of indices (one bag of n rows per sample), traced so that its result visibly has b
rows. Used by export.

torch makes the offsets `arange(0, b * n, n)`, whose symbolic length does not simplify to b.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F


@contextmanager
def bags_of_samples() -> Iterator[None]:
    """A context in which the offsets of such bags are computed as `arange(b) * n`."""
    original = F.embedding_bag
    signature = inspect.signature(original)

    def embedding_bag(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given, bags = bound.arguments, bound.arguments["input"]
        if bags.dim() == 2 and given.get("offsets") is None:
            given |= {
                "input": bags.reshape(-1).long(),
                "offsets": torch.arange(bags.shape[0], device=bags.device) * bags.shape[1],
            }
            if given.get("per_sample_weights") is not None:
                given["per_sample_weights"] = given["per_sample_weights"].reshape(-1)
        return original(*bound.args, **bound.kwargs)

    with mock.patch.object(F, "embedding_bag", embedding_bag):
        yield
