"""The layouts that a given configuration leaves open: the fastest under the roles of its axes."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.planner import Planner
from autopar.problem.build import Decisions, build
from autopar.problem.prices import Prices
from autopar.search import ilp
from benchmarks.costmodel.predict.axes import Axis
from benchmarks.costmodel.predict.refused import check_cut

LAYOUT_SOLVE_S = 5.0
"""Seconds at most of the search for the layouts that are left open."""

NO_LIMIT_BYTES = float(1 << 60)
"""The memory limit: a given configuration is priced whether it fits or not."""


def fastest_layouts(planner: Planner, prices: Prices, axes: Sequence[Axis]) -> Decisions:
    """The option of every operator on every axis of the mesh of `prices`: of those that the roles of `axes` admit, the
    ones with the least seconds per step.

    Raises PlanError where an axis does not divide what its role is to split (predict.refused).
    """
    joints = [planner.joints(axis.role, axis.ways) for axis in axes]
    model = build(planner.program, planner.clusters, joints, prices, NO_LIMIT_BYTES, "given")
    decisions = model.decode(ilp.search(model.problem, time_limit_s=LAYOUT_SOLVE_S).choice)
    check_cut(planner.program, decisions, axes)
    return decisions
