"""Refusal of tensors that share memory with others which change: a program for ranks has each by itself.

    self.register_buffer("row", self.weight.detach()[0])        # follows the weight as the optimizer changes it
    self.register_buffer("half", self.table[:8])                # where forward changes the table in place
    self.decoder.weight.data = self.encoder.weight.data         # two parameters, each of which an optimizer steps

One tensor under several names is one tensor for ranks too, and tensors that nothing changes may share what they like.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, fx, nn

from autopar.capture.block_runs import INNER
from autopar.errors import CaptureError
from passes.fold_repeats import targets


def refuse_shared(model: nn.Module, gm: fx.GraphModule, *, training: bool) -> None:
    """Raise CaptureError where a tensor that the graph `gm` of `model` reads shares memory with another one that a step
    changes: a weight that trains, or what forward changes. Tensors without values share none."""
    held = {id(tensor): (name, tensor) for name, tensor in reversed(list(_held(model)))}
    lifted: Mapping[str, Tensor] = gm.meta["constants"]
    held |= {id(tensor): (name, tensor) for name, tensor in lifted.items() if id(tensor) not in held}
    changing = {
        name for name, tensor in held.values() if training and isinstance(tensor, nn.Parameter) and tensor.requires_grad
    }
    changing |= set(_changed(gm))
    places = sorted(
        ((*place, name) for name, tensor in held.values() if (place := _place(tensor)) is not None),
        key=lambda each: (each[0], -each[1]),
    )
    for (_, end, one), (start, _, other) in _neighbours(places):
        if start < end and (one in changing or other in changing):
            fixed, moving = (one, other) if other in changing else (other, one)
            here = f"{fixed} (a tensor that forward reads from elsewhere)" if fixed in lifted else fixed
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: {here} shares memory with {moving}, which "
                f"{'trains' if moving not in _changed(gm) else 'forward changes'}, and the sharded module has the two "
                f"apart: compute it in forward from {moving}, make it a copy (clone()), or use one tensor for both"
            )


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and plain tensor attributes by name."""
    for path, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in INNER}
        for name, value in {**module._parameters, **module._buffers, **own}.items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}".removeprefix("."), value


def _changed(gm: fx.GraphModule) -> list[str]:
    """Names of what forward changes, in blocks too."""
    found = [entry["target"] for entry in gm.meta["outputs"] if entry["kind"] == "mutation"]
    for body in gm.children():
        if isinstance(body, fx.GraphModule):
            found += itertools.chain(*targets(body))
    return found


def _place(tensor: Tensor) -> tuple[int, int] | None:
    """The first byte of a tensor in memory, and the one behind its last; None where it has no memory."""
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return None
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()


def _neighbours(
    places: list[tuple[int, int, str]],
) -> Iterator[tuple[tuple[int, int, str], tuple[int, int, str]]]:
    """Each place with the one before it that reaches furthest."""
    furthest: tuple[int, int, str] | None = None
    for place in places:
        if furthest is not None:
            yield furthest, place
        if furthest is None or place[1] > furthest[1]:
            furthest = place
