"""The names that `recipe` and --recipe take, of the three tables of strategies, and of those priced at a level of
rematerialisation."""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.recipes import RECIPES
from autopar.recipes.offload import OFFLOADS
from autopar.recipes.pipelines import PIPELINES
from autopar.text import near

REMAT = " remat"


def check_name(name: str) -> None:
    """Raises PlanError, with all names, where no strategy has this one."""
    known = (*RECIPES, *PIPELINES, *OFFLOADS)
    if name not in known:
        raise PlanError(f"unknown recipe {name!r}; known are {', '.join(known)}{near(name, known)}")


def with_level(name: str, level: str) -> str:
    """The name of a strategy that was priced with all blocks run again at `level`, or as many as memory requires."""
    return f"{name}, {level}{REMAT}"


def without_level(name: str) -> tuple[str, str]:
    """The strategy and the level of such a name; the name as it is, and "", for others."""
    strategy, _, level = name.rpartition(", ")
    return (strategy, level.removesuffix(REMAT)) if strategy and level.endswith(REMAT) else (name, "")
