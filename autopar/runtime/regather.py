"""Weights that are gathered for the forward and gathered again for the backward (ZeRO-3).

`gather` is `reshard` for weights. Inside `regathering()` autograd does not keep what `gather` returned, nor views of it: it
keeps a handle to the shard, and the backward gathers again when it first needs the weight, once for all who saved it. The
copy is dropped after its last use. Outside compiled code only: a compiled block keeps what its partitioner decides.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import RunError
from autopar.layout import Layout
from autopar.runtime.mesh import Mesh
from autopar.runtime.moves import relayout
from autopar.runtime.reshard import arrow, reshard

_registry: dict[int, Handle] = {}  # storage address of a gathered weight that is alive -> how to gather it again
_inside = [0]


class Handle:
    """How to gather one weight again. `saved` counts what autograd saved and has not used yet."""

    def __init__(self, shard: Tensor, src: Layout, dst: Layout, shape: tuple[int, ...], mesh: Mesh, name: str) -> None:
        self.shard, self.version = shard.detach(), shard._version
        self.src, self.dst, self.shape, self.mesh, self.name = src, dst, shape, mesh, name
        self.saved = 0
        self.whole: Tensor | None = None

    def again(self) -> Tensor:
        """The gathered weight, laid out in memory as in the forward. Raises RunError where the shard was changed since."""
        if self.shard._version != self.version:
            raise RunError(f"the shard of weight {self.name or self.shape} was modified between forward and backward: "
                           f"version {self.shard._version}, wanted {self.version}; step the optimizer after the backward")
        if self.whole is None:
            with torch.no_grad():
                self.whole = relayout(self.shard, self.src, self.dst, self.shape, self.mesh, self.name)
        whole = self.whole
        self.saved -= 1
        if self.saved <= 0:
            self.whole = None
        return whole


@dataclass(frozen=True, slots=True)
class Saved:
    """What autograd keeps instead of a gathered weight or a view of one."""

    handle: Handle
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def gather(x: Tensor, change: str, *, grad: str | None, shape: Sequence[int], mesh: Mesh, name: str = "") -> Tensor:
    """As `reshard`; inside `regathering()` the result is not kept for the backward but gathered again."""
    out = reshard(x, change, grad=grad, shape=shape, mesh=mesh, name=name)
    if torch.compiler.is_compiling():
        return out
    if _inside[0] and out.requires_grad and out.numel():
        address = out.untyped_storage().data_ptr()
        if address != x.untyped_storage().data_ptr():
            _registry[address] = Handle(x, *arrow(change), tuple(shape), mesh, name)
            weakref.finalize(out, _registry.pop, address, None)
    return out


@contextmanager
def regathering() -> Iterator[None]:
    """Where weights from `gather` are not saved for the backward."""
    _inside[0] += 1
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _inside[0] -= 1


def _pack(tensor: Tensor) -> Tensor | Saved:
    handle = _registry.get(tensor.untyped_storage().data_ptr()) if _registry else None
    if handle is None or tensor.dtype != handle.shard.dtype:
        return tensor
    handle.saved += 1
    return Saved(handle, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return kept.handle.again().as_strided(kept.size, kept.stride, kept.offset)
