"""What changed the parameters of a module, steps of optimizers and loads, so that ranks can compare it. A step that one
rank leaves out, or takes with another learning rate (a schedule that looks at a metric of this rank's samples, or was
resumed on rank 0 alone), and weights that rank 0 loads alone let replicas drift apart, and parts of one weight be those
of different models, in silence."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar.runtime.rank0_weights import fingerprint

STEP = "step() of an optimizer"
Details = dict[str, str]


@dataclass
class Changes:
    """How many changes of each kind there were so far, a checksum of their details that does not depend on their order,
    and those since the ranks were last told (`latest`)."""

    counts: Counter[str] = field(default_factory=Counter)
    checksum: int = 0
    latest: list[tuple[str, Details]] = field(default_factory=list)

    def add(self, kind: str, details: Details) -> None:
        """Count one more."""
        self.counts[kind] += 1
        self.checksum = (self.checksum + zlib.crc32(repr((kind, details)).encode())) % (1 << 62)
        self.latest.append((kind, details))

    def loaded(self, kind: str, state: Mapping[str, Any]) -> None:
        """Count one load; of whole tensors with what is in them, which all ranks read from one state dict."""
        prints = [
            (name, float(fingerprint(state[name]))) for name in sorted(state, key=str) if _has_numbers(state[name])
        ]
        self.add(kind, {"values": f"of checksum {zlib.crc32(repr(prints).encode())}"})

    def told(self) -> Changes:
        """What the ranks are told now."""
        now, self.latest = Changes(self.counts.copy(), self.checksum, self.latest), []
        return now

    def unlike(self, other: Changes) -> tuple[str, str]:
        """In what the two differ, of each."""
        for kind in sorted(self.counts.keys() | other.counts.keys()):
            if self.counts[kind] != other.counts[kind]:
                return f"{self.counts[kind]} times {kind}", f"{other.counts[kind]} times"
        for (kind, mine), (_, theirs) in zip(self.latest, other.latest, strict=False):
            for key in sorted(mine.keys() | theirs.keys()):
                if mine.get(key) != theirs.get(key):
                    return f"{kind} with {key} {mine.get(key, 'not given')}", f"{theirs.get(key, 'not given')}"
        return "other changes", "others"


def _has_numbers(value: Any) -> bool:
    """Whether it is a tensor of plain numbers; others, such as sparse ones, are not looked into."""
    return type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta


class Met(Protocol):
    """A built model, and the mesh on which its parameters are."""

    @property
    def _met(self) -> DeviceMesh | None: ...


_modules: WeakSet[Any] = WeakSet()


def watch(module: Met) -> Changes:
    """The changes to come of `module`, among them the steps that optimizers take on its parameters."""
    _modules.add(module)
    return Changes()


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # those of another module on the same ranks count too: they are as alike, and there may be an optimizer for each of
    # some hundred parameters, too many to look for all of them in each module
    meshes = {p.device_mesh for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)}
    if stepped := [module for module in _modules if module._met in meshes]:
        options = dict(_numbers(optimizer))
        for module in stepped:
            module._changes.add(STEP, options)


def _numbers(optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    """The numbers among the options of an optimizer; those on a device would have to be waited for."""
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            numbers = value if isinstance(value, (tuple, list)) else (value,)
            if key != "params" and all(map(_is_number, numbers)):
                yield f"{key}{f' of group {index}' if index else ''}", _text(numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (type(value) is Tensor and value.numel() == 1 and value.is_cpu)


def _text(numbers: Iterable[Any]) -> str:
    """Numbers to six digits: hosts may round the last ones otherwise."""
    return ", ".join(f"{float(number):.6g}" for number in numbers)


register_optimizer_step_post_hook(_after)
