"""Environment variables that torchrun sets, and others that users or containers set wrongly."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from autopar import torchrun
from autopar.cluster.this_machine import here
from autopar.errors import RunError

RIGHT = {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WORLD_SIZE", "four", "WORLD_SIZE is 'four'; wanted a whole number of at least 1. torchrun sets it: unset it"),
        ("WORLD_SIZE", "-4", "WORLD_SIZE is '-4'; wanted a whole number of at least 1"),
        ("WORLD_SIZE", "3", "RANK is 3, and WORLD_SIZE is 3: ranks are 0 to 2"),
        ("RANK", "first", "RANK is 'first'; wanted a whole number of at least 0"),
        ("RANK", "", "the environment has no RANK, by which ranks find each other: start them with torchrun"),
        ("MASTER_PORT", "http", "MASTER_PORT is 'http'; wanted a whole number"),
    ],
)
def test_an_environment_in_which_ranks_would_not_meet(monkeypatch, name: str, value: str, said: str) -> None:
    for right in RIGHT.items():
        monkeypatch.setenv(*right)
    torchrun.check()
    monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=said):
        torchrun.check()


def test_ranks_that_met_by_themselves_are_those_of_the_cluster_that_is_here(monkeypatch) -> None:
    """As under Slurm without torchrun, where init_process_group is told rank and size."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    assert here().endswith(":3x2")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_cluster_that_is_here_in_an_environment_that_is_wrong(monkeypatch, name: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv(name, "0")
    with pytest.raises(RunError, match=f"{name} is '0'; wanted a whole number of at least 1"):
        here()
