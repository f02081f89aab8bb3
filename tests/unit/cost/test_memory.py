"""Bytes of parameters, gradients and optimizer state."""

from __future__ import annotations

import pytest
import torch

from autopar.cost.memory import (
    ITEMSIZES,
    ParameterBytes,
    computes_in,
    host_bytes,
    itemsize,
    parameter_bytes,
    rests_in,
    scales_loss,
)
from autopar.errors import PlanError
from autopar.optimizers import OPTIMIZERS

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
    state = sum(
        value.nbytes
        for value in used.state[parameter].values()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    )
    expected = ParameterBytes(parameter.nbytes, parameter.grad.nbytes, state)
    assert parameter_bytes(300, dtype, dtype, optimizer) == expected


def test_mixed_precision_adam_is_18_bytes_per_element() -> None:
    """2 + 12 as the ZeRO paper counts, and gradients that add up in float32."""
    assert parameter_bytes(1, "bfloat16", "bf16", "adam") == ParameterBytes(2, 4, 8, 4)
    assert parameter_bytes(1, "bfloat16", "bf16", "sgd").total == 10
    # lifted: nothing to cast
    assert parameter_bytes(1, "float32", "bf16", "adam") == parameter_bytes(1, "float32", "float32", "adam")
    assert (computes_in("bf16"), computes_in("float32")) == ("bfloat16", "float32")
    assert (rests_in("torch.bfloat16", "bf16"), rests_in("bfloat16", "bfloat16")) == ("float32", "bfloat16")


def test_a_leaf_of_its_own_comes_on_top() -> None:
    """ZeRO-1 on four ranks: the whole leaf, and a quarter of everything else."""
    assert parameter_bytes(25, "float32", "float32", "adam", leaf=100) == ParameterBytes(400, 100, 200, 100)
    assert parameter_bytes(25, "bfloat16", "bf16", "adam", leaf=100) == ParameterBytes(200, 100, 200, 100)


def test_inference_and_integers_have_weights_only() -> None:
    assert parameter_bytes(10, "bfloat16", "bf16", "adamw", training=False) == ParameterBytes(weights=20)
    assert parameter_bytes(10, "int64", "bf16", "adamw") == ParameterBytes(weights=80)


def test_they_add_up() -> None:
    one, two = parameter_bytes(10, "float32", "float32", "adam"), parameter_bytes(5, "bfloat16", "bf16", "sgd")
    assert one + two == ParameterBytes(50, 60, 80, 20)
    assert (one + two).total == one.total + two.total == 210
    assert one + one == parameter_bytes(20, "float32", "float32", "adam")


@pytest.mark.parametrize("dtype, precision", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "bf16")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_offloaded_is_on_the_host(optimizer: str, dtype: str, precision: str) -> None:
    """The optimizer's state, or the weight that rests and its gradient too, of which the device has what it computes
    with."""
    whole = parameter_bytes(10, dtype, precision, optimizer)
    rests = 10 * itemsize(rests_in(dtype, precision))
    assert host_bytes(10, dtype, precision, optimizer, "") == 0.0
    assert host_bytes(10, dtype, precision, optimizer, "optimizer") == whole.optimizer
    assert parameter_bytes(10, dtype, precision, optimizer, offload="optimizer") == ParameterBytes(
        whole.weights, whole.gradients, 0.0, whole.master
    )
    assert host_bytes(10, dtype, precision, optimizer, "parameters") == whole.optimizer + 2 * rests
    assert parameter_bytes(10, dtype, precision, optimizer, offload="parameters") == ParameterBytes(
        whole.weights, whole.gradients
    )
    assert host_bytes(10, "int64", precision, optimizer, "parameters") == 0.0


def test_only_gradients_in_float16_are_scaled() -> None:
    assert [scales_loss(precision) for precision in ("fp16", "bf16", "float16", "float32")] == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("dtype", [*ITEMSIZES, "float8_e4m3fn"])
def test_item_sizes_are_those_of_torch(dtype: str) -> None:
    assert itemsize(dtype) == itemsize(f"torch.{dtype}") == getattr(torch, dtype).itemsize


def test_unknown_names() -> None:
    with pytest.raises(PlanError, match="optimizer 'lion' is unknown; known: sgd, sgd-momentum, adam, adamw"):
        parameter_bytes(1, "float32", "float32", "lion")
    with pytest.raises(PlanError, match="dtype 'float12' is unknown"):
        parameter_bytes(1, "float12", "float12", "sgd")
