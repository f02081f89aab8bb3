"""Clipping gradients by their global norm, over the ranks of a mesh and the places of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from autopar._torch import local_of, wrap_like
from autopar.runtime.mesh import Mesh


@torch.no_grad()
def clip_grad_norm(counted: Iterable[Tensor], held: Iterable[Tensor], max_norm: float, mesh: Mesh) -> Tensor:
    """Scale the gradients of `held` so that the 2-norm of all gradients together is at most `max_norm`; gives the norm before.

    `counted` are the parameters whose norm this place adds: a copy that another place counts is scaled here, not added. A
    collective operation.
    """
    squares = _squares([p.grad for p in counted if p.grad is not None], mesh)
    group = mesh.pipeline_group
    if group is not None:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    clip_grads_with_norm_(held, max_norm, norm)
    return norm


def _squares(grads: list[Tensor], mesh: Mesh) -> Tensor:
    """The sum of squares of the whole gradients, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    if grads:
        norm = get_total_norm(grads)
        if isinstance(norm, DTensor):  # gradients may rest on the host, and ranks talk from the device
            norm = wrap_like(local_of(norm).to(mesh.device), norm)
        total += (norm.full_tensor() if isinstance(norm, DTensor) else norm).double() ** 2
    return total
