"""What is asked of the planner, beside the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.problem.remat import LEVELS
from autopar.problem.settings import Settings
from autopar.rules.rule import Rule
from autopar.search import Search
from autopar.text import near
from autopar.timer import TIME_LIMIT_S


def check_remat(level: str) -> None:
    """Raises PlanError for an unknown level of rematerialisation."""
    known = ("auto", *LEVELS)
    if level not in known:
        raise PlanError(f"unknown remat {level!r}; known are {', '.join(known)}{near(level, known)}")


@dataclass(frozen=True)
class Request:
    """What to plan for, beside the graph: the arguments of `compile`, checked. `time_limit_s` is in seconds."""

    cluster: Cluster
    settings: Settings = field(default_factory=Settings)
    search: str | Search = "ilp"
    recipe: str | None = None
    mesh: tuple[int, ...] | None = None
    time_limit_s: float = TIME_LIMIT_S
    seed: int = 0
    rules: Mapping[Any, Rule] | None = None
    progress: Callable[[str], None] | None = None
    # limit of a plan's peak on each device; None: all the usable memory of the device
    memory_bytes: float | None = None
    # rematerialisation: one of problem.remat.LEVELS for all blocks, or "auto", as much as memory requires
    remat: str = "auto"
    prove: bool = False  # whether to prove the best lower bound that can be proven (slow), not only the quick one

    def __post_init__(self) -> None:
        """Raises PlanError for an unknown level of remat."""
        check_remat(self.remat)

    @property
    def limit_bytes(self) -> float:
        """Bytes that a plan may fill on each device."""
        return self.cluster.device.usable_memory_bytes if self.memory_bytes is None else self.memory_bytes

    @property
    def remat_level(self) -> str:
        """The level of rematerialisation that was asked for; "none" where it is left open, and for inference."""
        return "none" if self.remat == "auto" or not self.settings.training else self.remat

    def say(self, what: str) -> None:
        """Tell `progress` what happens now."""
        if self.progress is not None:
            self.progress(what)
