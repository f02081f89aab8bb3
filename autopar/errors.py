"""The errors that autopar raises on purpose.

Every message says what happened, where (module path and the user's source line when there is one), why, and what to
do, with the value got and the value wanted.
"""

from __future__ import annotations

import math


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose."""


class CaptureError(AutoparError):
    """The model could not be turned into a graph."""


class InfeasibleError(AutoparError, ValueError):
    """No plan satisfies the constraints, usually device memory. `missing_bytes`: bytes per device that are missing,
    where that is known. `bound_s`: where no plan that fits was found but one may exist, a lower bound in seconds on its
    step."""

    def __init__(self, message: str, missing_bytes: float | None = None, bound_s: float = math.inf) -> None:
        super().__init__(message)
        self.missing_bytes, self.bound_s = missing_bytes, bound_s

    @property
    def proven(self) -> list[float]:
        """`bound_s` where something may fit."""
        return [self.bound_s] if self.bound_s < math.inf else []


class PlanError(AutoparError, ValueError):
    """A plan does not fit the model, the cluster, the ranks or this version of autopar."""


class ClusterError(AutoparError, ValueError):
    """A cluster description is malformed or nonsensical."""


class LayoutError(AutoparError, ValueError):
    """A layout string is malformed, or cannot hold the tensor it is given."""


class RuleError(AutoparError, ValueError):
    """A sharding rule is malformed or does not fit the operator it is written for."""


class RunError(AutoparError, RuntimeError):
    """The emitted module was called with something that its plan does not cover, or a rank failed."""
