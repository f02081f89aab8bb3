"""Pipelines: what runs in which stage, what crosses between stages, and what several microbatches have in common.

    units(program)                the pieces that a stage takes whole, in execution order
    stages_of(program, bounds)    stages from the places where the list of units is cut
    views(program, plan)          what each stage of a plan computes, receives, sends and holds
    microbatching(...)            how each value is shared by the microbatches of a step

A stage is a part of the graph, not a graph of its own: layouts, reshards and prices are those of the whole program, and
a value that crosses is sent by each rank to the rank with the same coordinates in the next stage, as it lies.
"""

from autopar.pipeline.schedules import SCHEDULES, Schedule
from autopar.pipeline.stage_views import View, views
from autopar.pipeline.units import Unit, barred, free_ops, stages_of, units

__all__ = ["SCHEDULES", "Schedule", "Unit", "View", "barred", "free_ops", "stages_of", "units", "views"]
