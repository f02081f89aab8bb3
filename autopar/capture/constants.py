"""Tensors that no state dict holds: literals, and buffers that a model computes when it is made. Called by
capture.capture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn

import torch
from torch import fx, nn

from autopar.capture.recompute import recompute
from autopar.capture.state import own_state
from autopar.errors import CaptureError
from passes import edit, facts


def constants(model: nn.Module, gm: fx.GraphModule) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Values on the CPU of all tensors that the graph and its blocks read and no state dict holds; and the names of
    those without a value, with a note on why and what to do. Tensors on meta are recomputed. Raises CaptureError where
    `model` has values, and the graph reads a tensor without any that the model does not hold."""
    persistent = own_state(model)
    held = {**gm.meta["constants"], **dict(model.named_buffers(remove_duplicate=False))}
    found: dict[str, torch.Tensor] = {}
    empty: list[str] = []
    for name in _read(gm):
        if name in persistent:
            continue
        value = held.get(name, _attribute(model, name))
        # the graph's own may be the shadow's
        value = _attribute(model, name) if value is None or value.is_meta else value
        if value is None or value.is_meta:
            empty.append(name)
        else:
            found[name] = value.detach().cpu().clone()
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        for name in empty:
            if _attribute(model, name) is None:
                _refuse(model, gm, name)
    again, why = recompute(model, [name for name in empty if _attribute(model, name) is not None])
    notes = {
        name: _note(model, name, why.get(name, "it is no attribute of the model"))
        for name in empty
        if name not in again
    }
    values = found | again
    return {name: values[name] for name in _read(gm) if name in values}, notes


def fleeting(model: nn.Module) -> tuple[str, ...]:
    """Names of the buffers that no state dict holds."""
    persistent = own_state(model)
    return tuple(name for name, _ in model.named_buffers() if name not in persistent)


def _read(gm: fx.GraphModule) -> Iterator[str]:
    """Names of the buffers and constants of the graph, those of all instances of its blocks included."""
    for node in edit.nodes(gm):
        if node.op == "placeholder" and node.meta.get("role") in ("buffer", "constant"):
            yield from node.meta.get("fqns") or [str(node.meta["fqn"])]


def _attribute(model: nn.Module, name: str) -> torch.Tensor | None:
    """The tensor of that name in the model, a buffer or a plain attribute of a module; None if there is none."""
    path, _, key = name.rpartition(".")
    modules: Mapping[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    value = getattr(modules.get(path), key, None)
    return value if isinstance(value, torch.Tensor) else None


def _refuse(model: nn.Module, gm: fx.GraphModule, name: str) -> NoReturn:
    readers = [
        facts.where(user)
        for node in edit.nodes(gm)
        if node.op == "placeholder" and name in (node.meta.get("fqns") or [node.meta.get("fqn")])
        for user in node.users
    ]
    raise CaptureError(
        f"{type(model).__name__} cannot be captured: {' and '.join(readers[:1]) or 'forward'} reads a tensor that no "
        f"operator makes and the model does not hold ({name}): make tensors of tensors with torch.stack (then detach() "
        "for their values alone) in place of torch.tensor([...]), and hold others as buffers"
    )


def _note(model: nn.Module, name: str, why: str) -> str:
    """The note on a tensor without a value."""
    path = name.rpartition(".")[0]
    owner = dict(model.named_modules(remove_duplicate=False)).get(path)
    kind = "the model" if owner is None else f"{type(owner).__name__}{f' at {path}' if path else ''}"
    return (
        f"{name} of {kind} has no values, because the model is on meta ({why}): what is planned can be looked at but "
        "not run. Build the model with real weights, or give that module a reset_parameters that fills it"
    )
