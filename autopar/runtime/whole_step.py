"""The step that programs of this package run: `torchrun sharded.py`, `autopar run` and `autopar profile`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.module import ShardedModule
from autopar.runtime.optimizer_state import optimizer_of
from autopar.runtime.scaling import scaler_for


def step_of(module: ShardedModule, batch: Sequence[Any], optimizer: str, lr: float) -> Callable[[], Tensor | None]:
    """A function that runs one step on this rank's part of a batch: forward, backward and `optimizer` with the learning
    rate `lr`, and gives the loss. Of a plan for inference it runs the forward, and gives None."""
    return _training(module, batch, optimizer, lr) if module.TRAINS else _forward(module, batch)


def _training(module: ShardedModule, batch: Sequence[Any], optimizer: str, lr: float) -> Callable[[], Tensor]:
    made, scaler = optimizer_of(optimizer, module.parameters(), lr), scaler_for(module)

    def step() -> Tensor:
        made.zero_grad()
        loss = module.train_step(*batch, scaler=scaler)
        scaler.step(made)
        scaler.update()
        return loss

    return step


def _forward(module: ShardedModule, batch: Sequence[Any]) -> Callable[[], None]:
    def step() -> None:
        with torch.no_grad():
            module(*batch)

    return step
