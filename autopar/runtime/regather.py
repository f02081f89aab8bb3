"""Weights that are gathered for the forward and gathered again for the backward (ZeRO-3), their gradients scattered
behind it.

`gather` is `reshard` for weights. Inside `regathering()` autograd does not keep what `gather` returned, nor views of
it: it keeps a handle to the shard, and the backward gathers again when it first needs the weight, once for all who
saved it. The copy is dropped after its last use. The gradient of a parameter's shard goes to its *sink* where it has
one, which scatters it while the backward goes on. In both directions gathers begin ahead of their use
(`runtime.prefetch`). Outside compiled code only: a compiled block gathers when it needs a weight and keeps what its
partitioner decides. Its gradients are summed in the dtype of all others, and then rounded to that of the weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.errors import RunError
from autopar.layout import Layout
from autopar.runtime.first_order import only_first_order
from autopar.runtime.mesh import Mesh
from autopar.runtime.moves import relayout
from autopar.runtime.prefetch import Fetch, Orders, unit_here
from autopar.runtime.replay import once
from autopar.runtime.reshard import arrow, reshard
from autopar.runtime.stack import pushed
from autopar.runtime.turns import Gathered, Turn

_registry: dict[int, Handle] = {}  # storage address of a gathered weight that is alive -> how to gather it again
_open: list[Pass] = []  # one for each open context of `regathering` and `rerunning`, innermost last


Sink = Callable[[Tensor, Layout, str], None]  # takes a whole gradient, its layout, and a name for the count


class Take(Protocol):
    """What gathers a weight in a pass."""

    def __call__(self, x: Tensor, fetch: Fetch, leaf: Tensor) -> Tensor:
        """The weight of the shard `x`, which autograd knows as `leaf`."""


class Sinks(Protocol):
    """What takes gradients of gathered weights out of autograd (runtime.gradsync)."""

    orders: Orders
    # for dtypes of leaves those in which their gradients are summed, where these are others
    wider: dict[torch.dtype, torch.dtype]

    def sink(self, shard: Tensor, gathered: Gathered, unit: Any) -> Sink | None:
        """The function that takes the gradient of the weight `gathered` from `shard` in `unit`; None where autograd
        accumulates it."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward, or (with `back` None) blocks that are recomputed in a backward. `take` gathers in it and `back` in its
    backward, `sinks` take gradients, and `sums` maps dtypes of leaves to those in which their gradients are reduced,
    where these differ."""

    take: Take
    sinks: Sinks | None = None
    back: Take | None = None
    sums: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)


class Handle:
    """How to gather one weight again, in `dtype`: by `take`, from the shard of `leaf`. `saved` counts what autograd
    saved and has not used yet."""

    def __init__(self, leaf: Tensor, dtype: torch.dtype, fetch: Fetch, take: Take) -> None:
        self.shard, self.version, self.dtype = leaf.detach(), leaf._version, dtype
        self.fetch, self.take = fetch, partial(take, fetch=fetch, leaf=leaf)
        self.saved = 0
        self.whole: Tensor | None = None

    def again(self) -> Tensor:
        """The gathered weight, laid out in memory as in the forward. Raises RunError where the shard was changed
        since."""
        if self.shard._version != self.version:
            raise RunError(
                f"the shard of weight {self.fetch.name or self.fetch.shape} was modified between forward and backward: "
                f"version {self.shard._version}, wanted {self.version}; step the optimizer after the backward"
            )
        if self.whole is None:
            with torch.no_grad():
                self.whole = self.take(self.shard)
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


def gather(
    x: Tensor,
    change: str,
    *,
    grad: str | None,
    shape: Sequence[int],
    mesh: Mesh,
    name: str = "",
    again: bool = True,
    dims: tuple[int, ...] = (),
    casts: tuple[torch.dtype, ...] = (),
) -> Tensor:
    """As `reshard` of `x` with its `dims` in another order, then cast; inside `regathering()` it begins ahead, and the
    result is not kept for the backward but gathered `again`."""
    turn = Turn(dims, casts)
    if torch.compiler.is_compiling() or not _open:
        sums = _open[-1].sums.get(x.dtype) if _open and not casts else None
        return reshard(turn.of(x), change, grad=grad, shape=shape, mesh=mesh, name=name, sums=sums)
    now, fetch = _open[-1], Fetch(turn, *arrow(change), tuple(shape), mesh, name, unit_here())
    take = partial(now.take, fetch=fetch, leaf=x)
    if grad is None or not x.requires_grad or not torch.is_grad_enabled():
        out = once(lambda: take(x.detach()))
    else:
        consumed, rest = arrow(grad)
        gathered = Gathered(turn, fetch.shape, rest)
        sink = now.sinks.sink(x, gathered, fetch.unit) if now.sinks is not None else None
        out = _Gather.apply(x, take, fetch, consumed, gathered, sink)
    address = out.untyped_storage().data_ptr()
    if again and now.back is not None and out.numel() and address != x.untyped_storage().data_ptr():
        _registry[address] = Handle(x, out.dtype, fetch, now.back)
        weakref.finalize(out, _registry.pop, address, None)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        take: Callable[[Tensor], Tensor],
        fetch: Fetch,
        consumed: Layout,
        gathered: Gathered,
        sink: Sink | None,
    ) -> Tensor:
        ctx.fetch, ctx.consumed, ctx.gathered, ctx.sink = fetch, consumed, gathered, sink
        # in which a parameter's gradients are summed and add up
        ctx.dtype = (x.grad_dtype if x.is_leaf else None) or x.dtype
        out = once(lambda: take(x))
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        fetch: Fetch = ctx.fetch
        only_first_order(fetch.name)
        moved = None
        if ctx.sink is not None:
            ctx.sink(grads[0], ctx.consumed, fetch.name)
        else:
            gathered: Gathered = ctx.gathered
            grad = gathered.turn.summed(grads[0], ctx.dtype)
            moved = gathered.turn.back(
                relayout(grad, ctx.consumed, gathered.rest, gathered.shape, fetch.mesh, fetch.name), ctx.dtype
            )
        return moved, *(None,) * 5


@contextmanager
def regathering(sinks: Sinks | None = None) -> Iterator[Callable[[], None]]:
    """The context of a forward: autograd does not save weights from `gather`, `sinks` take their gradients, and gathers
    are prefetched in the orders of `sinks`. Where gradients are not recorded, it only prefetches. Gives a function;
    call it if the backward follows at once, to start that one's first gathers."""
    training = torch.is_grad_enabled()
    going = sinks.orders.going("forward" if training else "evaluation") if sinks is not None else None
    back = sinks.orders.going("backward") if sinks is not None and training else None
    back_take = _at_once if back is None else back.take_back
    sums = sinks.wider if sinks is not None and training else {}
    here = Pass(
        _at_once if going is None else going.take, sinks if training else None, back_take if training else None, sums
    )
    with pushed(_open, here):
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack) if training else nullcontext():
            yield _nothing if back is None else back.begin
        if going is not None:
            going.end()


def _nothing() -> None:
    """There is no backward that gathers."""


def _at_once(x: Tensor, fetch: Fetch, leaf: Tensor) -> Tensor:
    """A gather without prefetching, where no forward is running."""
    return fetch.at_once(x)


def rerunning() -> Callable[[], AbstractContextManager[None]]:
    """For blocks of the running forward: makes the context for their recomputation in the backward."""
    back = _open[-1].back if _open else None
    return nullcontext if back is None else partial(pushed, _open, Pass(back, sums=_open[-1].sums))


def _pack(tensor: Tensor) -> tuple[Tensor, int] | Saved:
    """What autograd saves in place of `tensor`: a handle where it is a gathered weight, or a view of one."""
    handle = _registry.get(tensor.untyped_storage().data_ptr()) if _registry else None
    if handle is None or tensor.dtype != handle.dtype:
        # detached: a saved result would hold its own graph, a cycle that is never freed without a backward
        return tensor.detach(), tensor._version
    handle.saved += 1
    return Saved(handle, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def _unpack(kept: Any) -> Tensor:
    """The saved tensor again; a gathered weight is gathered again."""
    if isinstance(kept, tuple):
        tensor, version = kept
        if tensor._version != version:  # autograd leaves this check to hooks
            raise RunError(
                f"a tensor of shape {tuple(tensor.shape)} that the backward needs was modified by an in-place "
                f"operation between forward and backward: version {tensor._version}, wanted {version}; step the "
                "optimizer and run the model again after the backward"
            )
        return tensor
    return kept.handle.again().as_strided(kept.size, kept.stride, kept.offset)
