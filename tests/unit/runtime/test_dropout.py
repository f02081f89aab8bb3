"""Dropout on one rank: what it keeps is a mask of a byte for each element, as memory is priced; its gradients are
right, those of gradients too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.runtime.algorithms import dropout
from autopar.runtime.algorithms.dropout import _scaled
from autopar.runtime.mesh import Mesh
from autopar.runtime.rng import Rng, using
from tests.helpers.peak import allocations

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


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_on_a_cpu_it_is_what_the_kernel_of_other_devices_makes_in_no_more_memory(
    dtype: torch.dtype, turned: bool
) -> None:
    """To the bit, and lying as its operand does: views of it that users take need that. With a mask and the result, and
    nothing else as large."""
    x, kept = torch.randn(64, 48, 32).to(dtype), torch.rand(64, 48, 32) < 0.75
    x[0, 0, :3], kept[0, 0, :2] = torch.tensor([torch.inf, torch.nan, torch.inf], dtype=dtype), False
    x, kept = (t.transpose(0, 1) if turned else t for t in (x, kept))
    wanted, made = torch.ops.aten.native_dropout_backward(x, kept, 1 / 0.75), _scaled(x, kept, 1 / 0.75)
    torch.testing.assert_close(made, wanted, rtol=0, atol=0, equal_nan=True)
    assert made.stride() == wanted.stride() == x.stride()
    results: list[Tensor] = []
    assert max(allocations(lambda: results.append(dropped(x)))) < 1.1 * (x.nbytes + x.numel())


def test_gradients_and_gradients_of_gradients() -> None:
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dropped(x).square(), (x,)) and torch.autograd.gradgradcheck(
        lambda x: dropped(x).square(), (x,)
    )


def test_the_mean_stays_as_it_is() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert dropped(torch.ones(1 << 20, dtype=dtype), 0.1).double().mean().item() == pytest.approx(1.0, abs=2e-3)
