"""Random numbers of sharded programs, and whether a step trains. Draws are equal on replicas, and differ between
shards, steps and calls.

A draw is seeded by (seed, step, evaluation, name of the operator, number of the block in the model, microbatch, number
of its call there, shard). So it needs no communication, does not depend on other draws nor on what else runs on a rank,
and is reproducible. It does not depend on how the model is cut into stages; stages that each compute a value draw the
same, and so do microbatches where the value is the same for all (`once`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from autopar.errors import RunError
from autopar.layout import Layout, is_shard, parse
from autopar.runtime.stack import pushed

if TYPE_CHECKING:
    from autopar.runtime.mesh import Mesh

T = TypeVar("T")


@dataclass
class Rng:
    """The random state of one module: `seed`; `step`, the number of steps so far; `evaluation`, that of evaluations
    since the last of them; `calls`, (operator, block) -> its calls in this step (of one microbatch in one stage, in a
    pipeline); `training`, whether this step trains. `microbatch` and `block` say where it draws now."""

    seed: int = 0
    step: int = 0
    evaluation: int = 0
    calls: dict[tuple[str, int], int] = field(default_factory=dict)
    training: bool = True
    microbatch: int = 0
    block: int = 0

    def copy(self) -> Rng:
        """A copy of the state, from which the same numbers are drawn again."""
        return replace(self, calls=dict(self.calls))

    def of(self, microbatch: int) -> Rng:
        """The state for one microbatch in one stage. It counts calls from 0, so that draws do not depend on other
        stages of the rank."""
        return replace(self, microbatch=microbatch, calls={})

    def advance(self, *, training: bool = True, counts: bool = True) -> None:
        """Begin the next step, or an evaluation, which draws other numbers again and does not count (`counts`): those
        of the steps to come are the same with it and without."""
        self.step, self.evaluation = (self.step + 1, 0) if counts else (self.step, self.evaluation + 1)
        self.calls = {}
        self.training = training

    def state(self) -> dict[str, int]:
        """The part of it that is saved, between steps."""
        return {"seed": self.seed, "step": self.step}

    def at(self, state: Mapping[str, int]) -> Rng:
        """This state set to a saved `state`. Raises RunError where that is no saved state."""
        if (
            not isinstance(state, Mapping)
            or state.keys() != {"seed", "step"}
            or not all(type(number) is int and 0 <= number < 1 << 63 for number in state.values())
        ):
            raise RunError(
                f"set_rng_state got {state!r}, wanted what rng_state() gave: {{'seed': ..., 'step': ...}}, two whole "
                "numbers"
            )
        return replace(self, seed=state["seed"], step=state["step"], evaluation=0, calls={})

    def generator(
        self, key: str, layout: Layout, coord: tuple[int, ...], device: torch.device, *, once: bool = False
    ) -> torch.Generator:
        """The generator of one draw of operator `key` for the shard that the rank at `coord` holds under `layout`; the
        same in all microbatches with `once`."""
        call = self.calls.get((key, self.block), 0)
        self.calls[key, self.block] = call + 1
        shard = [(axis, coord[axis]) for axis, entry in enumerate(layout) if is_shard(entry)]
        microbatch = 0 if once else self.microbatch
        where = (self.seed, self.step, self.evaluation, key, self.block, microbatch, call, shard)
        digest = hashlib.blake2b(repr(where).encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


_current = [Rng()]


def current() -> Rng:
    """The state that random operators draw from."""
    return _current[-1]


def generator(key: str, layout: str, mesh: Mesh, device: torch.device, *, once: bool = False) -> torch.Generator:
    """The generator of one draw from the current state for this rank's shard under `layout`; an axis of one rank cuts
    nothing."""
    entries = tuple("R" if size == 1 else entry for entry, size in zip(parse(layout), mesh.sizes, strict=True))
    return current().generator(key, entries, mesh.coord, device, once=once)


def in_training(value: T, otherwise: T) -> T:
    """`value` in a step of training, `otherwise` where the module evaluates (`model.eval()`)."""
    return value if current().training else otherwise


def using(rng: Rng) -> AbstractContextManager[None]:
    """Draw from `rng` inside."""
    return pushed(_current, rng)


def in_block(number: int) -> AbstractContextManager[None]:
    """Draw as block `number` of its run inside, from the same state."""
    return using(replace(current(), block=number))


def new_seed() -> int:
    """A seed for one module, drawn from torch's generator as a DataLoader draws its own: reproducible by
    `torch.manual_seed`, and another one for the next module."""
    return int(torch.randint(1 << 53, (), device="cpu"))


def manual_seed(seed: int) -> None:
    """Seed the random operators that run outside any module; a module has its own, of `torch.manual_seed` before it was
    built or of `set_rng_state`."""
    _current[0] = Rng(seed)
