"""A shadow of the user's model: the same structure on the meta device, so that nothing is copied, run or changed.

`shadow(model, keep)` shares no tensor with the model. `keep` names containers and the children to keep of them, which is how
capture shortens runs of alike blocks: what is left out is never copied. Forward hooks are part of what a model computes and come
along; backward hooks cannot be captured and do not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn


def shadow(model: nn.Module, keep: Mapping[str, Mapping[int, int]] | None = None) -> nn.Module:
    """A meta copy of `model`; of each container in `keep` only the listed children, `{number in the copy: number in the model}`."""
    memo: dict[int, Any] = {}
    containers = {path: model.get_submodule(path) for path in keep or {}}
    _remember(model, memo, skip=list(containers.values()))
    for path, numbers in (keep or {}).items():
        container = containers[path]
        for number in numbers.values():
            _remember(container.get_submodule(str(number)), memo)
        short = memo[id(container)] = type(container).__new__(type(container))
        vars(short).update({k: copy.deepcopy(v, memo) for k, v in vars(container).items() if k != "_modules"})
        short._modules = {str(shown): copy.deepcopy(container.get_submodule(str(n)), memo) for shown, n in numbers.items()}
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return twin


def _remember(root: nn.Module, memo: dict[int, Any], skip: Sequence[nn.Module] = ()) -> None:
    """Put a meta twin of every tensor below `root` into the memo of deepcopy."""
    for table in (root._parameters, root._buffers):
        for tensor in table.values():
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _on_meta(tensor)
    for value in vars(root).values():
        if isinstance(value, torch.Tensor) and id(value) not in memo:
            memo[id(value)] = _on_meta(value)
    if not any(root is other for other in skip):
        for child in root.children():
            _remember(child, memo, skip)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class WithLoss(nn.Module):
    """A model and a loss function as one module: `forward(*inputs, *targets) -> (loss, outputs)`.

    The last `targets` positional arguments go to `loss_fn(outputs, *targets)`, the others to the model.
    """

    INNER = "_model_of_loss"  # the name of the model in it, which no user's module has

    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor], targets: int) -> None:
        super().__init__()
        self.add_module(self.INNER, model)
        self.loss_fn, self.targets = loss_fn, targets

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The loss, and the model's own outputs."""
        split = len(args) - self.targets
        outputs = self.get_submodule(self.INNER)(*args[:split], **kwargs)
        return {"loss": self.loss_fn(outputs, *args[split:]), "outputs": outputs}
