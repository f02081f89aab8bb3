"""Buffers that forward assigns: `self.center = self.center * 0.9 + x.mean(0)`. What is assigned is what the next step
reads. Used by forwards, step_variation and tape.

During forward the old and the new buffer are two tensors. At its end the new values are copied into the old buffer, in
place. torch.export does so for buffers of the top-level module only, and ignores assignments in inner modules.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

Buffers = Mapping[str, Tensor | None]


def buffers_of(model: nn.Module) -> Buffers:
    """Every buffer under each of its names."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in module._buffers.items()
    }


def assigned(model: nn.Module, before: Buffers) -> dict[str, Tensor]:
    """The buffers that are another tensor than in `before`."""
    return {
        name: tensor
        for name, tensor in buffers_of(model).items()
        if tensor is not None and tensor is not before.get(name) is not None
    }


def why_unlike(new: Tensor, old: Tensor | None) -> str:
    """Why the values of `new` cannot be copied into the buffer `old` (another dtype or sizes), in words; "" where they
    can."""
    # text: to compare symbolic sizes would fix them
    got, wanted = (
        f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if x is not None else "None" for x in (new, old)
    )
    return f"{got} instead of {wanted}" if got != wanted else ""


def put_back(model: nn.Module, before: Buffers) -> None:
    """Restore the tensors of all assigned buffers."""
    for name in assigned(model, before):
        path, _, key = name.rpartition(".")
        model.get_submodule(path)._buffers[key] = before[name]


def write_back(model: nn.Module, before: Buffers) -> None:
    """Restore the tensors of assigned buffers, with the new values copied into them. Buffers of another size, which
    models make for longer inputs, stay assigned."""
    for name, new in assigned(model, before).items():
        old, (path, _, key) = before[name], name.rpartition(".")
        if old is not None and not why_unlike(new, old):
            old.copy_(new.detach() if new.requires_grad and torch.is_grad_enabled() else new)
            model.get_submodule(path)._buffers[key] = old
