"""The steps that optimizers took on a module, so that ranks can compare them. A step that one rank leaves out, or takes
with another learning rate (a schedule that looks at a metric of this rank's samples, or was resumed on rank 0 alone),
lets replicas drift apart and steps parts of one weight unlike, in silence."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar.runtime.params import Built

Options = dict[str, str]
"""The numbers among the options of an optimizer, to six digits: hosts may round their last ones otherwise."""


@dataclass
class StepsTaken:
    """The `count` of steps so far, a checksum of their options that does not depend on their order, and the options of
    those since the ranks were last told (`latest`)."""

    count: int = 0
    checksum: int = 0
    latest: list[Options] = field(default_factory=list)

    def add(self, options: Options) -> None:
        """Count one more step."""
        self.count += 1
        self.checksum = (self.checksum + zlib.crc32(repr(options).encode())) % (1 << 62)
        self.latest.append(options)

    def told(self) -> StepsTaken:
        """What the ranks are told now."""
        now, self.latest = StepsTaken(self.count, self.checksum, self.latest), []
        return now

    def unlike(self, other: StepsTaken) -> tuple[str, str]:
        """In what the two differ, of each."""
        if self.count != other.count:
            return f"{self.count} in all", f"{other.count} in all"
        for mine, theirs in zip(self.latest, other.latest, strict=False):
            for key in sorted(mine.keys() | theirs.keys()):
                if mine.get(key) != theirs.get(key):
                    return f"one with {key} {mine.get(key, 'not given')}", f"one with {theirs.get(key, 'not given')}"
        return "others", "others"


_modules: WeakSet[Any] = WeakSet()


def watch(module: Built) -> StepsTaken:
    """The steps that optimizers will take on parameters of `module`."""
    _modules.add(module)
    return StepsTaken()


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for module in _modules:
        if any(id(held.tensor) in stepped for held in module._held.values()):
            module._steps_taken.add(dict(_numbers(optimizer)))


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
    return ", ".join(f"{float(number):.6g}" for number in numbers)


register_optimizer_step_post_hook(_after)
