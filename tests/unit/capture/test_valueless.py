"""Runs of models on meta without values: weights are fake tensors once in a run, of which torch remembers what
operators give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar._torch import FakeTensorMode
from autopar.capture.devices import on_meta
from autopar.capture.valueless import valueless


def test_what_operators_give_of_weights_is_remembered() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(12, 28), nn.LayerNorm(28), nn.Linear(28, 12))

    def run() -> None:
        with torch.no_grad(), valueless(), on_meta():
            assert model(torch.empty(4, 12)).shape == (4, 12)

    run()
    before = FakeTensorMode.cache_info()
    run()
    after = FakeTensorMode.cache_info()
    assert (after.misses, after.bypasses) == (before.misses, before.bypasses)
    assert after.hits > before.hits


def test_a_weight_whose_size_or_dtype_changes_is_read_as_it_is() -> None:
    weight, other = torch.empty(4, 3, device="meta"), torch.empty(2, 5, device="meta", dtype=torch.float64)
    with torch.no_grad(), valueless():
        assert (weight + 1).shape == (4, 3)
        weight.data = other
        changed = weight + 1
    assert (changed.shape, changed.dtype) == ((2, 5), torch.float64)


def test_what_changes_sizes_of_weights_in_place_is_refused() -> None:
    weight = torch.empty(4, 3, device="meta")
    with torch.no_grad(), valueless(), on_meta(), pytest.raises(AssertionError, match="metadata mutating"):
        weight.t_()
