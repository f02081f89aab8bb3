"""torch.distributed set up on a rank that torchrun started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist


def join(device_type: str) -> None:
    """Initialise torch.distributed: NCCL on the CUDA device LOCAL_RANK, else gloo."""
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")


@contextlib.contextmanager
def joined(device_type: str) -> Iterator[int]:
    """A context with torch.distributed initialised; gives the rank."""
    join(device_type)
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
