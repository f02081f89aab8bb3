"""The parameters and buffers of a model under their own names. Used by capture.capture, constants and verify.

`state_dict()` may differ from them: its hooks rename, cut or leave out tensors, and extra state is no tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def own_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, without their gradients, in the order of a state dict; a tensor of two
    names under each."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        held: dict[str, Any] = {
            **module._parameters,
            **{
                name: value for name, value in module._buffers.items() if name not in module._non_persistent_buffers_set
            },
        }
        found |= {
            f"{path}.{name}" if path else name: value.detach() for name, value in held.items() if value is not None
        }
    return found


def other_state(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names in the state dict of `model` that are no tensors of its own: entries that are no tensors, and other
    tensors."""
    own, said = own_state(model), model.state_dict(keep_vars=True)
    others = [name for name in said if name not in own]
    plain = [name for name in others if not isinstance(said[name], Tensor)]
    return plain, [name for name in others if name not in plain]
