"""The entries of the verification matrix: which model, on which mesh, under which plan, at which sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.recipes import RECIPES
from autopar.verify import Report
from tests.helpers.tiny import TINY
from tests.helpers.verify import SEQ, Sizes, batch_for, planned, subject

MESHES: tuple[Sizes, ...] = ((4,), (2, 2), (2, 2, 2))
EXTRA = ("searched", "few", "thrifty", *(f"random {seed}" for seed in range(4)))
OTHER = (16, 11)
"""Batch and sequence that no plan was made for: 11 over 2 or 4 ranks is uneven."""


@dataclass(frozen=True)
class Entry:
    """One verification. `how` is as in `tests.helpers.verify.planned`; `batch` None is what the plan was made for."""

    model: str
    mesh: Sizes
    how: str
    batch: int | None = None
    seq: int = SEQ

    def __str__(self) -> str:
        sizes = "" if self.batch is None else f"-b{self.batch}s{self.seq}"
        return f"{self.model}-{'x'.join(map(str, self.mesh))}-{self.how.replace(' ', '')}{sizes}"

    def run(self) -> Report:
        """Plan and verify."""
        who = subject(self.model)
        return who.verified(planned(who, self.mesh, self.how), batch_for(self.how) if self.batch is None else self.batch, self.seq)


def entries(models: tuple[str, ...] = tuple(TINY), meshes: tuple[Sizes, ...] = MESHES) -> list[Entry]:
    """The full matrix: every recipe that can be on the mesh, and the EXTRA plans; searched, thrifty and random ones also at
    OTHER sizes than planned."""
    found = [Entry(model, mesh, how) for model in models for mesh in meshes
             for how in (*(r.name for r in RECIPES.values() if r.roles_on(len(mesh))), *EXTRA)]
    others = [replace(entry, batch=OTHER[0], seq=OTHER[1]) for entry in found if entry.how in ("searched", "thrifty", "random 0")]
    return found + others
