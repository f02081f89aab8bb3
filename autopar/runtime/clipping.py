"""Clipping gradients by their global norm, over the ranks of a mesh and the places of a pipeline. In pipelines torch's
own is refused: it takes the norm of the gradients that a place has, so that each place scaled by another one, in
silence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from autopar._torch import before_total_norms, local_of, scale_all
from autopar.errors import RunError
from autopar.runtime.collectives import all_reduce_in_place, start_all_gather_from_all
from autopar.runtime.mesh import Mesh
from autopar.runtime.params import grad_at_rest

_places: WeakSet[DeviceMesh] = WeakSet()


def watch(mesh: Mesh) -> None:
    """Raise RunError where torch's clip_grad_norm_ is given parameters of a place of a pipeline."""
    if mesh.places > 1 and mesh.device_mesh is not None:
        _places.add(mesh.device_mesh)


def _check(grads: Sequence[Tensor]) -> None:
    if any(isinstance(grad, DTensor) and grad.device_mesh in _places for grad in grads):
        raise RunError(
            "torch.nn.utils.clip_grad_norm_ takes the norm of the gradients that it is given, and in a pipeline a rank "
            "has those of its own place alone: each place would scale by another norm. Use model.clip_grad_norm_(...), "
            "whose norm is that of all places"
        )


before_total_norms(_check)


@torch.no_grad()
def clip_grad_norm(
    counted: Iterable[Tensor],
    held: Iterable[Tensor],
    max_norm: float,
    mesh: Mesh,
    *,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale the gradients of `held` so that the norm of all gradients together is at most `max_norm`; gives the norm
    before, in float64. `norm_type` p: (sum |g|^p)^(1/p), the greatest |g| for infinity.

    `counted` are the parameters whose norm this place adds: a copy that another place counts is scaled here, not added.
    A collective operation. Raises RunError, on every rank, on another `norm_type` than a number above 0, and with
    `error_if_nonfinite` where the norm is nan or infinite: no gradient was scaled then.
    """
    if not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise RunError(f"norm_type is {norm_type!r}; wanted a number above 0, or math.inf for the greatest gradient")
    grads = [grad for param in counted if (grad := grad_at_rest(param)) is not None]
    norm = _greatest(grads, mesh) if math.isinf(norm_type) else _norm(grads, float(norm_type), mesh)
    if error_if_nonfinite and not norm.isfinite():
        raise RunError(
            f"the norm of all gradients is {float(norm)}, and error_if_nonfinite was asked for: no gradient was "
            "scaled. Look for the step whose loss is nan or infinite, or leave such steps out (autopar.GradScaler "
            "does in float16)"
        )
    _scale([param.grad for param in held if param.grad is not None], float(max_norm), norm)
    return norm


def _scale(grads: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients of this `norm` as torch's clip_grads_with_norm_ does: each rank its parts. Of DTensors in one
    operator, torch decides for each anew at every set of them (a tenth of a second for 25 gradients)."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    alike = dict[tuple[torch.device, torch.dtype], list[Tensor]]()  # gradients may rest on the host
    for grad in grads:
        alike.setdefault((grad.device, grad.dtype), []).append(local_of(grad))
    for (device, _), parts in alike.items():
        scale_all(parts, factor.to(device))


def _norm(grads: list[Tensor], norm_type: float, mesh: Mesh) -> Tensor:
    """The norm of the whole gradients of all places, in float64; `grads` are those of this one. One collective for each
    mesh axis that cuts some; DTensor's norm takes more time of the host, and warns on every rank where a mesh has
    several axes."""
    cut = dict[tuple[int, ...], list[Tensor]]()  # by the axes that they are cut over
    for grad in grads:
        cut.setdefault(_axes(grad, mesh), []).append(local_of(grad))
    powers = torch.zeros(len(cut), dtype=torch.float64, device=mesh.device)
    for number, parts in enumerate(cut.values()):
        # gradients may rest on the host, and ranks talk from the device
        powers[number] = get_total_norm(parts, norm_type).to(mesh.device, torch.float64) ** norm_type
    for axis in range(len(mesh.sizes)):
        chosen = [number for number, axes in enumerate(cut) if axis in axes]
        if chosen:
            over = powers[chosen]
            all_reduce_in_place(over, group=mesh.group(axis))
            powers[chosen] = over
    total = powers.sum()
    if mesh.pipeline_group is not None:
        all_reduce_in_place(total, group=mesh.pipeline_group)
    return total ** (1 / norm_type)


def _axes(grad: Tensor, mesh: Mesh) -> tuple[int, ...]:
    """The mesh axes that a gradient at rest is cut over."""
    return tuple(
        axis
        for axis, size in enumerate(mesh.sizes)
        if size > 1 and isinstance(grad, DTensor) and grad.placements[axis].is_shard()
    )


def _greatest(grads: list[Tensor], mesh: Mesh) -> Tensor:
    """The greatest absolute value in `grads` of all ranks, in float64. Ranks gather it, since gloo's maximum loses nan,
    and DTensor's with it, which also wants elements on every rank."""
    own = [part.abs().max().to(mesh.device, torch.float64) for grad in grads if (part := local_of(grad)).numel()]
    most = torch.stack([torch.zeros((), dtype=torch.float64, device=mesh.device), *own]).max()
    return most if mesh.ranks == 1 else start_all_gather_from_all(most[None], mesh)().max()
