"""torch's PipelineStage with less memory, and with correct gradients of weights in split backwards.

torch's stages allocate receive buffers for all microbatches, in both directions, in the first step and keep them; they
keep each output until its backward; and schedules of several stages per place keep all sent tensors until the step
ends. Here a buffer is allocated when its receive is posted and freed after its use, and a sent tensor is freed before
the next one of its kind is sent; the backward starts from a tensor of the same shape without memory in its place
(`left`).

No deadlock: a send is waited for only before the next one of its kind, and the schedule posts the matching receive
before that.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining

from autopar._torch import post
from autopar.runtime.count import record
from autopar.runtime.places import PIPELINE_AXIS
from autopar.runtime.split_backward import add_gradients, disjoint


class Sent:
    """The sends of one place that may not have completed yet: the last one of each kind."""

    def __init__(self) -> None:
        self._last: dict[str, Sequence[dist.Work]] = {}

    def send(self, what: str, ops: list[dist.P2POp]) -> None:
        """Start `ops`, after the previous sends of the kind `what` have completed."""
        _wait(self._last.pop(what, ()))
        self._last[what] = post(ops)

    def finish(self) -> None:
        """Wait for all sends at the end of a step."""
        for works in self._last.values():
            _wait(works)
        self._last = {}


class Left(torch.autograd.Function):
    """Replaces a sent tensor in the autograd graph: a tensor of its shape with zero strides (one element of memory),
    through which its gradient enters the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, (0,) * x.dim(), dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def left(sent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What a stage keeps of the tensors that it sends: stand-ins from which the backward starts."""
    made: list[Tensor] = [Left.apply(x) for x in sent]
    return tuple(made)


class OwnStage(pipelining.PipelineStage):
    """One stage. Its module puts the tensors for other places into `going`. `sent` sends them; where it is None the
    schedule does, and waits for the sends before it goes on.

    In a split backward torch keeps the first gradient of a weight as autograd returned it, and adds later ones to it in
    place. That tensor may be an expanded one, or one that is also the gradient of another weight or of a received value
    (an addition passes its gradient on unchanged), so that adding would fail or change the other gradient. Here the
    first gradient is copied. Weights that are used more than once are handled by runtime.split_backward.
    """

    def __init__(self, *args: Any, sent: Sent | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # torch 2.13, under TORCH_DISTRIBUTED_DEBUG=DETAIL: it wants the strides of what is sent of what is left
        self._runtime_validate = False
        self._sent = sent
        self._complete = False  # whether gradients wait for their sums to begin
        self._going: dict[int, Sequence[Tensor]] = {}  # of each microbatch, what is to go to another place

    def _validate_fwd_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Torch before 2.13 always wants them."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """The warm-up transfers of torch before 2.13, without those from this rank to itself (two adjacent stages on
        one place), which gloo cannot do."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        """torch makes its receive buffers on the device of the stage."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of activations, into buffers that are made now."""
        self._make(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of gradients, into buffers that are made now."""
        self._make(self.grad_recv_info[bwd_chunk_id] if self.has_backward and not self.is_last else ())
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of activations that the schedule is to post."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        for op, tensor in zip(ops, self._going.pop(fwd_chunk_id), strict=True):
            op.tensor = tensor
        return self._send("activations", ops)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of gradients that the schedule is to post."""
        ops = self._send("gradients", super().get_bwd_send_ops(bwd_chunk_id))
        if self._sent is not None:  # they are on their way
            self._begin_sums()
        return ops

    def _send(self, what: str, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Send `ops`; returns those that the schedule is to send instead."""
        count_sends([op.tensor for op in ops])
        if self._sent is None:
            return ops
        self._sent.send(what, ops)
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The forward of one microbatch; receive buffers are freed after it, but for what autograd saved."""
        with _errors_as_they_are():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _let_go(self.args_recv_info[fwd_chunk_id])
        runner: Any = self.submod
        self._going[fwd_chunk_id], runner.going = runner.going, ()
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward of one microbatch, or its part for what was received. A stage of the same place may have no
        gradient to give: zeros. With the last one sums of gradients begin: after it, so that nothing keeps other stages
        waiting for what it sends them, and of the first stage, which sends nothing, already in it."""
        runner: Any = self.submod
        came, completes = self.grad_recv_info.get(bwd_chunk_id, ()), full_backward and last_backward
        self._make(came, zero=True)
        with _errors_as_they_are(), runner.summing() if completes and self.is_first else nullcontext():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        _let_go(came)
        self._complete = completes and not self.is_first
        if self._complete and self.stage_index_to_group_rank[self.stage_index - 1] == self.group_rank:
            self._begin_sums()

    def _begin_sums(self) -> None:
        """Begin the sums of gradients that are complete."""
        runner: Any = self.submod
        if self._complete:
            runner.scatter(last=True)
        self._complete = False

    def _make(self, infos: Sequence[Any], *, zero: bool = False) -> None:
        """Buffers that are there in name only, in memory."""
        for info in infos:
            if _buffered(info) and info.buffer.is_meta:
                made = torch.zeros_like if zero else torch.empty_like
                info.buffer = made(info.buffer, device=self.device, requires_grad=info.buffer.requires_grad)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The weights' part of the backward of one microbatch; after the last one sums of gradients begin."""
        first = [leaf for leaf in self.submod.parameters() if leaf.grad is None]
        cast = [
            (leaf, leaf.grad, leaf.grad_dtype)
            for leaf in self.submod.parameters()
            if leaf.grad_dtype not in (None, leaf.dtype)
        ]
        for leaf, _, _ in cast:
            leaf.grad, leaf.grad_dtype = None, None
        self._weights_of_several_uses(bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        for leaf, before, dtype in cast:
            _add(leaf, before, dtype)
        for leaf in first:
            if leaf.grad is not None:
                leaf.grad = leaf.grad.clone()
        runner: Any = self.submod
        runner.scatter(last=last_backward)

    def _weights_of_several_uses(self, chunk: int) -> None:
        """Add the gradients of weights with several intermediates (runtime.split_backward) for microbatch `chunk`;
        torch adds those of the others."""
        inputs, groups, *outputs = self.backward_state.get(chunk, (None, None))
        if groups is None:  # of the first stage, which has nothing but weights
            return
        each = disjoint(groups)
        for group in each:
            if len(group["intermediates"]) > 1:
                add_gradients(group, [x for x in inputs if isinstance(x, Tensor)])
        self.backward_state[chunk] = (inputs, [group for group in each if len(group["intermediates"]) < 2], *outputs)


@contextmanager
def _errors_as_they_are() -> Iterator[None]:
    """A context that raises errors of a stage as they are: torch wraps them in a RuntimeError, whose text becomes a
    note."""
    try:
        yield
    except RuntimeError as error:
        found, said = error.__cause__, inspect.cleandoc(str(error)).strip()
        if found is None or "ailed to run" not in said.partition("\n")[0]:
            raise
        found.add_note(said)
        raise found from found.__cause__


def count_sends(tensors: Sequence[Tensor]) -> None:
    """Count what goes to another place."""
    for tensor in tensors:
        record("send", PIPELINE_AXIS, tensor.numel() * tensor.element_size())


def _buffered(info: Any) -> bool:
    """Whether `info` is of a tensor that is received into a buffer; inputs of the first stage are not."""
    return getattr(info, "buffer", None) is not None


def _let_go(infos: Sequence[Any]) -> None:
    """Free the memory of receive buffers after their use."""
    for info in infos:
        if _buffered(info) and not info.buffer.is_meta:
            info.buffer = torch.empty_like(info.buffer, device="meta", requires_grad=info.buffer.requires_grad)


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _add(leaf: Tensor, before: Tensor | None, dtype: torch.dtype) -> None:
    """Cast the gradient that one microbatch left in `leaf` to `dtype`, in which gradients add up, and add `before`, the
    sum so far."""
    new = None if leaf.grad is None else leaf.grad.to(dtype)
    leaf.grad, leaf.grad_dtype = None, dtype
    leaf.grad = before if new is None else new if before is None else before.add_(new)
