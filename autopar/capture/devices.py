"""Tracing on one device: the shadow is on meta, and so are the tensors that its code makes. Used by export and by runs
without values.

Model code makes tensors without naming a device (`torch.arange(n)`), or on a device of its own. Here factory functions
make meta tensors, literals (`torch.tensor([0.5])`) and lists used as indices keep their values, and a tensor of another
device is moved to meta where it is combined with one on meta. Captured graphs name no device in the end
(passes.drop_devices). `x.data`, which torch.export takes for an unrelated tensor, is read as `x.detach()`; assignments
to it, which torch.export ignores, become in-place copies. A `copy.deepcopy` in forward, through which torch.export lets
gradients flow, has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar._torch import pytree
from autopar.capture.autocast import Region, without_autocast
from autopar.capture.flexible import plain_flex_attention
from autopar.capture.leaves import tensors_of
from autopar.capture.lines import caller
from autopar.capture.observers import plain_observers
from autopar.errors import CaptureError

LITERALS = (torch.tensor, torch.as_tensor)
DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # a property in C, which stubs have as a plain attribute
ASSIGNED = torch.Tensor.data.__set__  # type: ignore[attr-defined]
INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class _Meeting(TorchFunctionMode):
    """Moves operands to meta where another operand is on meta; never the operand that an operator changes in place."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in LITERALS and not tensors_of((args, kwargs)):
            return func(*args, **{**kwargs, "device": "cpu"})
        if func is torch.Tensor.new_tensor and not tensors_of((args[1:], kwargs)):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs, "device": "cpu"})
        if func == DATA:
            return args[0].detach()
        if func == ASSIGNED:
            return _assign(*args)
        if func is torch.Tensor.__deepcopy__:
            return _copy(*args)
        if func in INDEXED:
            args = (args[0], _index(args[1]), *args[2:])
        tensors = tensors_of((args, kwargs))
        if (
            len(tensors) > 1
            and len({x.device.type for x in tensors}) > 1
            and not (changes(func) and tensors[0].device.type != "meta")
        ):
            args, kwargs = pytree.tree_map(_moved, (args, kwargs))
        return func(*args, **kwargs)


def _index(index: Any) -> Any:
    """An index with tensors for its lists of numbers: torch would make them itself, on the default device."""
    if isinstance(index, tuple):
        return tuple(_index(item) for item in index)
    return torch.tensor(index, device="cpu") if isinstance(index, list) and index and not tensors_of(index) else index


def _copy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """The copy of `copy.deepcopy`, from which no gradient flows back."""
    made = memo[id(tensor)] = tensor.detach().clone()
    return made


def _assign(target: torch.Tensor, value: torch.Tensor) -> None:
    """`target.data = value` as an in-place copy; for a value of the same sizes and dtype only, since a tensor of a
    graph has one."""
    got, wanted = ((str(x.dtype).removeprefix("torch."), list(x.shape)) for x in (value, target))
    if got != wanted:
        raise CaptureError(
            f"{caller()} assigns {got[0]}{got[1]} to the data of a tensor of {wanted[0]}{wanted[1]}, and a graph has "
            "tensors of one size and dtype: "
            "assign what is like it, or keep it in a tensor of another name"
        )
    target.detach().copy_(_moved(value).detach())


def changes(func: Any) -> bool:
    """Whether a function changes its first argument in place, by its name."""
    name = getattr(func, "__name__", "")
    return (
        func == ASSIGNED
        or name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name != "__invert__")
    )


def changed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call changes in place: those of its first argument, by the name of the function or by
    `inplace=True`, and those of `out=`."""
    first, out = args[:1] if changes(func) or kwargs.get("inplace") else (), kwargs.get("out")
    return tensors_of((first, out)) if first or out is not None else []


def _moved(x: Any) -> Any:
    return x.to("meta") if isinstance(x, torch.Tensor) and x.device.type != "meta" else x


@contextmanager
def on_meta() -> Iterator[list[Region]]:
    """A context in which all tensors are on meta (see the module docstring). SyncBatchNorm computes as BatchNorm, since
    captured programs take statistics over all ranks anyway and it requires GPUs. Code compiled by torch.compile runs
    uncompiled, and fused observers of quantisation are written with common operators. Gives the autocast regions, which
    have no effect."""
    with (
        torch.device("meta"),
        _Meeting(),
        without_autocast() as regions,
        mock.patch.object(nn.SyncBatchNorm, "forward", nn.BatchNorm2d.forward),
        plain_flex_attention(),
        plain_observers(),
    ):
        yield regions
