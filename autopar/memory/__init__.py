"""The memory that a plan needs on each device, when, and for what: liveness analysis of the emitted program. Called by
the planner (does a plan fit?), by `autopar memory` and by the simulator.

memory_of(gm, plan) -> Prediction       the peak of every place of a pipeline, with the tensors that make it up
predict(program, plan) -> Prediction    the same at other sizes

What is walked, from the whole plan to one operator:
    predict           the places of a plan, each by its fullest rank
    place             the stages of one place under their schedule: the peak, and what is alive then
    stage             the profile of one microbatch in one stage: the walk forward, then backward
    forward           the walk over the forward, in the order in which it is emitted
    backward          the walk back over what the forward has recorded
    walked            what the walk records: values, steps, runs of blocks
    storages          tensors' memory, and the times from which and until which it is alive

What takes memory:
    shares            bytes of each value on one rank
    at_rest           parameters, gradients, optimizer state, buffers, inputs
    hosts             which of these are in host memory
    moves             what changes of layout use while they run
    ahead             weights that are gathered before they are used
    buckets           whole gradients while they are scattered
    sums              what sums of gradients take beside these
    weights_part      gradients of weights where a backward has an action of its own for them
    local             one call of an operator on one rank, and formulas of bytes in its sizes
    operators         temporary memory of a call under its runtime algorithms; gradients that are passed on uncopied
    temporaries       a table of temporary memory by operator; with matrices, recurrent and cpu_temporaries
    summed_gradients  operators whose backward copies the expanded gradient of a sum
    habits            how software holds memory: emitted modules, and other training software

What is made of it:
    types             the result of a prediction
    plans_that_fit    the plan of a Problem whose walked peak is within the limit
    largest           the largest batch and sequence that fit
"""

from __future__ import annotations

from autopar.memory.habits import Habits
from autopar.memory.predict import memory_of, predict
from autopar.memory.types import Entry, Place, Prediction

__all__ = ["Entry", "Habits", "Place", "Prediction", "memory_of", "predict"]
