"""Runs of alike blocks in a model, found without running it: what capture may shorten. Called by capture.capture.

Two children of a container are alike when they have the same classes, parameter shapes, hooks and plain attributes all
the way down. Integer attributes that equal the child's own position in the container (a layer index) do not count:
chain.py proves that nobody reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

LONGEST_PERIOD = 12  # the most children in one group that repeats
KEPT = 3  # groups that stand for a run: its first two and, to see that nothing depends on depth, its last
Key = tuple[str, str]  # (module path below the child, attribute)
INNER = frozenset(vars(nn.Module()))  # attributes that every module has
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True, slots=True)
class AlikeRun:
    """Children `start ... start + period * count` of container `path` are `count` alike groups of `period` children.

    `indexes` are the attributes that hold a child's own position.
    """

    path: str
    start: int
    period: int
    count: int
    indexes: tuple[Key, ...] = ()

    @property
    def kept(self) -> dict[int, int]:
        """The children that represent the run: number in the shortened container -> number in the model. The first two
        groups are kept, and the last one follows them."""
        return {
            self.start + shown * self.period + i: self.start + group * self.period + i
            for shown, group in enumerate((0, 1, self.count - 1))
            for i in range(self.period)
        }

    @property
    def stop(self) -> int:
        """The number of the first child behind the run."""
        return self.start + self.period * self.count

    def shown_as(self, number: int) -> int:
        """The child of the first two groups that stands for child `number` in outer code; only the first group may have
        other inputs than the rest."""
        group, kind = divmod(number - self.start, self.period)
        return self.start + min(group, 1) * self.period + kind


def meant(runs: Sequence[AlikeRun], name: str) -> list[str]:
    """The names in the whole model that `name`, a name in the shortened model, stands for."""
    for run in runs:
        number, _, rest = name.removeprefix(f"{run.path}.").partition(".")
        if name.startswith(f"{run.path}.") and number.isdecimal() and int(number) in run.kept:
            group, kind = divmod(int(number) - run.start, run.period)
            first = run.start + kind
            return [
                f"{run.path}.{n}.{rest}"
                for n in ([first] if group == 0 else range(first + run.period, run.stop, run.period))
            ]
    return [name]


def kept(runs: Sequence[AlikeRun], path: str, children: int) -> dict[int, int]:
    """The children that are kept of container `path`: number in the shortened model -> number in the model. Children in
    no run keep their number."""
    here = [run for run in runs if run.path == path]
    alone = {n: n for n in range(children) if not any(run.start <= n < run.stop for run in here)}
    return dict(sorted((alone | {k: v for run in here for k, v in run.kept.items()}).items()))


def find(model: nn.Module) -> list[AlikeRun]:
    """All runs of more than KEPT groups, in containers that are not inside of another such run."""
    found: list[AlikeRun] = []
    shared = _shared(model)
    for path, module in model.named_modules():
        children = list(module._modules.values())
        numbered = list(module._modules) == [str(i) for i in range(len(children))] and None not in children
        if (
            isinstance(module, (nn.ModuleList, nn.Sequential))
            and numbered
            and not any(path.startswith(f"{run.path}.") for run in found)
        ):
            found += _runs(path, [child for child in children if child is not None], shared)
    return found


def _shared(model: nn.Module) -> dict[int, None]:
    """Ids of parameters and buffers that have several names."""
    tensors = [
        t
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for t in table.values()
        if t is not None
    ]
    return {key: None for key, times in Counter(map(id, tensors)).items() if times > 1}


def _runs(path: str, children: Sequence[nn.Module], shared: Mapping[int, None]) -> list[AlikeRun]:
    """The runs among the children of container `path`, from left to right, each as long as any period makes it."""
    tables = [_attributes(child, shared) for child in children]
    indexes = tuple(
        key
        for key in (tables[0] if tables else {})
        if all(type(t.get(key)) is int and t[key] == i for i, t in enumerate(tables))
    )
    keys = [tuple((key, repr(value)) for key, value in sorted(table.items()) if key not in indexes) for table in tables]
    found: list[AlikeRun] = []
    at = 0
    while at < len(keys):
        tried = [(p, _groups(keys, at, p)) for p in range(1, LONGEST_PERIOD + 1)]
        period, count = max(tried, key=lambda one: (one[0] * one[1] if one[1] > KEPT else 0, -one[0]))
        if count > KEPT:
            found.append(AlikeRun(path, at, period, count, indexes))
        at += period * count if count > KEPT else 1
    return found


def _groups(keys: Sequence[Any], start: int, period: int) -> int:
    """How many groups of `period` children from `start` on are alike."""
    count = 1
    while (
        len(keys) >= start + (count + 1) * period
        and keys[start + count * period : start + (count + 1) * period] == keys[start : start + period]
    ):
        count += 1
    return count


def _attributes(root: nn.Module, shared: Mapping[int, None]) -> dict[Key, Any]:
    """All plain attributes below a module, by (path, name)."""
    table: dict[Key, Any] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        table[path, ":class"] = (type(module).__module__, type(module).__qualname__, module.training)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            table[path, f"{name}:tensor"] = _tensor(tensor, shared)
        for kind in _HOOKS:
            table[path, kind] = _comparable(list(getattr(module, kind).values()))
        for name, value in vars(module).items():
            if name not in INNER:
                own = isinstance(value, MethodType) and value.__self__ is module
                table[path, name] = ("its own", id(value.__func__)) if own else _comparable(value)
    return table


def _tensor(tensor: torch.Tensor | None, shared: Mapping[int, None]) -> Any:
    """A parameter or buffer as a comparable value; one with several names is equal only to itself."""
    if tensor is None:
        return None
    name = id(tensor) if id(tensor) in shared else None
    return (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, name, _selected_counts(tensor))


def _selected_counts(tensor: torch.Tensor) -> int | None:
    """A hash of the numbers of elements that the rows of a mask select, on which sizes depend (`known_masks`); None for
    other tensors."""
    if tensor.dtype is not torch.bool or tensor.is_meta or not tensor.dim():
        return None
    return hash(tuple(tensor.sum(-1).flatten().tolist()))


def _comparable(value: Any) -> Any:
    """A plain value itself, a partial function by its parts; anything else by identity, so that two blocks are alike
    only if they share the object."""
    if type(value) is partial:
        return ("partial", _comparable(value.func), _comparable(value.args), _comparable(value.keywords))
    if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        return [(_comparable(k), _comparable(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [_comparable(v) for v in value])
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, _each(value)))
    plain = isinstance(value, (int, float, complex, str, bytes, torch.dtype, torch.device, type(None)))
    return value if plain else f"{type(value).__name__} {id(value)}"


def _each(values: Iterable[Any]) -> list[Any]:
    return [_comparable(v) for v in values]
