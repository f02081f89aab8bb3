"""Blocks whose forward is run again in the backward, so that autograd keeps their inputs only (rematerialisation).

    for block in self.runs["layers"]:
        h = remat(block, h, b=b, s=s)

The backward runs the block again by torch.utils.checkpoint, with the random state of that call and the buffers before
they were changed. Results that the block marks (replay.keep) are stored instead. The second run begins when the first
gradient of the block's results arrives, and ends at `enough()` (replay.enough). Both are points of the program, so that
all ranks run the same collectives in the same order, although ranks with other shards (empty ones) may save fewer
tensors. torch by itself begins when the first saved tensor is asked for and ends when the last one has been recomputed,
which depends on the rank. In a compiled block the compiler decides what is recomputed, and marks have no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from autopar._torch import graph_is_kept, pytree
from autopar.errors import RunError
from autopar.runtime import regather, rng
from autopar.runtime.names import full_name
from autopar.runtime.replay import Enough, Tape, recording, running_again
from autopar.runtime.scopes import Block


def remat(block: Block, *args: Any, **kwargs: Any) -> Any:
    """`block(*args, **kwargs)`, run again in the backward.

    Raises RunError in the backward where a weight was changed in between: the gradient would be that of another
    function.
    """
    if not torch.is_grad_enabled() or (block.compiled_again is not None and not _graded(block, args, kwargs)):
        return block(*args, **kwargs)
    if block.ready is not None:
        block.ready()  # before the versions of its weights are noted
    if block.compiled_again is not None:
        with rng.in_block(block.number):
            return block.compiled_again(*args, **kwargs)
    call = _Call(block)
    anchor, results = checkpoint(
        call.run,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=call.contexts,
        early_stop=False,
        **kwargs,
    )
    own = [
        out
        for out in pytree.tree_leaves(results)
        if isinstance(out, Tensor) and out.requires_grad and all(out is not arg for arg in args)
    ]
    register_multi_grad_hook(own, _beginning(anchor), mode="any")
    return results


def _beginning(anchor: Tensor) -> Callable[[Tensor], None]:
    """The hook that begins the second run, by asking for the saved tensor of `anchor`. It lives as long as the nodes of
    the graph. It drops the anchor once the run has begun, since the anchor keeps the inputs of the block alive through
    torch's checkpoint; but not where the backward retains its graph, which may run again.

    A function and no callable object, since torch copies the attributes of an object into another one
    (functools.wraps).
    """
    held: list[Any] = [anchor]  # the tensor and not its node, which alone would free the saved tensor

    def begin(_: Tensor) -> None:
        if not held:
            return  # the graph is gone, as autograd says next
        _ = held[0].grad_fn.saved_tensors
        if not graph_is_kept():
            held.clear()

    return begin


def _graded(block: Block, args: Any, kwargs: Any) -> bool:
    """Whether anything that `block` reads requires a gradient. Without, nothing is saved, and torch refuses to compile
    a checkpoint with operators that may draw random numbers."""
    return any(
        isinstance(x, Tensor) and x.requires_grad for x in (*pytree.tree_leaves((args, kwargs)), *block.w.values())
    )


class _Anchor(torch.autograd.Function):
    """A saved tensor that no backward needs: asking for it makes torch's checkpoint run the block again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()


@dataclass(eq=False)
class _Call:
    """What one call of a block needs to be run again as it was."""

    block: Block
    tape: Tape = field(default_factory=Tape)

    def __post_init__(self) -> None:
        self.rng = rng.current().copy()
        self.gathering = regather.rerunning()
        self.before = {name: self.block.b[name].clone() for name in self.block.MUTATES}
        self.versions = {name: (tensor, tensor._version) for name, tensor in self._fixed().items()}

    def run(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """First run: the anchor's result, and the results of the block. Second run: the block up to `enough`, only for
        the tensors that autograd saves."""
        anchor = _Anchor.apply(torch.zeros((), device="cpu", requires_grad=True))
        if not running_again():
            return anchor, self.block(*args, **kwargs)
        with suppress(Enough):
            self.block(*args, **kwargs)
        return None, None

    def _fixed(self) -> dict[str, Tensor]:
        """The weights and buffers that must not change between forward and backward."""
        return {**self.block.w, **{name: b for name, b in self.block.b.items() if name not in self.block.MUTATES}}

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of the forward, and of its recomputation (which may happen more than once)."""
        return recording(self.tape, again=False), _Again(self)

    def check(self) -> None:
        """Raise RunError where weights were changed since the forward."""
        for name, now in self._fixed().items():
            tensor, version = self.versions[name]
            if now is not tensor or now._version != version:
                raise RunError(
                    f"{full_name(self.block.naming, name)} was modified between the forward and the backward of a "
                    f"block that is run again for it: version {now._version}, wanted {version}; step the optimizer "
                    "after the backward"
                )


class _Again:
    """The context of a recomputation: random state, gathers, kept results and buffers of the forward."""

    def __init__(self, call: _Call) -> None:
        self.call, self.stack = call, ExitStack()

    def __enter__(self) -> None:
        call = self.call
        call.check()
        self.stack.enter_context(rng.using(call.rng.copy()))
        self.stack.enter_context(call.gathering())
        self.stack.enter_context(recording(call.tape, again=True))
        now = call.block.b
        self.stack.callback(setattr, call.block, "b", now)
        call.block.b = {**now, **call.before}

    def __exit__(self, *error: object) -> None:
        self.stack.close()
