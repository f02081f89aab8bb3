"""The process group of torchrun: one rank joins it, on the device that is its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist


def join(device_type: str) -> None:
    """Join the ranks that torchrun started: over NCCL on the device of this one, or over gloo."""
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")


@contextlib.contextmanager
def joined(device_type: str) -> Iterator[int]:
    """The same as long as it lasts; gives the rank."""
    join(device_type)
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
