"""Gradients: from the local leaves that autograd sees to the DTensor parameters, with one sum per backward.

Autograd accumulates into local leaves. A gradient that is partial on an axis is all-reduced over it where the parameter
rests whole, or reduce-scattered where it rests cut (ZeRO-1 and 2), in flat buckets, in reverse order of use.

* A bucket starts as soon as its last gradient is there, while the backward goes on. If it takes several collectives,
  the next one begins when buckets of a later block have begun behind it (`autopar.deferred_waits`). All are finished
  when the backward ends, whoever called it.
* Where branches run on different ranks at the same time (`placed`), gradients come in a different order on each rank.
  Collectives then begin in the order of the buckets, so that it is the same on all ranks.
* Gradients of weights that were gathered at their use (`gather`) come here whole (`sink`). They are scattered in the
  background, then summed in buckets where they are partial on other axes.
* Only the gradient of *this* backward is summed, and then added to `param.grad`, so accumulation over several backwards
  is exact.
* A parameter that a backward did not reach keeps its `grad` (None at first), as on one device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import proxy

import torch
from torch import Tensor

from autopar._torch import at_end_of_backward, gradient_hooks
from autopar.buckets import BUCKET_BYTES
from autopar.deferred_waits import BUCKETS, Queue
from autopar.errors import RunError
from autopar.layout import Layout
from autopar.runtime.coalesced import Together
from autopar.runtime.deposits import deposit
from autopar.runtime.first_order import only_first_order
from autopar.runtime.gradient_buckets import Bucket, buckets_of, sync_steps, turns_of
from autopar.runtime.gradient_scatters import Scatter
from autopar.runtime.leaves import Reader, owners
from autopar.runtime.lifetimes import weakly
from autopar.runtime.mesh import Mesh
from autopar.runtime.moves import Chain
from autopar.runtime.params import Held
from autopar.runtime.prefetch import Orders
from autopar.runtime.turns import AS_IS, Gathered


class GradSync:
    """Reduces the gradients of the parameters `held` over ranks and adds them to `param.grad`, in any
    `loss.backward()`; `blocks` are the blocks that read them.

        deferred     gradients of several backwards accumulate in the leaves, until `summing`, `begin` or `flush`
        finishing    reductions are finished when a backward ends, not by `flush`
        scattering   gradients of gathered weights leave autograd (`sink`)
        wider        dtype of leaves -> the dtype in which their gradients are summed, where that is another one
        scatters     reduce-scatters of single parameters in the background; `sums`: the same of buckets
        turns        what starts a reduction, in the fixed order that branches need; `next_turn`: the first of them that
                     has not started

    Of the running backward:

        reached      parameters whose gradient, or a part of it, has arrived
        started      buckets whose reduction has started
        moved        parameters that were handed to their bucket or reduce-scatter
        pending      parameters with a reduce-scatter that has started
        scattered    gradients in the layout at rest
        coming       parameters that are reduced in buckets -> parts of the gradient that are yet to be scattered
        partial_sums the sum of such parts in the leaf, and its version, to tell it from what autograd accumulates there
        mixed        parameters of which autograd accumulates a part too: complete only when the backward ends
        waiting      gradients, on the device, of parameters that rest on the host, while more microbatches add to them
    """

    def __init__(
        self, held: Sequence[Held], mesh: Mesh, bucket_bytes: int = BUCKET_BYTES, *, blocks: Iterable[Reader] = ()
    ) -> None:
        self.mesh = mesh
        self.owners = owners(blocks)
        self.deferred = False
        self.finishing = True
        self.scattering = True
        self.fill(held, bucket_bytes)
        self.next_turn = 0
        self.held_of = {id(h.leaf): h for h in held}
        self.wider: dict[torch.dtype, torch.dtype] = {}
        self.reached: dict[str, Held] = {}
        self.started: list[Bucket] = []
        self.scatters: Queue[Scatter] = Queue(BUCKETS * bucket_bytes)
        self.sums: Queue[Together] = Queue(bucket_bytes)
        self.coming: dict[str, int] = {}
        self.partial_sums: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        self.mixed: dict[str, None] = {}
        self.moved: dict[str, None] = {}
        self.scattered: dict[str, Tensor] = {}
        self.pending: dict[str, Held] = {}
        self.waiting: dict[str, tuple[Held, Tensor]] = {}
        me = proxy(self)
        self.orders = Orders(lambda leaf: me.of(leaf), mesh)

    @staticmethod
    def watching(held: Mapping[str, Held], mesh: Mesh, blocks: Iterable[Reader]) -> GradSync:
        """A GradSync of all parameters in `held` that train and whose gradient comes from here; all get new leaves."""
        sync = GradSync([h for h in held.values() if h.info.trainable and h.info.reached], mesh, blocks=blocks)
        for one in held.values():
            one.renew(mesh)
            sync.attach(one)
        return sync

    def fill(self, held: Sequence[Held], bucket_bytes: int) -> None:
        """Divide the gradients of `held` into buckets of about `bucket_bytes`."""
        self.buckets = buckets_of(held, self.mesh, bucket_bytes)
        for bucket in self.buckets:
            bucket.block = min(
                (self.owners[id(table)] for table, _ in bucket.members[-1].readers if id(table) in self.owners),
                default=None,
            )
        self.bucket_of = {h.name: bucket for bucket in self.buckets for h in bucket.members}
        self.turns = turns_of(held, self.buckets)
        # in which gradients are added to `param.grad`: the same on all ranks, since hooks of users may run collectives
        self.order = {h.name: number for number, h in enumerate(reversed(held))}

    def attach(self, held: Held) -> None:
        """Register the hook of the leaf of `held`; call it again whenever the leaf was renewed."""
        self.held_of[id(held.leaf)] = held
        if held.leaf.requires_grad:
            if held.leaf.dtype != held.local.dtype:
                self.wider[held.leaf.dtype] = held.local.dtype
            held.leaf.register_post_accumulate_grad_hook(weakly(self._arrived))

    def renew(self, held: Iterable[Held]) -> None:
        """Begin a step: forget a failed backward, and renew the leaves of parameters that the user cast, moved, froze
        or assigned. Raises RunError where a parameter is unfrozen that was frozen when the model was compiled, and
        where one has a gradient hook in a pipeline."""
        self.reset()
        for one in held:
            if one.tensor.requires_grad and not one.info.trainable:
                raise RunError(
                    f"parameter {one.name} was frozen when the model was compiled, and the plan has no way for its "
                    "gradient: compile the model with all that will ever train unfrozen, and freeze then "
                    "(`requires_grad_(False)`)"
                )
            if self.deferred and any(gradient_hooks(one.tensor)):
                raise RunError(
                    f"parameter {one.name} has a hook for its gradient, which in a pipeline is there only when all "
                    "microbatches are through: remove it (`handle.remove()`) and do what it does between train_step "
                    "and optimizer.step"
                )
            if one.stale():
                one.renew(self.mesh)
                self.attach(one)

    def reset(self) -> None:
        """Begin a step: discard the state of a backward that ended in an error."""
        self.orders.step()
        if torch.is_grad_enabled():  # the backward of the forward before an evaluation may be yet to come
            self.coming = {}
        for held in self.held_of.values():
            held.leaf.grad = None
        self.waiting = {}
        self.scatters.drop()
        for bucket in self.started:
            if bucket.sums is not None:
                bucket.sums.wait()
        self.sums.waiting.clear()
        self._clear()

    def _clear(self) -> None:
        self.reached, self.started, self.scattered, self.pending, self.moved, self.next_turn = {}, [], {}, {}, {}, 0
        for bucket in self.buckets:
            bucket.ready, bucket.sums = [], None

    def of(self, leaf: Tensor) -> Held | None:
        """The parameter that `leaf` is the leaf of; None for other tensors."""
        held = self.held_of.get(id(leaf))
        return held if held is not None and held.leaf is leaf else None

    def sink(self, shard: Tensor, gathered: Gathered, unit: Any) -> Callable[[Tensor, Layout, str], None] | None:
        """The function that takes the whole gradient of a weight that `unit` gathered from `shard`; None where autograd
        accumulates it in the leaf."""
        held = self.of(shard)
        if held is None or not self.scattering:
            return None
        if held.info.partial_grad == held.info.entries:
            return lambda grad, layout, name: self._send(held, grad, layout, gathered, name, unit, self._rests)
        self.coming[held.name] = self.coming.get(held.name, 0) + 1
        return lambda grad, layout, name: self._send(held, grad, layout, gathered, name, unit, self._partly)

    def _scatter(self, held: Held, grad: Tensor, layout: Layout, name: str, unit: Any) -> None:
        self._send(held, grad, layout, Gathered(AS_IS, held.info.shape, held.info.entries), name, unit, self._rests)

    def _send(
        self,
        held: Held,
        grad: Tensor,
        src: Layout,
        to: Gathered,
        name: str,
        unit: Any,
        done: Callable[[Held, Tensor], None],
    ) -> None:
        """Reduce-scatter a gradient from layout `src` in the background, then give it to `done`."""
        self._queue()
        self.pending[held.name] = held
        dtype = held.local.dtype
        grad = to.turn.summed(grad, dtype)
        scatter = Scatter(
            Chain(grad, src, to.rest, to.shape, self.mesh, name, behind=True),
            lambda grad: done(held, to.turn.back(grad, dtype)),
        )
        if scatter.chain.more:
            scatter.chain.go_on()
        del grad  # the chain lets go of it when its first collective is over
        self.scatters.add(scatter, unit)

    @torch.no_grad()
    def _partly(self, held: Held, grad: Tensor) -> None:
        """Add one part of the gradient of a leaf (each gather of it gives one). After the last part it is summed over
        ranks."""
        before = held.leaf.grad
        held.leaf.grad = whole = grad if before is None else before + grad
        self.partial_sums[held.name] = weakref.ref(whole), whole._version
        self.coming[held.name] = self.coming.get(held.name, 0) - 1
        if self.deferred and not held.info.each:
            return
        self.reached[held.name] = held
        if not self.coming[held.name] and held.name not in self.mixed:
            self._move(held)

    def _rests(self, held: Held, grad: Tensor) -> None:
        """Add a part of the gradient of `held` that is already in the layout at rest."""
        before = self.scattered.get(held.name)
        self.scattered[held.name] = grad if before is None else before + grad

    @contextmanager
    def summing(self, *, finish: bool = True) -> Iterator[None]:
        """A context for the last of several backwards, which begins to reduce all that they accumulated; without
        `finish`, reductions go on when it has ended. `flush` has the rest."""
        before, (self.deferred, self.finishing) = (self.deferred, self.finishing), (False, finish)
        try:
            yield
        finally:
            self.deferred, self.finishing = before

    @torch.no_grad()
    def begin(self) -> None:
        """Start the reduction of all gradients that the backwards of a step accumulated; `flush` finishes it."""
        self._reach(each=False)
        self._begin_all()

    def _queue(self) -> None:
        if not self.reached and not self.pending:
            at_end_of_backward(self._finish if self.finishing else self._begin_all)

    def _reach(self, *, each: bool) -> None:
        """Note the gradients that wait in leaves; with `each`, those that are reduced after every microbatch."""
        for held in self.held_of.values():
            if held.leaf.grad is not None and (held.info.each or not each):
                self.reached[held.name] = held

    @torch.no_grad()
    def flush(self, *, each: bool = False) -> None:
        """Reduce the gradients that the backwards of a step accumulated in the leaves, and add them to `param.grad`;
        with `each`, only those that are reduced after every microbatch."""
        self._reach(each=each)
        self._finish(more=each)
        if not each:
            for held, grad in self.waiting.values():
                deposit(held, [grad])
            self.waiting = {}

    def _arrived(self, leaf: Tensor) -> None:
        """Hook of a leaf, after autograd has accumulated its gradient: start the reduction, unless further parts of the
        gradient are to come. Raises RunError where the leaf is no longer that of a parameter, or a gradient arrives
        twice."""
        held = self.of(leaf)
        if held is None:
            raise RunError(
                f"the gradient of a parameter of shape {tuple(leaf.shape)} came after it was moved, cast, frozen or "
                "replaced: run the backward of a loss before the next forward"
            )
        only_first_order(held.name)
        if (self.deferred and not held.info.each) or not self._accumulated(held):
            return
        self._queue()
        if held.name in self.coming:  # other readers gather it, and their parts may still be coming
            self.mixed[held.name], self.reached[held.name] = None, held
            return
        if held.name in self.reached:
            raise RunError(
                f"the gradient of {held.name} arrived twice in one backward pass, after it may have been summed "
                "over ranks; re-entrant checkpoints are not supported, use torch.utils.checkpoint(use_reentrant=False)"
            )
        self.reached[held.name] = held
        self._move(held)

    def _accumulated(self, held: Held) -> bool:
        """Whether autograd has accumulated something in a leaf. torch 2.13 also calls the hook where all gradients of
        the leaf went to `sink`."""
        part, version = self.partial_sums.get(held.name, (lambda: None, 0))
        return held.leaf.grad is not None and (held.leaf.grad is not part() or held.leaf.grad._version != version)

    @torch.no_grad()
    def _move(self, held: Held) -> None:
        """Start the reduction of the gradient of a leaf: of its bucket once that is full, else by itself. With
        branches, in the order of `turns`."""
        self.moved[held.name] = None
        bucket = self.bucket_of.get(held.name)
        if bucket is not None:
            bucket.ready.append(held)
        elif held.info.partial_grad == held.info.entries:
            return
        if not self.mesh.branches and self._full(turn := bucket or held):
            self._begin(turn)
        while self.mesh.branches and self.next_turn < len(self.turns) and self._full(self.turns[self.next_turn]):
            self._begin(self.turns[self.next_turn])
            self.next_turn += 1

    def _full(self, turn: Bucket | Held) -> bool:
        return len(turn.ready) == len(turn.members) if isinstance(turn, Bucket) else turn.name in self.moved

    def _begin(self, turn: Bucket | Held) -> None:
        """Start the reduction of a turn with the gradients that it has by now, unless it has started."""
        if isinstance(turn, Bucket):
            if turn.ready and turn.sums is None:
                self._start(turn)
        elif turn.leaf.grad is not None:
            grad, turn.leaf.grad = _grad(turn), None
            self._scatter(turn, grad, turn.info.partial_grad, turn.name, turn)

    @torch.no_grad()
    def _start(self, bucket: Bucket) -> None:
        """Start the reduction of a bucket over the gradients that are ready, and take them out of the leaves."""
        came = {held.name for held in bucket.ready}
        bucket.ready = [held for held in bucket.members if held.name in came]
        grads = [_grad(held) for held in bucket.ready]
        ways, shapes = (
            [sync_steps(held, self.mesh) for held in bucket.ready],
            [held.info.shape for held in bucket.ready],
        )
        # sums change no gradient in place: its memory may be part of another one that is still on its way
        bucket.sums = Together(ways, grads, shapes, self.mesh, [held.name for held in bucket.ready])
        del grads
        for held in bucket.ready:
            held.leaf.grad = None
        self.started.append(bucket)
        if bucket.sums.later:
            self.sums.add(bucket.sums, bucket if bucket.block is None else bucket.block)

    @torch.no_grad()
    def _begin_all(self) -> None:
        """Start all reductions that are left, when scatters have brought all parts of the gradients."""
        self.scatters.drain()
        for held in list(self.reached.values()):
            if held.name not in self.moved:
                self._move(held)
        for turn in self.turns:  # some parameters were not reached: the same ones on all ranks
            if isinstance(turn, Bucket) or turn.name in self.moved:
                self._begin(turn)

    @torch.no_grad()
    def _finish(self, *, more: bool | None = None) -> None:
        """End a backward: finish all reductions and add to `param.grad`. `more`: further microbatches follow in this
        step (None: as `deferred` says)."""
        self._begin_all()
        for held in [held for bucket in self.buckets for held in bucket.members if held.name in self.reached]:
            if held.leaf.grad is not None:  # a part that arrived after the reduction of its bucket had started
                grad, held.leaf.grad = held.leaf.grad, None
                self._scatter(held, grad, held.info.partial_grad, held.name, held)
        self.sums.drain()
        for bucket in self.started:
            self._complete(bucket)
        self.scatters.drain()
        for held in sorted((self.reached | self.pending).values(), key=lambda held: self.order[held.name]):
            own = held.leaf.grad if held.name in self.reached else None  # deferred gradients wait in the leaf
            grads = [g for g in (own, self.scattered.get(held.name)) if g is not None]
            if held.info.host:
                grads = self._add_up(held, grads, more=self.deferred if more is None else more)
            if grads:
                deposit(held, grads)
            if own is not None:
                held.leaf.grad = None
        self._clear()

    def _add_up(self, held: Held, grads: Sequence[Tensor], *, more: bool) -> list[Tensor]:
        """Accumulate gradients of a parameter on the host, on the device, and give their sum unless `more` follow: they
        are copied to the host once per step."""
        for grad in grads:
            before = self.waiting.get(held.name)
            self.waiting[held.name] = (held, grad if before is None else before[1].add_(grad))
        return [] if more or held.name not in self.waiting else [self.waiting.pop(held.name)[1]]

    def _complete(self, bucket: Bucket) -> None:
        assert bucket.sums is not None, "only started buckets are completed"
        for held, grad in zip(bucket.ready, bucket.sums.finish(), strict=True):
            self._rests(held, grad)


def _grad(held: Held) -> Tensor:
    grad = held.leaf.grad
    assert grad is not None, f"{held.name} was reached but has no gradient"
    return grad
