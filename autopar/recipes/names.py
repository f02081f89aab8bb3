"""The names that `recipe` and --recipe take, of the three tables of strategies."""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.recipes import RECIPES
from autopar.recipes.offload import OFFLOADS
from autopar.recipes.pipelines import PIPELINES
from autopar.text import near


def check_name(name: str) -> None:
    """Raises PlanError, with all names, where no strategy has this one."""
    known = (*RECIPES, *PIPELINES, *OFFLOADS)
    if name not in known:
        raise PlanError(f"unknown recipe {name!r}; known are {', '.join(known)}{near(name, known)}")
