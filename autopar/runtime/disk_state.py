"""Optimizer state on disk: files that are mapped into memory, for any torch optimizer that steps on the CPU.

    optimizer = torch.optim.AdamW(model.parameters())
    keep_on_disk(optimizer, "/nvme/state")     # before the first step

The operating system writes pages out and reads them back as the optimizer goes over its parameters, so that only what
it works with need be in memory. Results equal those of the optimizer without this, bit by bit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar._torch import local_of, wrap_like
from autopar.errors import RunError


def keep_on_disk(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """From its next step on, hold the state of `optimizer` (tensors shaped as their parameter) in files in `folder`,
    which is made if missing and may be shared by optimizers and ranks. A file is unlinked once it is mapped: it
    disappears with its last tensor, however the process ends, so checkpoints are needed as usual.

    Raises RunError in that step where state is not on the CPU: no file can be mapped into the memory of an accelerator.
    """
    where = Path(folder).resolve()
    where.mkdir(parents=True, exist_ok=True)

    def move(stepped: torch.optim.Optimizer, *_: Any) -> None:
        for param, values in stepped.state.items():
            for key, value in values.items():
                if (
                    isinstance(value, Tensor)
                    and value.shape == param.shape
                    and value.dim()
                    and not _is_in(where, local_of(value))
                ):
                    values[key] = _on_disk(value, where)

    optimizer.register_step_post_hook(move)


def _is_in(folder: Path, local: Tensor) -> bool:
    """Whether the storage of a tensor is a mapped file in `folder`."""
    name = local.untyped_storage().filename
    return name is not None and Path(name).parent == folder


@torch.no_grad()
def _on_disk(value: Tensor, folder: Path) -> Tensor:
    """`value` with its local part in a new file of its own: tensors of a state dict that was saved or loaded may still
    use older files."""
    local = local_of(value)
    if local.device.type != "cpu":
        raise RunError(
            f"optimizer state of shape {tuple(value.shape)} is on {local.device}: only state in the memory of the host "
            "can be kept on disk; let the optimizer step on CPU parameters"
        )
    if not local.numel():
        return value
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        held = torch.from_file(file.name, shared=True, size=local.numel(), dtype=local.dtype).view(local.shape)
    return wrap_like(held.copy_(local), value)
