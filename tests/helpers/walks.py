"""Results of a walk through shapes (joint.explore) that nothing was priced for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from autopar.joint.shapes import Shape


def result(shape: Shape, step_s: float, stages: int = 1) -> Any:
    """A result of so many seconds and stages."""
    table = SimpleNamespace(places=shape.places, stages=stages, microbatches=shape.microbatches)
    return SimpleNamespace(shape=shape, step_s=step_s, table=table)
