"""Bytes that the kernels which torch runs read and write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar._torch import TorchDispatchMode, pytree

aten = torch.ops.aten

PUT_BACK = (aten.slice_backward.default, aten.select_backward.default, aten.diagonal_backward.default)


class Moved(TorchDispatchMode):
    """Adds up the bytes that kernels read and write; numbers that are read again and again count once."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        read, written = (_tensors(each) for each in (args, made))
        if func in PUT_BACK:  # zeros, and a copy
            self.nbytes += sum(map(_bytes, (*read, *read, *written)))
        elif func is not aten._unsafe_view.default and not any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        ):
            self.nbytes += sum(map(_bytes, (*read, *written)))
        return made


def _tensors(nested: Any) -> list[Tensor]:
    return list({id(leaf): leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, Tensor)}.values())


def _bytes(tensor: Tensor) -> int:
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return torch.Size(sizes).numel() * tensor.element_size()
