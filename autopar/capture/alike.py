"""Runs of alike blocks in a model, found without running it: what capture may shorten.

Two children of a container are alike when they have the same classes, parameter shapes and plain attributes all the way
down. Integer attributes that equal the child's own position in the container (a layer index) do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LONGEST_PERIOD = 4
_INNER = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class AlikeRun:
    """Children `start ... start + period * count` of container `path` are `count` alike groups of `period` children."""

    path: str
    start: int
    period: int
    count: int

    @property
    def kept(self) -> tuple[int, ...]:
        """The children that stand for the run: its first two groups and, to see that nothing depends on depth, its last."""
        groups = sorted({0, 1, self.count - 1})
        return tuple(self.start + g * self.period + i for g in groups for i in range(self.period))

    @property
    def groups_kept(self) -> int:
        return len(self.kept) // self.period


def find(model: nn.Module) -> list[AlikeRun]:
    """All runs worth shortening: three groups or more, in containers that are in no other such container's children."""
    found: list[AlikeRun] = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(path.startswith(f"{run.path}.") for run in found):
            found += _runs(path, list(module.children()))
    return found


def _runs(path: str, children: Sequence[nn.Module]) -> list[AlikeRun]:
    keys = _keys(children)
    found: list[AlikeRun] = []
    at = 0
    while at < len(keys):
        best = max((AlikeRun(path, at, p, _groups(keys, at, p)) for p in range(1, LONGEST_PERIOD + 1)),
                   key=lambda run: (run.period * run.count if run.count > 2 else 0, -run.period))
        if best.count > 2:
            found.append(best)
        at += best.period * best.count if best.count > 2 else 1
    return found


def _groups(keys: Sequence[Any], start: int, period: int) -> int:
    count = 1
    while keys[start + count * period:start + (count + 1) * period] == keys[start:start + period]:
        count += 1
    return count


def _keys(children: Sequence[nn.Module]) -> list[Any]:
    tables = [_attributes(child) for child in children]
    index_like = {name for name in (tables[0] if tables else {})
                  if all(type(t.get(name)) is int and t[name] == i for i, t in enumerate(tables))}
    return [tuple((name, repr(value)) for name, value in sorted(table.items()) if name not in index_like) for table in tables]


def _attributes(root: nn.Module) -> dict[str, Any]:
    """Everything plain below a module, by path."""
    table: dict[str, Any] = {}
    for path, module in root.named_modules():
        table[f"{path}:class"] = type(module).__qualname__
        for kind in _INNER[:2]:
            for name, tensor in getattr(module, kind).items():
                table[f"{path}.{name}:tensor"] = None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, value in vars(module).items():
            if name not in _INNER and not isinstance(value, (dict, torch.Tensor)):
                table[f"{path}.{name}"] = _comparable(value)
    return table


def _comparable(value: Any) -> Any:
    """A plain value as it is; anything else by identity, so that only a shared object counts as alike."""
    if isinstance(value, (set, frozenset, list)):
        return sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else [_comparable(v) for v in value]
    return value if isinstance(value, (int, float, str, bool, tuple, torch.dtype, type(None))) else id(value)
