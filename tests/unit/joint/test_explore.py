"""The walk through a space of shapes: which starts a probe visits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from autopar.joint.explore import Explorer
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH

INF = math.inf


class Starts(Explorer):
    """A walk whose starts take given seconds; infinite: nothing fits."""

    def __init__(self, steps_s: Sequence[float]) -> None:
        context = SimpleNamespace(timer=SimpleNamespace(halfway=INF))
        super().__init__(context, SEARCH, INF, INF)  # type: ignore[arg-type]
        self.steps_s = {Shape(2**number, (1,), 2**number): step_s for number, step_s in enumerate(steps_s)}
        self.pricing = SimpleNamespace(proven={})  # type: ignore[assignment]

    def _shapes(self) -> list[Shape]:
        self.floors = dict.fromkeys(self.steps_s, 0.0)
        return [*self.steps_s]

    def _starts(self, shapes: list[Shape]) -> list[Shape]:
        return shapes

    def visit(self, shape: Shape, near: float) -> None:
        step_s = self.steps_s[shape]
        self.found[shape] = SimpleNamespace(step_s=step_s) if step_s < INF else None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("steps_s", "visited"),
    [
        ([14.6, 18.7, 17.5, 17.3, 17.1, 17.0, 16.9], 5),  # far, and hardly faster each time
        ([14.6, 18.7, 19.0, 14.0], 3),  # far, and slower each time
        ([5.0, 12.0, 9.0, 7.0, 5.6, 4.5], 6),  # far, but soon near
        ([14.6, 15.0, 15.1, 15.2, 15.3], 5),  # all near
        ([14.6, 18.7, INF, INF, 18.7, 14.0], 6),  # what does not fit says nothing
        ([INF, INF, INF], 3),
    ],
)
def test_a_probe_leaves_out_what_hardly_gets_faster(steps_s: Sequence[float], visited: int) -> None:
    walk = Starts(steps_s)
    assert walk.probe(INF) == min(steps_s[:visited])
    assert len(walk.found) == visited
