"""Changes to the forward of a model before torch.export traces it. Called by export."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar._torch import pytree
from autopar.capture.assigned import assigned, buffers_of, put_back, write_back
from autopar.capture.dims import Dims
from autopar.capture.leaves import tensors_of
from autopar.capture.shadow import BUFFERS, WithLoss
from autopar.errors import CaptureError
from passes._torch import shape_check


def name_keywords(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Give `forward` a named parameter for each input that its `**kwargs` would take: torch.export counts such inputs
    twice."""
    forward, signature = model.forward, inspect.signature(model.forward)
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs if name not in signature.parameters
    ]
    if extra:

        def named(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        kept = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        becomes(model, named, signature.replace(parameters=[*kept, *extra]))


def becomes(model: nn.Module, forward: Callable[..., Any], signature: inspect.Signature) -> None:
    """Replace the forward of `model`, with `signature` as the one that others see."""
    forward.__signature__ = signature  # type: ignore[attr-defined]  # what inspect.signature reads
    model.forward = forward


def one_size(model: nn.Module, dims: Dims) -> None:
    """Let `forward` begin with checks that all dims of one symbol have equal sizes. Where the model compares them
    nowhere, a concatenation of two inputs would have a size of two different symbols."""
    forward = model.forward

    def same(*args: Any, **kwargs: Any) -> Any:
        flat = pytree.tree_leaves((args, kwargs))
        for name in dims.hints:
            first, *others = [
                flat[index].shape[dim]
                for index, each in dims.of.items()
                for dim, named in each.items()
                if named == name
            ]
            for size in others:
                shape_check(size == first)
        return forward(*args, **kwargs)

    becomes(model, same, inspect.signature(forward))


def assigned_buffers(model: nn.Module) -> None:
    """At the end of `forward`, copy assigned buffers into the old ones (capture.assigned)."""
    forward, functions = (
        model.forward,
        [function for function in functions_of(model) if isinstance(function, nn.Module)],
    )

    def written(*args: Any, **kwargs: Any) -> Any:
        before, of_functions = buffers_of(model), [buffers_of(function) for function in functions]
        result = forward(*args, **kwargs)
        for function, buffers in zip(functions, of_functions, strict=True):
            if names := list(assigned(function, buffers)):
                put_back(function, buffers)
                raise CaptureError(
                    f"loss_fn {type(function).__name__} changes its buffer {names[0]}, and buffers are the model's: "
                    "make it a part of the model, which then gives the loss"
                )
        write_back(model, before)
        return result

    becomes(model, written, inspect.signature(forward))


def known_buffers(model: nn.Module) -> None:
    """Let `forward` begin by saying what the tensors are that torch.export has put in the place of buffers with known
    values (`shadow.BUFFERS`)."""
    forward, held = model.forward, {}
    for name, tensor in buffers_of(model).items():
        if tensor is not None and (value := BUFFERS.get(tensor)) is not None:
            held[name] = value

    def known(*args: Any, **kwargs: Any) -> Any:
        for name, tensor in buffers_of(model).items():
            if tensor is not None and name in held:
                BUFFERS[tensor] = held[name]
        return forward(*args, **kwargs)

    if held:
        becomes(model, known, inspect.signature(forward))


def current_weights(model: nn.Module) -> None:
    """Let `forward` work with what torch.export has put in the place of parameters and buffers also where it finds them
    elsewhere than in their modules (`self.heads = [self.a.weight, self.b.weight]`, a closure): there they would be
    constants."""
    forward, before = model.forward, _weights(model)

    def current(*args: Any, **kwargs: Any) -> Any:
        with InPlaceOf(zip(before, _weights(model), strict=True)):
            return forward(*args, **kwargs)

    becomes(model, current, inspect.signature(forward))


def _weights(model: nn.Module) -> list[torch.Tensor]:
    """All parameters and buffers, in the order of the modules that have them."""
    return [
        tensor
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]


class InPlaceOf(TorchFunctionMode):
    """A mode in which functions get one tensor for another: `pairs` are of what is given and of what they get."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._pairs = {id(old): (old, new) for old, new in pairs if old is not new}  # the old ones live: ids are theirs

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        if any(id(leaf) in self._pairs for leaf in tensors_of(given)):
            given = pytree.tree_map(lambda leaf: self._pairs.get(id(leaf), (leaf, leaf))[1], given)
        return func(*given[0], **given[1])


@contextmanager
def no_new_buffers(model: nn.Module) -> Iterator[None]:
    """A context in which buffers that `forward` registers become plain attributes: torch.export mistakes a new buffer
    for a mutation of the first input."""
    register = nn.Module.register_buffer

    def keep(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        if name in module._buffers:
            register(module, name, tensor, persistent)
        else:
            vars(module)[name] = tensor

    for module in model.modules():
        for name in [name for name, tensor in module._buffers.items() if tensor is None]:
            vars(module)[name] = module._buffers.pop(name)
    with mock.patch.object(nn.Module, "register_buffer", keep):
        yield


def functions_of(model: nn.Module) -> list[Callable[..., Any]]:
    """The loss function that was added to `model`, if any."""
    return [vars(model)["loss_fn"]] if isinstance(model, WithLoss) else []
