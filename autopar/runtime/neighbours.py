"""Point-to-point transfers along one mesh axis, for rings and halo exchanges. No autograd, no layouts.

Every rank of the axis must call the same functions in the same order. Empty tensors are not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.count import record
from autopar.runtime.mesh import Mesh, sends_from_host

Parcel = tuple[int, Tensor]  # (coordinate of the other rank on the axis, tensor)


def start_transfers(sends: Sequence[Parcel], receives: Sequence[Parcel], axis: int, mesh: Mesh) -> Callable[[], None]:
    """Start to send `sends` and to fill `receives`; call the result to wait for both.

    Between two ranks tensors arrive in the order of the lists. What is sent must not change, and what is received must
    not be read, until then. A rank's parcels for itself are copied. Where ranks share GPUs (gloo), what is sent goes
    through the memory of the host.
    """
    me, group = mesh.coord[axis], mesh.group(axis)
    own = iter([x for peer, x in receives if peer == me])
    for peer, x in sends:
        if peer == me:
            next(own).copy_(x)
    out = [(peer, x.contiguous()) for peer, x in sends if peer != me and x.numel()]
    into = coming = [(peer, x) for peer, x in receives if peer != me and x.numel()]
    if sends_from_host(mesh.device_type, group):
        out = [(peer, x.cpu()) for peer, x in out]
        coming = [(peer, torch.empty_like(x, device="cpu")) for peer, x in into]
    todo = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for peer, x in out]
    todo += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for peer, x in coming]
    works = dist.batch_isend_irecv(todo) if todo else []

    def finish() -> None:
        for work in works:
            work.wait()
        todo.clear()  # the operations keep the sent tensors alive
        for (_, x), (_, came) in zip(into, coming, strict=True):
            if x is not came:
                x.copy_(came)

    return finish


def start_shift(x: Tensor, arriving: int, axis: int, mesh: Mesh, name: str = "") -> Callable[[], Tensor]:
    """Send the flat tensor `x` to the next rank of the axis, round the ring, in the background; calling the result
    gives the `arriving` elements that came from the rank before."""
    me, n = mesh.coord[axis], mesh.sizes[axis]
    got = x.new_empty(arriving)
    record("send", axis, x.numel() * x.element_size(), name)
    finish = start_transfers([((me + 1) % n, x)], [((me - 1) % n, got)], axis, mesh)

    def wait() -> Tensor:
        finish()
        return got

    return wait


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """All elements of `tensors`, which have one dtype, in one flat tensor."""
    return torch.cat([x.reshape(-1) for x in tensors])


def unpack(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The inverse of `pack`: views of `flat`."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(torch.Size(shape)) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
