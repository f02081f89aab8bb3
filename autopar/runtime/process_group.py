"""torch.distributed set up on a rank that torchrun started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from autopar import torchrun
from autopar.errors import RunError


def join(device_type: str) -> None:
    """Initialise torch.distributed: NCCL on the CUDA device LOCAL_RANK, else gloo. Raises RunError where the
    environment does not say with whom, and where the ranks do not meet."""
    torchrun.check()
    if device_type == "cuda":
        torch.cuda.set_device(torchrun.number("LOCAL_RANK", 0) or 0)
    try:
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    except dist.DistError as error:
        where = ", ".join(f"{name} {os.environ[name]}" for name in torchrun.MEETING)
        raise RunError(f"the ranks did not meet ({where}): {str(error).splitlines()[0]}") from error


@contextlib.contextmanager
def joined(device_type: str) -> Iterator[int]:
    """A context with torch.distributed initialised; gives the rank."""
    join(device_type)
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
