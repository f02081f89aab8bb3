"""Counting the steps that really run, to compare them with the steps that were priced.

with count() as seen:
    model.train_step(*batch)
[str(c) for c in seen]      # ["all_gather axis 1 4096 B down.weight", ...]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_active: list[list[Counted]] = []


@dataclass(frozen=True, slots=True)
class Counted:
    """One executed step on one mesh axis. `bytes` is the size of the tensor that one group of the axis holds together,
    without the cut on this axis: the output of a gather, the input of a reduction, the whole tensor of an all-to-all.
    Of a send it is what this rank sends; of a halo exchange what the rank sends that sends most."""

    kind: str
    axis: int
    bytes: int
    name: str

    def __str__(self) -> str:
        return f"{self.kind} axis {self.axis} {self.bytes} B {self.name}".rstrip()


@contextmanager
def count() -> Iterator[list[Counted]]:
    """Collect every step run inside, forward and backward, in order. Counters nest."""
    seen: list[Counted] = []
    _active.append(seen)
    try:
        yield seen
    finally:
        # by identity: equal lists are not the same counter
        _active[:] = [other for other in _active if other is not seen]


@contextmanager
def uncounted() -> Iterator[None]:
    """Steps run inside are not recorded by counters that were opened outside."""
    hidden, _active[:] = list(_active), []
    try:
        yield
    finally:
        _active[:] = hidden


def counting() -> bool:
    """Whether any counter is active."""
    return bool(_active)


def record(kind: str, axis: int, nbytes: int, name: str = "") -> None:
    """Add a step to every active counter."""
    for seen in _active:
        seen.append(Counted(kind, axis, nbytes, name))
