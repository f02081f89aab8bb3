"""Gradients: from the local leaves that autograd sees to the DTensor parameters, with one sum per backward.

Autograd accumulates into local leaves. Parameters that rest whole on an axis where their gradient is partial are summed over
it in flat buckets, in reverse order of use; a bucket starts as soon as its last gradient is there, while the backward goes on, and all are
finished when the backward ends, whoever called it. Only the gradient of *this* backward is summed, then added to `param.grad`, so
accumulation over several backwards is exact. Gradients of weights that `gather` gathered come here whole (`sink`) and are
scattered in the background, a bounded number of bytes at a time. A parameter that a backward did not reach keeps its `grad` (None at first),
as on one device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch import at_end_of_backward, local_of, wrap_like
from autopar.errors import RunError
from autopar.layout import Layout, Step, steps
from autopar.runtime.count import counting, record
from autopar.runtime.mesh import Mesh
from autopar.runtime.moves import relayout_later, step_bytes
from autopar.runtime.params import Held

BUCKET_BYTES = 25_000_000  # as torch's DistributedDataParallel (bucket_cap_mb=25): large enough to fill a link


@dataclass(frozen=True, slots=True)
class Late:
    """A gradient on its way to its shard, of `nbytes` before."""

    held: Held
    finish: Callable[[], Tensor]
    nbytes: int


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are summed together, over `axes`, one after the other."""

    axes: tuple[int, ...]
    members: tuple[Held, ...]
    ready: list[Held] = field(default_factory=list)
    flat: Tensor | None = None
    work: Any = None


class GradSync:
    """Moves gradients of `held` into `param.grad`, summed over the sync axes; works for any `loss.backward()`."""

    def __init__(self, held: Sequence[Held], mesh: Mesh, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.mesh = mesh
        self.deferred = False  # gradients of several backwards add up in the leaves until `flush`
        self.scattering = True  # whether gradients of gathered weights leave autograd (`sink`)
        self.buckets = _buckets(held, mesh, bucket_bytes)
        self.bucket_of = {h.name: bucket for bucket in self.buckets for h in bucket.members}
        self.held_of = {id(h.leaf): h for h in held}
        self.reached: dict[str, Held] = {}
        self.started: list[Bucket] = []
        self.late: deque[Late] = deque()
        self.scattered: dict[str, Tensor] = {}
        self.pending: dict[str, Held] = {}
        self.limit_bytes = 2 * bucket_bytes

    @staticmethod
    def watching(held: Mapping[str, Held], mesh: Mesh) -> GradSync:
        """For all of `held`, which get new leaves."""
        sync = GradSync([h for h in held.values() if h.info.trainable], mesh)
        for one in held.values():
            one.renew()
            sync.attach(one)
        return sync

    def attach(self, held: Held) -> None:
        """Watch the leaf of `held`; call again whenever it was renewed."""
        self.held_of[id(held.leaf)] = held
        if held.leaf.requires_grad:
            held.leaf.register_post_accumulate_grad_hook(lambda _: self._arrived(held))

    def renew(self, held: Iterable[Held]) -> None:
        """Follow what users do to parameters between steps: casts, moves, freezing, assignment."""
        self.reset()
        for one in held:
            if one.stale():
                one.renew()
                self.attach(one)

    def reset(self) -> None:
        """Forget a backward that ended in an error."""
        for held in self.reached.values():
            held.leaf.grad = None
        self.reached, self.started, self.scattered = {}, [], {}
        self.pending = {}
        self.late.clear()
        for bucket in self.buckets:
            bucket.ready, bucket.flat, bucket.work = [], None, None

    def sink(self, shard: Tensor) -> Callable[[Tensor, Layout, str], None] | None:
        """Who scatters the gradient of a gathered `shard`; None for what is no parameter, or is summed in buckets as well."""
        held = self.held_of.get(id(shard))
        if held is None or held.leaf is not shard or held.name in self.bucket_of or not self.scattering:
            return None
        return lambda grad, layout, name: self._scatter(held, grad, layout, name)

    def _scatter(self, held: Held, grad: Tensor, layout: Layout, name: str) -> None:
        self._queue()
        self.pending[held.name] = held
        finish = relayout_later(grad, layout, held.info.entries, held.info.shape, self.mesh, name)
        self.late.append(Late(held, finish, grad.numel() * grad.element_size()))
        while sum(late.nbytes for late in self.late) > self.limit_bytes:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        late = self.late.popleft()
        grad = late.finish()
        before = self.scattered.get(late.held.name)
        self.scattered[late.held.name] = grad if before is None else before + grad

    def _queue(self) -> None:
        if not self.reached and not self.pending:
            at_end_of_backward(self._finish)

    @torch.no_grad()
    def flush(self) -> None:
        """Sum what the backwards of a step left in the leaves, and move it into `param.grad`."""
        for held in self.held_of.values():
            if held.leaf.grad is not None:
                self.reached[held.name] = held
        for bucket in self.buckets:
            bucket.ready = [held for held in bucket.members if held.name in self.reached]
        self._finish()

    def _arrived(self, held: Held) -> None:
        if self.deferred:
            return
        self._queue()
        if held.name in self.reached:
            raise RunError(f"the gradient of {held.name} arrived twice in one backward pass, after it may have been summed "
                           "over ranks; re-entrant checkpoints are not supported, use torch.utils.checkpoint(use_reentrant=False)")
        self.reached[held.name] = held
        bucket = self.bucket_of.get(held.name)
        if bucket is not None:
            bucket.ready.append(held)
            if len(bucket.ready) == len(bucket.members):
                self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        """Sum the gradients of `bucket` in one flat tensor, which they are parts of from now on."""
        with torch.no_grad():  # a copy even of a single one: its memory may be part of a gradient still on its way elsewhere
            bucket.flat = torch.cat([_grad(held).reshape(-1) for held in bucket.ready])
        sizes = [held.leaf.numel() for held in bucket.ready]
        for held, part in zip(bucket.ready, bucket.flat.split(sizes), strict=True):
            held.leaf.grad = part.view(held.leaf.shape)
        if bucket.axes:
            bucket.work = dist.all_reduce(bucket.flat, group=self.mesh.group(bucket.axes[0]), async_op=True)
        self.started.append(bucket)
        if counting():
            for held in bucket.ready:
                for step in sync_steps(held, self.mesh):
                    record(step.kind, step.axis, step_bytes(step, held.info.shape, _grad(held).element_size(), self.mesh), held.name)

    @torch.no_grad()
    def _finish(self) -> None:
        for bucket in self.buckets:
            if bucket.ready and bucket.flat is None:  # some of its parameters were not reached: the same ones on all ranks
                self._start(bucket)
        for bucket in self.started:
            self._complete(bucket)
        while self.late:
            self._finish_oldest()
        for held in (self.reached | self.pending).values():
            whole = held.leaf.grad if held.name in self.reached else None  # deferred gradients wait in the leaf
            _deposit(held, [g for g in (whole, self.scattered.get(held.name)) if g is not None])
        self.reset()

    def _complete(self, bucket: Bucket) -> None:
        assert bucket.flat is not None, "only started buckets are completed"
        if bucket.work is not None:
            bucket.work.wait()
        for axis in bucket.axes[1:]:
            dist.all_reduce(bucket.flat, group=self.mesh.group(axis))


def sync_steps(held: Held, mesh: Mesh) -> tuple[Step, ...]:
    """The steps that make the gradient of `held` whole on its sync axes: what is priced, run and counted."""
    return steps(held.info.partial_grad, held.info.entries, mesh.sizes)


def _buckets(held: Sequence[Held], mesh: Mesh, limit_bytes: int) -> list[Bucket]:
    """Buckets in the order in which a backward fills them: parameters in reverse, apart by axes and dtype."""
    filling: dict[tuple[tuple[int, ...], torch.dtype], list[Held]] = {}
    buckets: list[Bucket] = []
    for h in reversed(held):
        if not h.info.sync or not h.leaf.requires_grad:
            continue
        axes = tuple(step.axis for step in sync_steps(h, mesh) if mesh.sizes[step.axis] > 1)
        members = filling.setdefault((axes, h.leaf.dtype), [])
        members.append(h)
        if sum(m.leaf.numel() * m.leaf.element_size() for m in members) >= limit_bytes:
            buckets.append(Bucket(axes, tuple(members)))
            members.clear()
    return buckets + [Bucket(axes, tuple(members)) for (axes, _), members in filling.items() if members]


def _grad(held: Held) -> Tensor:
    grad = held.leaf.grad
    assert grad is not None, f"{held.name} was reached but has no gradient"
    return grad


def _deposit(held: Held, grads: Sequence[Tensor]) -> None:
    """Add to `param.grad`, in memory as the parameter lies: fused optimizers read both as flat arrays without looking at strides."""
    param, local = held.tensor, held.local
    for grad in grads:
        if param.grad is None:
            param.grad = wrap_like(grad if grad.stride() == local.stride() else torch.empty_like(local).copy_(grad), param)
        else:
            local_of(param.grad).add_(grad)
