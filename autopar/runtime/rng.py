"""What a step does at random, or in training only. Random numbers of sharded programs are the same on replicas, different on shards, other ones at every step and call.

A draw is seeded by (seed, step, name of the operator, number of its call in this step, which shard), so it needs no
communication, does not depend on other random operators, and is the same again for the same seed.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from autopar.layout import Layout, is_shard
from autopar.runtime.stack import pushed

T = TypeVar("T")


@dataclass
class Rng:
    """State of one module: `seed`, the number of steps so far, the calls of each operator in this step, and whether it is a step of training."""

    seed: int = 0
    step: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    training: bool = True

    def copy(self) -> Rng:
        """The state as it is now: who draws from it again gets the same numbers."""
        return Rng(self.seed, self.step, dict(self.calls), self.training)

    def advance(self, *, training: bool = True) -> None:
        """Begin the next step."""
        self.step += 1
        self.calls = {}
        self.training = training

    def generator(self, key: str, layout: Layout, coord: tuple[int, ...], device: torch.device) -> torch.Generator:
        """The generator of one draw of operator `key` for the shard that the rank at `coord` holds under `layout`."""
        call = self.calls.get(key, 0)
        self.calls[key] = call + 1
        shard = [(axis, coord[axis]) for axis, entry in enumerate(layout) if is_shard(entry)]
        digest = hashlib.blake2b(repr((self.seed, self.step, key, call, shard)).encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


_current = [Rng()]


def current() -> Rng:
    """The state that random operators draw from."""
    return _current[-1]


def in_training(value: T, otherwise: T) -> T:
    """`value` in a step of training, `otherwise` where the module evaluates (`model.eval()`)."""
    return value if current().training else otherwise


def using(rng: Rng) -> AbstractContextManager[None]:
    """Draw from `rng` inside."""
    return pushed(_current, rng)


def manual_seed(seed: int) -> None:
    """Seed the random operators that run outside any module; a module has its own: `model.rng.seed`."""
    _current[0] = Rng(seed)
