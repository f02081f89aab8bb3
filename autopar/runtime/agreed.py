"""Weights that all ranks have alike: those of rank 0, as DistributedDataParallel takes them.

Each rank makes the user's model for itself. Without a seed it makes other random weights, and parts of different models would train together.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

SAMPLES = 64
"""Elements of each tensor that are compared: random numbers differ in the first few."""


@torch.no_grad()
def from_first(tensors: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Tensor]:
    """`tensors` as they are where all ranks have the same, else copies of what rank 0 has, with a warning. A collective operation, through `device`."""
    if not (dist.is_available() and dist.is_initialized()) or not tensors:
        return tensors
    mine = torch.stack([fingerprint(tensor) for tensor in tensors.values()]).to(device)
    first = mine.clone()
    dist.broadcast(first, src=0)
    other = (mine != first).to(torch.int32)
    dist.all_reduce(other, op=dist.ReduceOp.MAX)
    if not other.any():
        return tensors
    names = [name for name, differs in zip(tensors, other.tolist(), strict=True) if differs]
    if dist.get_rank() == 0:
        warnings.warn(f"the ranks made {len(names)} tensors of the model each in their own way ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): those of rank 0 are taken. "
                      "Seed all ranks alike before the model is made, or load weights, to save the broadcast", stacklevel=2)
    return {name: _broadcast(tensor, device) for name, tensor in tensors.items()}


def fingerprint(tensor: Tensor) -> Tensor:
    """A float64 number that other contents would hardly have."""
    flat = (torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()).flatten()
    some = flat[::max(1, flat.numel() // SAMPLES)][:SAMPLES].cpu().double()
    return (some * torch.arange(1, len(some) + 1, dtype=torch.float64)).nan_to_num().sum()


def _broadcast(tensor: Tensor, device: torch.device) -> Tensor:
    sent = tensor.detach().to(device).contiguous().clone()
    dist.broadcast(sent.reshape(-1).view(torch.uint8), src=0)  # bytes: not all backends know all dtypes
    return sent.to(tensor.device)
