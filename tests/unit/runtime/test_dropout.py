"""Dropout on one rank: what it keeps is a mask of a byte for each element, as memory is priced; its gradients are right, those of gradients too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.runtime.algorithms import dropout
from autopar.runtime.mesh import Mesh
from autopar.runtime.rng import Rng, using

MESH = Mesh((1,), ("x",))


def dropped(x: Tensor, p: float = 0.25, seed: int = 0) -> Tensor:
    with using(Rng(seed)):
        return dropout(x, p, "S0", key="drop", mesh=MESH)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_mask_is_a_byte_for_each_element(dtype: torch.dtype) -> None:
    kept: list[Tensor] = []
    x = torch.randn(40, 50, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = dropped(x)
    assert sum(tensor.nbytes for tensor in kept) == x.numel() and y.dtype == dtype
    there = y.detach() != 0
    torch.testing.assert_close(y.detach(), torch.where(there, x.detach() / 0.75, 0))


def test_gradients_and_gradients_of_gradients() -> None:
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dropped(x).square(), (x,)) and torch.autograd.gradgradcheck(lambda x: dropped(x).square(), (x,))


def test_the_mean_stays_as_it_is() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert dropped(torch.ones(1 << 20, dtype=dtype), 0.1).double().mean().item() == pytest.approx(1.0, abs=2e-3)
