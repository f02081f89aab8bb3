"""Optimizer state on disk: files that are mapped into memory, for any torch optimizer that steps on the CPU.

    optimizer = torch.optim.AdamW(model.parameters())
    keep_on_disk(optimizer, "/nvme/state")     # before the first step

The operating system writes pages out and reads them back as the optimizer goes over its parameters, so that only what it works with need
be in memory. The numbers are those of the optimizer alone, bit by bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar._torch import local_of, wrap_like
from autopar.errors import RunError


def keep_on_disk(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """From its next step on, hold the state of `optimizer` (tensors shaped as their parameter) in files in `folder`, which is made if it is
    not there; ranks of one machine want a folder each. The files are scratch: save checkpoints as ever.

    Raises RunError in that step where state is not on the CPU: no file can be mapped into the memory of an accelerator.
    """
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    mapped: dict[int, None] = {}  # addresses of files in memory

    def move(stepped: torch.optim.Optimizer, *_: Any) -> None:
        for number, (param, values) in enumerate(stepped.state.items()):
            for key, value in values.items():
                if isinstance(value, Tensor) and value.shape == param.shape and value.dim() and local_of(value).data_ptr() not in mapped:
                    values[key] = _on_disk(value, where / f"{number}.{key}")
                    mapped[local_of(values[key]).data_ptr()] = None

    optimizer.register_step_post_hook(move)


@torch.no_grad()
def _on_disk(value: Tensor, path: Path) -> Tensor:
    """`value` with its local part in a file."""
    local = local_of(value)
    if local.device.type != "cpu":
        raise RunError(f"optimizer state of shape {tuple(value.shape)} is on {local.device}: only state in the memory of the host can be kept on disk; "
                       "let the optimizer step on CPU parameters")
    if not local.numel():
        return value
    held = torch.from_file(str(path), shared=True, size=local.numel(), dtype=local.dtype).view(local.shape)
    return wrap_like(held.copy_(local), value)
