"""Which dims of the inputs are symbolic: the batch `b`, the sequence `s`.

Dim 0 of every input that shares the leading size is the batch; dim 1 of integer inputs that share it is the sequence.
Export runs on stand-in sizes where the user's own would be specialised (1, or batch equal to sequence).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

STAND_IN = {"b": 6, "s": 10}  # small sizes that are neither 1 nor each other


@dataclass
class Dims:
    """Symbolic dims per flat input: `{flat index: {tensor dim: symbol name}}`, and the sizes that the user gave."""

    of: dict[int, dict[int, str]] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)

    def without(self, name: str) -> Dims:
        """The same with symbol `name` static."""
        of = {i: {d: n for d, n in dims.items() if n != name} for i, dims in self.of.items()}
        return Dims(of, {n: v for n, v in self.hints.items() if n != name}, self.limits)

    def shapes(self, flat: list[Any]) -> list[Any]:
        """`dynamic_shapes` of torch.export, flat."""
        dims = {name: Dim(name, min=2, max=self.limits[name]) if name in self.limits else Dim(name, min=2) for name in self.hints}
        return [{d: dims[n] for d, n in self.of.get(i, {}).items()} or None if isinstance(x, torch.Tensor) else None
                for i, x in enumerate(flat)]

    def stand_ins(self, flat: list[Any]) -> list[Any]:
        """The inputs at the stand-in sizes, on their device."""
        return [self._resized(x, self.of.get(i, {})) if isinstance(x, torch.Tensor) else x for i, x in enumerate(flat)]

    def _resized(self, x: torch.Tensor, dims: Mapping[int, str]) -> torch.Tensor:
        shape = [STAND_IN[dims[d]] if d in dims else n for d, n in enumerate(x.shape)]
        return torch.zeros(shape, dtype=x.dtype, device=x.device)


def find(flat: list[Any], max_positions: int | None) -> Dims:
    """Guess batch and sequence from the shapes of the flat inputs."""
    tensors = {i: x for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and x.ndim > 0}
    found = Dims()
    if not tensors:
        return found
    leading = {x.shape[0] for x in tensors.values()}
    if len(leading) == 1:
        found.hints["b"] = leading.pop()
        found.of = {i: {0: "b"} for i in tensors}
    second = {x.shape[1] for x in tensors.values() if x.ndim > 1 and not x.is_floating_point()}
    if len(second) == 1 and (size := second.pop()) > 1:
        found.hints["s"] = size
        for i, x in tensors.items():
            if x.ndim > 1 and not x.is_floating_point():
                found.of.setdefault(i, {})[1] = "s"
        if max_positions is not None:
            found.limits["s"] = max_positions
    return found


def explicit(flat: list[Any], given: Any, tree: Any) -> Dims:
    """The user's own dynamic_shapes: a pytree like the inputs, with `{dim: Dim}` or `{dim: "name"}` at tensors."""
    leaves = pytree.tree_leaves(given, is_leaf=lambda item: (isinstance(item, dict) and all(isinstance(k, int) for k in item))
                                or item is None)
    found = Dims()
    for index, (x, dims) in enumerate(zip(flat, leaves, strict=True)):
        for dim, named in (dims or {}).items():
            name = named if isinstance(named, str) else named.__name__
            found.of.setdefault(index, {})[dim] = name
            found.hints[name] = x.shape[dim]
    return found
