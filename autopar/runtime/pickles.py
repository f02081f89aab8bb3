"""Pickling what goes to ranks and comes back: tensors as their bytes. torch writes a file of its own format for each
tensor in a pickle, which takes five times as long."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def dumps(value: Any) -> bytes:
    """`value` as `pickle.loads` takes it. As in any pickle, tensors that share memory no longer do."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """A pickler for which a plain tensor is its bytes, dtype and sizes; any other one (parameters, views with gaps,
    tensors with attributes, on a GPU, without elements) is pickled as torch says."""

    def reducer_override(self, value: Any) -> Any:
        """How `value` is pickled; `NotImplemented` for the usual way."""
        plain = (
            type(value) is Tensor
            and value.device.type == "cpu"
            and value.layout is torch.strided
            and value.is_contiguous()
            and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
            and value.numel() > 0
            and not value.__dict__
        )
        if not plain:
            return NotImplemented
        content = pickle.PickleBuffer(value.reshape(-1).view(torch.uint8).numpy())
        return _of_bytes, (content, value.dtype, tuple(value.shape))


def _of_bytes(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor of these bytes, in memory of torch, which is aligned and can be resized."""
    return torch.frombuffer(content, dtype=dtype).reshape(shape).clone()
