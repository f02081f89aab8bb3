"""The entries of the verification matrix: which model, on which mesh, under which plan, at which sizes; and those of
pipelines: how many places, which schedule, what is run again in the backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.pipeline import SCHEDULES
from autopar.problem.remat import LEVELS
from autopar.recipes import RECIPES, roles, sequence
from autopar.verify import Report
from tests.helpers.remat import rematerialised
from tests.helpers.tiny import TINY
from tests.helpers.verify import FROZEN, SEQ, Sizes, batch_for, by_stages, planned, subject

MESHES: tuple[Sizes, ...] = ((4,), (2, 2), (2, 2, 2))
EXTRA = ("searched", "few", "thrifty", *(f"random {seed}" for seed in range(4)))
OTHER = (16, 11)
"""Batch and sequence that no plan was made for: 11 over 2 or 4 ranks is uneven."""
EXPERTS = ("hf-mixtral", "hf-gpt-oss", "hf-llama4", "moe")
"""Models that have what the recipe of experts needs; others refuse it."""


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
        return who.verified(
            planned(who, self.mesh, self.how), batch_for(self.how) if self.batch is None else self.batch, self.seq
        )


def entries(models: tuple[str, ...] = tuple(TINY), meshes: tuple[Sizes, ...] = MESHES) -> list[Entry]:
    """The full matrix: every recipe that can be on the mesh and has what it needs in the model, and the EXTRA plans;
    searched, thrifty and random ones also at OTHER sizes than planned."""
    found = [
        Entry(model, mesh, how)
        for model in models
        for mesh in meshes
        for how in (
            *(r.name for r in RECIPES.values() if r.roles_on(len(mesh)) and (not r.needs or model in EXPERTS)),
            *EXTRA,
        )
    ]
    others = [
        replace(entry, batch=OTHER[0], seq=OTHER[1])
        for entry in found
        if entry.how in ("searched", "thrifty", "random 0")
    ]
    return found + others


PIPED = ("hf-gpt2", "hf-llama-deep", "hf-t5", "hf-vit", "hf-resnet", f"hf-resnet{FROZEN}")
"""Models of the matrix of pipelines. Statistics of a batch are no sum over microbatches: ResNet has one microbatch, or
frozen batch norms."""

PLACES: dict[str, tuple[int, Sizes, Sequence[roles.Role]]] = {
    "pp2": (2, (1,), (roles.nothing,)),
    "pp4": (4, (1,), (roles.nothing,)),
    "pp2 x dp2 x zero1": (2, (2,), (roles.zero1,)),
    "pp2 x tp2 x zero3": (2, (2, 2), (roles.zero3, roles.tensor)),
    "pp2 x dp2 x cp2 x tp2": (2, (2, 2, 2), (roles.zero1, sequence.context, roles.tensor_sequence)),
}
"""What ranks are: number of places, mesh of each, and the role of its axes."""

MESHED = ("1f1b", "interleaved_1f1b", "zbv_zero_bubble")
"""Schedules where places have several ranks on one axis or two; of three one, and all of them where they have one
rank."""


@dataclass(frozen=True)
class Piped:
    """One verification of a pipeline: `shape` is one of PLACES, `level` as in `tests.helpers.remat`."""

    model: str
    shape: str
    schedule: str
    level: str

    def __str__(self) -> str:
        return "-".join((self.model, self.shape.replace(" ", ""), self.schedule, self.level)).replace(" ", "_")

    def run(self) -> Report:
        """Plan and verify; a microbatch per stage, which every schedule takes."""
        who, (places, mesh, used) = subject(self.model), PLACES[self.shape]
        virtual = SCHEDULES[self.schedule].virtual or 2
        count = 1 if self.schedule == "naive" else places * virtual
        return who.verified(
            rematerialised(who, by_stages(who, mesh, used, places, count, self.schedule, virtual), self.level)
        )


def pipelines(models: tuple[str, ...] = PIPED) -> list[Piped]:
    """The matrix of pipelines: every schedule on 2 and 4 places, some where places have meshes; nothing, some or all
    run again."""
    return [
        Piped(model, shape, schedule, level)
        for model in models
        for shape, (_, mesh, _) in PLACES.items()
        for schedule in _schedules(model, mesh)
        for level in LEVELS
    ]


def _schedules(model: str, mesh: Sizes) -> Sequence[str]:
    if model == "hf-resnet":
        return ("naive",)
    return tuple(SCHEDULES) if mesh == (1,) else MESHED[: 1 if len(mesh) > 2 else None]
