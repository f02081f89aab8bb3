"""`load`: the MODEL argument of the command line to a model and one batch of inputs.

hf:FILE_OR_FOLDER        a Hugging Face config file; the class is named in `architectures`
path/to/file.py:factory  a callable in a file
package.module:factory   a callable in a module
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar._torch import pytree
from autopar.errors import CaptureError
from autopar.frontend.factory import call_factory, find_factory, sizes_of, sizes_without_parameter
from autopar.frontend.huggingface import build_model, stated_dtype
from autopar.frontend.inputs import inputs_for

HF = "hf:"


@dataclass(frozen=True)
class Loaded:
    """A model with one batch of `batch` samples of `seq` tokens: `model(*args, **kwargs)` gives the loss, alone or
    first, unless made with labels=False. `fixed`: which of batch and seq its factory cannot be told, because it makes
    the inputs itself and has no such parameter."""

    model: nn.Module
    args: tuple[object, ...]
    kwargs: dict[str, object]
    name: str
    spec: str
    batch: int
    seq: int
    fixed: tuple[str, ...] = ()

    def check_sizes(self, asked: Iterable[str]) -> None:
        """Raises CaptureError where a size (batch, seq) was asked for that the factory cannot be told: it would be left
        out without a word."""
        if unheard := [size for size in asked if size in self.fixed]:
            raise CaptureError(
                f"model {self.spec!r}: {' and '.join(f'--{size}' for size in unheard)} cannot be given, because the "
                f"factory makes inputs of its own and has no parameter {' and '.join(unheard)}; add "
                f"{'it' if len(unheard) == 1 else 'them'} (def factory(batch=8)), or leave the option out"
            )


def load(
    spec: str,
    *,
    batch: int | None,
    seq: int | None,
    device: str = "meta",
    dtype: torch.dtype | None = torch.float32,
    train: bool = True,
    labels: bool = True,
    seed: int = 0,
) -> Loaded:
    """Build the model that `spec` names, on `device` and in `dtype` (None: as it is made), with inputs of `batch`
    samples of `seq` tokens (None: the factory's default, or that of `factory.SIZES`).

    On "meta" nothing is allocated and the values mean nothing. Elsewhere weights and inputs follow from `seed`; the
    caller's random state stays as it was. Integer inputs keep their type. `labels` is for Hugging Face models: a
    factory gives the inputs that it wants. Raises CaptureError with what to change when the spec leads nowhere.
    """
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        if spec.startswith(HF):
            factory, sizes = None, sizes_of(None, batch=batch, seq=seq)
            model, made = build_model(spec.removeprefix(HF)), None
        else:
            factory = find_factory(spec)
            sizes = sizes_of(factory, batch=batch, seq=seq)
            model, made = call_factory(factory, spec, **sizes)
    model = (model if dtype is None else in_dtype(model, dtype)).train(train)
    args, kwargs = made or inputs_for(model, **sizes, device=device, seed=seed, labels=labels)
    if dtype is not None or len(dtypes_of(model)) == 1:
        args, kwargs = cast((args, kwargs), dtype or dtypes_of(model)[0])
    return Loaded(
        model,
        args,
        kwargs,
        short_name(spec),
        spec,
        **sizes,
        fixed=sizes_without_parameter(factory) if factory and made else (),
    )


def stated_precision(spec: str, *, train: bool) -> str | None:
    """The precision that a spec asks for by itself: bfloat16 where a Hugging Face config says so, in training with
    float32 masters, and float16 in inference (to train in it takes a scaler, which has to be asked for), else float32;
    None for a factory, whose model has the dtype that it is made in."""
    if not spec.startswith(HF):
        return None
    stated = stated_dtype(spec.removeprefix(HF))
    if stated == "bfloat16":
        return "bf16" if train else "bfloat16"
    return "float16" if stated == "float16" and not train else "float32"


def short_name(spec: str) -> str:
    """A name for tables: `gpt2` for hf:a/gpt2.json, hf:gpt2/ and hf:gpt2/config.json; `gpt.small` for
    a/gpt.py:small."""
    if spec.startswith(HF):
        path = Path(spec.removeprefix(HF))
        return path.resolve().parent.name if path.name == "config.json" else path.resolve().stem
    place, _, factory = spec.rpartition(":")
    return f"{Path(place).stem if place.endswith('.py') else place.rpartition('.')[2]}.{factory}"


def dtypes_of(model: nn.Module) -> list[torch.dtype]:
    """The floating dtypes of the parameters of `model`, that of most elements first; float32 where it has none."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return sorted(counts, key=lambda dtype: -counts[dtype]) or [torch.float32]


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model, its floating-point weights and buffers in `dtype`. Complex ones, of which `Module.to` would forget the
    imaginary part, stay as they are."""
    tensors = (*model.parameters(), *model.buffers())
    if not any(tensor.is_complex() for tensor in tensors):
        return model.to(dtype)
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return model


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The same tuples, lists and dicts, with their floating-point tensors in `dtype`."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, value)
