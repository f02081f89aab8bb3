"""Bytes of parameters, gradients and optimizer state."""

from __future__ import annotations

import pytest
import torch

from autopar.cost.memory import ITEMSIZES, OPTIMIZERS, ParameterBytes, itemsize, parameter_bytes
from autopar.errors import PlanError

MAKE = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_torch_allocates_what_is_priced(optimizer: str, dtype: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(10, 30, dtype=getattr(torch, dtype)))
    parameter.sum().backward()
    assert parameter.grad is not None
    used = MAKE[optimizer]([parameter])
    used.step()
    state = sum(value.nbytes for value in used.state[parameter].values()
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape)
    expected = ParameterBytes(parameter.nbytes, parameter.grad.nbytes, state)
    assert parameter_bytes(300, dtype, dtype, optimizer) == expected


def test_mixed_precision_adam_is_16_bytes_per_element() -> None:
    """2 + 2 + 12, as the ZeRO paper counts."""
    for precision in ("bfloat16", "float16"):
        assert parameter_bytes(1, "float32", precision, "adam") == ParameterBytes(2, 2, 8, 4)
    assert parameter_bytes(1, "float32", "bfloat16", "sgd").total == 8


def test_inference_and_integers_have_weights_only() -> None:
    assert parameter_bytes(10, "float32", "bfloat16", "adamw", training=False) == ParameterBytes(weights=20)
    assert parameter_bytes(10, "int64", "bfloat16", "adamw") == ParameterBytes(weights=80)
    assert parameter_bytes(10, "bfloat16", "float32", "adamw") == parameter_bytes(10, "bfloat16", "bfloat16", "adamw")


def test_they_add_up() -> None:
    one, two = parameter_bytes(10, "float32", "float32", "adam"), parameter_bytes(5, "float32", "bfloat16", "sgd")
    assert one + two == ParameterBytes(50, 50, 80, 20)
    assert (one + two).total == one.total + two.total == 200


@pytest.mark.parametrize("dtype", [*ITEMSIZES, "float8_e4m3fn"])
def test_item_sizes_are_those_of_torch(dtype: str) -> None:
    assert itemsize(dtype) == itemsize(f"torch.{dtype}") == getattr(torch, dtype).itemsize


def test_unknown_names() -> None:
    with pytest.raises(PlanError, match="optimizer 'lion' is unknown; known: sgd, sgd-momentum, adam, adamw"):
        parameter_bytes(1, "float32", "float32", "lion")
    with pytest.raises(PlanError, match="dtype 'float12' is unknown"):
        parameter_bytes(1, "float12", "float12", "sgd")
