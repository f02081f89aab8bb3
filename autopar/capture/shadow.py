"""A shadow of the user's model: the same structure on the meta device, so that nothing is copied, run or changed.

`shadow(model, keep)` shares no tensor and no hook with the model. `keep` names containers and the children to keep of them, which
is how capture shortens runs of alike blocks: what is left out is never copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn


def shadow(model: nn.Module, keep: Mapping[str, Sequence[int]] | None = None) -> nn.Module:
    """A meta copy of `model`; of each container in `keep` only the listed children, in order."""
    memo: dict[int, Any] = {}
    for path, numbers in (keep or {}).items():
        container = model.get_submodule(path)
        children = list(container.children())
        short = type(container)(*[]) if isinstance(container, nn.Sequential) else nn.ModuleList()
        memo[id(container)] = short
        for number in numbers:
            _remember(children[number], memo)
            short.append(copy.deepcopy(children[number], memo))
    _remember(model, memo, skip=[model.get_submodule(path) for path in keep or {}])
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            hooks.clear()
    return twin


def _remember(root: nn.Module, memo: dict[int, Any], skip: Sequence[nn.Module] = ()) -> None:
    """Put a meta twin of every tensor below `root` into the memo of deepcopy."""
    if any(root is other for other in skip):
        return
    for table in (root._parameters, root._buffers):
        for tensor in table.values():
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _on_meta(tensor)
    for value in vars(root).values():
        if isinstance(value, torch.Tensor) and id(value) not in memo:
            memo[id(value)] = _on_meta(value)
    for child in root.children():
        _remember(child, memo, skip)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class WithLoss(nn.Module):
    """A model and a loss function as one module: `forward(*inputs, *targets) -> (loss, outputs)`.

    The last `targets` positional arguments go to `loss_fn(outputs, *targets)`, the others to the model.
    """

    def __init__(self, inner: nn.Module, loss_fn: Callable[..., torch.Tensor], targets: int) -> None:
        super().__init__()
        self.inner, self.loss_fn, self.targets = inner, loss_fn, targets

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        split = len(args) - self.targets
        outputs = self.inner(*args[:split], **kwargs)
        return {"loss": self.loss_fn(outputs, *args[split:]), "outputs": outputs}
