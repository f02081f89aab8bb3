"""Weights that are gathered for the forward and gathered again for the backward (ZeRO-3), their gradients scattered behind it.

`gather` is `reshard` for weights. Inside `regathering()` autograd does not keep what `gather` returned, nor views of it: it
keeps a handle to the shard, and the backward gathers again when it first needs the weight, once for all who saved it. The
copy is dropped after its last use. The gradient of a parameter's shard goes to its *sink* where it has one, which scatters
it while the backward goes on. Outside compiled code only: a compiled block keeps what its partitioner decides.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.errors import RunError
from autopar.layout import Layout
from autopar.runtime.mesh import Mesh
from autopar.runtime.moves import relayout
from autopar.runtime.replay import once
from autopar.runtime.reshard import arrow, reshard

_registry: dict[int, Handle] = {}  # storage address of a gathered weight that is alive -> how to gather it again
_sinks: list[Sinks] = []  # of the regathering() contexts that are open, innermost last


Sink = Callable[[Tensor, Layout, str], None]  # takes a whole gradient, its layout, and a name for the count


class Sinks(Protocol):
    """Who takes the gradients of which shards."""

    def sink(self, shard: Tensor) -> Sink | None:
        """Who takes the gradient of `shard`; None where autograd is to accumulate it."""


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
    if torch.compiler.is_compiling() or not _sinks or grad is None or not x.requires_grad:
        return reshard(x, change, grad=grad, shape=shape, mesh=mesh, name=name)
    sink = _sinks[-1].sink(x)
    if sink is None:
        out = reshard(x, change, grad=grad, shape=shape, mesh=mesh, name=name)
    else:
        out = _Gather.apply(x, *arrow(change), arrow(grad)[0], tuple(shape), mesh, name, sink)
    address = out.untyped_storage().data_ptr()
    if out.numel() and address != x.untyped_storage().data_ptr():
        _registry[address] = Handle(x, *arrow(change), tuple(shape), mesh, name)
        weakref.finalize(out, _registry.pop, address, None)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, src: Layout, dst: Layout, consumed: Layout, shape: tuple[int, ...], mesh: Mesh, name: str,
                sink: Sink) -> Tensor:
        ctx.consumed, ctx.name, ctx.sink = consumed, name, sink
        out = once(lambda: relayout(x, src, dst, shape, mesh, name))
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.sink(grads[0], ctx.consumed, ctx.name)
        return (None,) * 8


class _NoSinks:
    def sink(self, shard: Tensor) -> Sink | None:
        return None


@contextmanager
def regathering(sinks: Sinks | None = None) -> Iterator[None]:
    """Where weights from `gather` are not saved for the backward, and `sinks` take their gradients."""
    _sinks.append(sinks or _NoSinks())
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _sinks.pop()


def _pack(tensor: Tensor) -> tuple[Tensor, int] | Saved:
    handle = _registry.get(tensor.untyped_storage().data_ptr()) if _registry else None
    if handle is None or tensor.dtype != handle.shard.dtype:
        return tensor, tensor._version
    handle.saved += 1
    return Saved(handle, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, tuple):
        tensor, version = kept
        if tensor._version != version:  # autograd leaves this check to hooks
            raise RunError(f"a tensor of shape {tuple(tensor.shape)} that the backward needs was modified by an in-place operation between forward "
                           f"and backward: version {tensor._version}, wanted {version}; step the optimizer and run the model again after the backward")
        return tensor
    return kept.handle.again().as_strided(kept.size, kept.stride, kept.offset)
