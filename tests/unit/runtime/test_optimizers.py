"""The optimizer that runs a plan, and how torch's allocator is asked to work for one on GPUs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from autopar.optimizers import OPTIMIZERS
from autopar.runtime.mesh import Mesh
from autopar.runtime.optimizer_state import optimizer_of

CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class OnGpu(torch.Tensor):
    """A parameter that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_gpus_one_kernel_steps_all_where_dtensors_have_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def make(held: list[torch.Tensor], lr: float, fused: bool | None, **options: float) -> None:
        assert options == OPTIMIZERS[name].options
        asked.append((len(held), lr, fused))

    monkeypatch.setattr(torch.optim, OPTIMIZERS[name].torch_name, make)
    real, there = torch.nn.Parameter(torch.zeros(2)), torch.zeros(2).as_subclass(OnGpu)
    for held in ([real], [there, there], [there, real], [torch.zeros(2, dtype=torch.complex64).as_subclass(OnGpu)], []):
        optimizer_of(name, held, 0.1)
    assert asked == [
        (1, 0.1, None),
        (2, 0.1, OPTIMIZERS[name].fused or None),
        (2, 0.1, None),
        (1, 0.1, None),
        (0, 0.1, None),
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_that_a_plan_can_name_runs_and_keeps_what_is_priced(name: str) -> None:
    held = torch.nn.Parameter(torch.ones(10, 30))
    held.sum().backward()
    used = optimizer_of(name, [held], 0.1)
    used.step()
    assert (
        sum(value.shape == held.shape for value in used.state[held].values() if isinstance(value, torch.Tensor))
        == OPTIMIZERS[name].state
    )
    assert not torch.equal(held, torch.ones(10, 30))


@pytest.mark.parametrize("said", [None, *CONF])
def test_segments_grow_unless_the_user_says_otherwise(said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CONF:
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    if said:
        monkeypatch.setenv(said, "max_split_size_mb:64")
    Mesh((1,), (f"of a test {said}",), "cpu")
    assert {name: os.environ[name] for name in CONF if name in os.environ} == (
        {said: "max_split_size_mb:64"} if said else {}
    )
    Mesh((1,), (f"of a test {said}",), "cuda")
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == {
        None: "expandable_segments:True",
        CONF[1]: "max_split_size_mb:64",
    }.get(said)
