"""The optimizer of verifications: rounding is no difference, and a wrong gradient is one."""

from __future__ import annotations

import pytest
import torch

from autopar.verify.reference import optimizer

CASES = [(torch.float64, 1e-13, 1e-9), (torch.float32, 1e-6, 1e-4)]


def _stepped(dtype: torch.dtype, gradient: float) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.full((3,), 0.5, dtype=dtype))
    parameter.grad = torch.full((3,), gradient, dtype=dtype)
    optimizer([parameter]).step()
    return parameter.detach()


@pytest.mark.parametrize(("dtype", "rounding", "tolerance"), CASES)
def test_rounding_where_a_gradient_should_be_zero_is_no_difference(
    dtype: torch.dtype, rounding: float, tolerance: float
) -> None:
    assert (_stepped(dtype, rounding) - _stepped(dtype, 0.0)).abs().max() < tolerance


@pytest.mark.parametrize(("dtype", "rounding", "tolerance"), CASES)
def test_a_wrong_gradient_is_a_difference(dtype: torch.dtype, rounding: float, tolerance: float) -> None:
    for right, wrong in ((0.1, 0.0), (0.1, -0.1), (1e-3, 2e-3)):
        assert (_stepped(dtype, right) - _stepped(dtype, wrong)).abs().max() > tolerance, (right, wrong)


def test_each_parameter_is_stepped_by_an_operator_of_its_own() -> None:
    """About an operator on all of them DTensor decides anew for every set of parameters."""
    groups = optimizer([torch.nn.Parameter(torch.zeros(n)) for n in (2, 3, 3)]).param_groups
    assert [len(group["params"]) for group in groups] == [1, 1, 1] and all(group["fused"] for group in groups)
