"""`len(tensor)` while a model is traced: its first size, as symbolic as it is.

What Python's own `len` gives is an int, so that a batch whose length a model asks for would be fixed. The name is set in the files that the
model's classes and its loss function are written in, for the time of the trace, as torch.fx's own tracer does; a file with a `len` of its own keeps it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def symbolic_lengths(model: nn.Module, *functions: Callable[..., Any]) -> Iterator[None]:
    """Lengths of tensors stay symbolic in the code of `model`, and in the files of `functions`."""
    files = [names for names in _files(model, functions) if "len" not in names]
    try:
        for names in files:
            names["len"] = _length
        yield
    finally:
        for names in files:
            names.pop("len", None)


def _files(model: nn.Module, functions: tuple[Callable[..., Any], ...]) -> list[dict[str, Any]]:
    """The global names of each file once, torch's own files aside."""
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    names = dict.fromkeys(str(one.__module__) for one in (*kinds, *functions) if isinstance(getattr(one, "__module__", None), str))
    return [vars(sys.modules[name]) for name in names if name in sys.modules and name.partition(".")[0] not in ("torch", "builtins")]


def _length(item: Any) -> Any:
    return item.shape[0] if isinstance(item, torch.Tensor) and item.ndim else len(item)
