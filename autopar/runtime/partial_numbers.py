"""Refusal of numbers of partial DTensors: `p.grad.norm().item()`, `float(p.abs().max())`, `if p.isnan().any()`.

A sum, norm or maximum over a parameter that is cut is a part of it on each rank, and torch gives the number of this
rank's part, in silence: logs were wrong, optimizers scaled by different numbers, and ranks took different branches.
"""

from __future__ import annotations

from weakref import WeakSet

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch import before_numbers
from autopar.errors import RunError

_meshes: WeakSet[DeviceMesh] = WeakSet()


def watch(mesh: DeviceMesh | None) -> None:
    """Raise RunError where a number is asked of a DTensor on `mesh` that is partial there. Other DTensors of the
    process are as torch has them."""
    if mesh is not None:
        _meshes.add(mesh)


def _check(value: DTensor) -> None:
    mesh = value.device_mesh
    if any(at.is_partial() and mesh.size(axis) > 1 for axis, at in enumerate(value.placements)) and mesh in _meshes:
        raise RunError(
            "item(), float() or a branch on a sum, norm or maximum of which each rank has a part (placements "
            f"{value.placements}): ranks would have different numbers. Take that of all ranks first, on all of them: "
            "value.full_tensor()"
        )


before_numbers(_check)
