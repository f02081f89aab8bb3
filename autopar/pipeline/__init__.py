"""Pipelines: stages, what crosses between them, what several microbatches share, and what all of that costs. Called by
autopar.joint for the search, by codegen and memory for the stages of a plan, and by simulate and predict.

    units, stage_views        the pieces that a stage takes whole; what each stage of a plan computes, sends and holds
    crossing                  what a cut in front of each piece sends
    microbatches,
    microbatch_splits         how each value is shared by the microbatches of a step
    schedules, orders         torch's schedules, and the order of actions of each place
    in_flight, transit        microbatches in flight; tensors between stages
    assemble                  a plan of one stage, cut into stages and microbatches

    passes, op_passes         what each piece does in each pass: as sums (work), and operator by operator (stops)
    weight_buckets            which sums and gathers of weights share a bucket
    aggregate                 seconds of passes with all background collectives of a scope overlapping all of its work
    clock, pass_clock,
    streams                   the same in program order, collective by collective
    chains                    collectives in the background, one after the other; for the simulator, too
    costs, stretches          the cost of each piece, and of any consecutive pieces
    single_stage              the cost of a step without a pipeline
    once_per_step,
    shared_weights            what is paid once per step; summing, gathering: when sums of gradients, and gathers of
                              leaves, run beside other work

    balance, filling,
    memory_shares             where to cut a model; cut_search, ramps, rerun_counts: improvements of a cut
    makespan, shared_cores    the length of a step from the times of its stages; makespan_bound: a lower bound;
                              memory_bound: one with the memory of each place
    honing_state              the State of search for local search on these prices

A stage is a part of the graph, not a graph of its own: layouts, reshards and prices are those of the whole program, and
a value that crosses is sent by each rank to the rank with the same coordinates in the next stage, in its layout.
"""

from autopar.pipeline.schedules import SCHEDULES, Schedule
from autopar.pipeline.stage_views import View, views
from autopar.pipeline.units import Unit, barred, free_ops, stages_of, units

__all__ = ["SCHEDULES", "Schedule", "Unit", "View", "barred", "free_ops", "stages_of", "units", "views"]
