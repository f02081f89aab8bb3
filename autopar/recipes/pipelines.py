"""Named pipelines: a schedule, and what the mesh axes of each place are for. A new one is one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.problem.graph import Program
from autopar.recipes import roles, sequence
from autopar.recipes.roles import Role


@dataclass(frozen=True, slots=True)
class PipelineRecipe:
    """`roles` are for the axes of a place, outermost first; a mesh of fewer axes has the inner ones, or where it is
    `named` for the outer one the outer ones. `virtual`: stages per place where the schedule leaves it open. `fits` as
    in Recipe. Raises PlanError where `roles` are none, or `virtual` is no number of stages; an unknown schedule is
    refused where the row is first used (joint.spaces)."""

    name: str
    schedule: str
    roles: tuple[Role, ...]
    about: str
    virtual: int = 1
    named: bool = False
    fits: Callable[[Program], bool] = lambda program: True

    def __post_init__(self) -> None:
        roles.check_roles(self.name, self.roles)
        if type(self.virtual) is not int or self.virtual < 1:
            raise PlanError(f"recipe {self.name}: virtual is {self.virtual!r}, wanted a number of stages of at least 1")

    def roles_on(self, mesh: tuple[int, ...]) -> tuple[Role, ...] | None:
        """The roles on the mesh of a place; None where it has too many axes."""
        if mesh == (1,):
            return (roles.nothing,)
        if len(mesh) > len(self.roles):
            return None
        return self.roles[: len(mesh)] if self.named else self.roles[len(self.roles) - len(mesh) :]


_TABLE = (
    PipelineRecipe(
        "naive_mp", "naive", (roles.data,), "naive model parallelism: stages one after the other, one microbatch"
    ),
    PipelineRecipe(
        "gpipe",
        "gpipe",
        (roles.data,),
        "GPipe: all microbatches forward, then all backward; data parallel in each stage",
    ),
    PipelineRecipe("1f1b", "1f1b", (roles.data,), "one forward, one backward; data parallel in each stage"),
    PipelineRecipe("interleaved", "interleaved_1f1b", (roles.data,), "1F1B with two stages per place", virtual=2),
    PipelineRecipe(
        "zero_bubble", "zbv_zero_bubble", (roles.data,), "zero bubble in a V: weight gradients fill the gaps"
    ),
    PipelineRecipe("pp_zero1", "1f1b", (roles.zero1,), "1F1B stages, ZeRO-1 in each"),
    PipelineRecipe("pp_zero2", "1f1b", (roles.zero2,), "1F1B stages, ZeRO-2 in each"),
    PipelineRecipe(
        "3d",
        "1f1b",
        (roles.zero1, roles.tensor_sequence),
        "3-D: tensor and sequence parallel inside, 1F1B stages across, ZeRO-1 else",
    ),
    PipelineRecipe(
        "4d",
        "1f1b",
        (roles.zero1, sequence.context, roles.tensor_sequence),
        "4-D: as 3d, with the sequence cut over an axis of its own, and attention by the ring (context parallel)",
        fits=sequence.attends,
    ),
    PipelineRecipe(
        "pp_zero3",
        "1f1b",
        (roles.zero3, roles.tensor_sequence),
        "1F1B stages, tensor and sequence parallel inside, ZeRO-3 across",
        named=True,
    ),
)

PIPELINES: dict[str, PipelineRecipe] = {recipe.name: recipe for recipe in _TABLE}
