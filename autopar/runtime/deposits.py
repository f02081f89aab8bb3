"""Gradients that are done, added to `param.grad`. Called by runtime.gradsync."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar._torch import gradient_hooks, local_of, wrap_like
from autopar.runtime.moves import settled
from autopar.runtime.params import Held, grad_at_rest


def deposit(held: Held, grads: Sequence[Tensor]) -> None:
    """Add `grads`, at least one, to `param.grad`, with the strides of the parameter: fused optimizers read both as flat
    arrays and ignore strides. Hooks of the parameter are called as autograd calls them: gradient hooks before, which
    may change the gradient, and post-accumulate hooks after."""
    param, local = held.tensor, held.local
    changing, noting = gradient_hooks(param)
    if changing:
        total = wrap_like(sum(grads[1:], grads[0]).to(local.device), param)
        for hook in changing:
            changed = hook(total)
            total = total if changed is None else changed
        grads = [local_of(total)]
    for grad in (settled(grad).to(local.device) for grad in grads):
        before = grad_at_rest(param)
        if before is None:
            param.grad = wrap_like(
                grad if grad.stride() == local.stride() else torch.empty_like(local).copy_(grad), param
            )
        else:
            local_of(before).add_(grad)
    for note in noting:
        note(param)
