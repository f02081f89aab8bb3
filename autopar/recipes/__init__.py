"""Named strategies: what each mesh axis is for. A new recipe is one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.problem.graph import Program
from autopar.recipes import roles, sequence
from autopar.recipes.roles import Role


@dataclass(frozen=True, slots=True)
class Recipe:
    """`roles` has one entry per mesh axis, outermost (slowest links) first; `about` is one line for users.

    `fewer`: on meshes of fewer axes the recipe is its inner roles alone. `fits` says for which programs it differs from
    all other recipes: for others it is not priced unless asked for, and refused then where it `needs` what they lack,
    in the words of users. Raises PlanError where `roles` are none.
    """

    name: str
    roles: tuple[Role, ...]
    about: str
    fewer: bool = False
    fits: Callable[[Program], bool] = lambda program: True
    needs: str = ""

    def __post_init__(self) -> None:
        roles.check_roles(self.name, self.roles)

    def lacking(self, program: Program) -> str:
        """Why the recipe cannot be for a program that has nothing for it; empty where it can."""
        if not self.needs or self.fits(program):
            return ""
        return (
            f"recipe {self.name} needs {self.needs}, and the graph of the model has none: use another recipe (ddp, "
            "zero3 and tp are for any model), or none for what the search finds"
        )

    def roles_on(self, axes: int) -> tuple[Role, ...]:
        """The roles on a mesh of `axes` axes, () where the recipe cannot be on one."""
        return self.roles[-axes:] if axes == len(self.roles) or (self.fewer and 0 < axes < len(self.roles)) else ()


_TABLE = (
    Recipe("single", (roles.nothing,), "every rank computes everything: the baseline"),
    Recipe("ddp", (roles.data,), "data parallel, parameters replicated, gradients all-reduced in buckets"),
    Recipe(
        "zero1",
        (roles.zero1,),
        "data parallel, optimizer state sharded: weights gathered, gradients scattered once per step (ZeRO-1)",
    ),
    Recipe("zero2", (roles.zero2,), "as zero1, gradients sharded too: scattered after every microbatch (ZeRO-2)"),
    Recipe("zero3", (roles.zero3,), "data parallel, parameters, gradients and optimizer state sharded (ZeRO-3, FSDP)"),
    Recipe("hsdp", (roles.data, roles.zero3), "sharded inside the node, replicated across nodes"),
    Recipe("tp", (roles.tensor,), "tensor parallel: weights and heads split, activations whole between layers"),
    Recipe("tp_sp", (roles.tensor_sequence,), "tensor parallel with sequence parallel norms and residuals"),
    Recipe("tp_zero3", (roles.zero3, roles.tensor_sequence), "2-D: ZeRO-3 across, tensor parallel inside"),
    Recipe("megatron", (roles.megatron,), "column/row pairs with vocabulary-parallel embedding and loss"),
    Recipe(
        "ep",
        (roles.data, roles.experts),
        "expert parallel inside, tokens go to their experts; data parallel else and outside",
        fewer=True,
        fits=roles.has_experts,
        needs="experts (weights that are a stack of matrices, one of each expert, or loops over experts that are "
        "found to be that)",
    ),
    Recipe(
        "cp",
        (sequence.context,),
        "context parallel: the sequence cut everywhere, keys and values round a ring in attention",
        fits=sequence.attends,
    ),
    Recipe(
        "ulysses",
        (sequence.ulysses,),
        "the sequence cut everywhere, heads in attention: an all-to-all before and after it",
        fits=sequence.attends,
    ),
    Recipe("one_weird_trick", (roles.convolutions_by_sample,), "convolutions by sample, dense layers by parameter"),
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _TABLE}
