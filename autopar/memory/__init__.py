"""What a plan needs of each device's memory, when, and for what: liveness over the emitted program.

memory_of(gm, plan) -> Prediction       the peak of every place of a pipeline, with the tensors that make it up
predict(program, plan) -> Prediction    the same at other sizes

habits.py       how software holds memory: ours, and that of others
types.py        what a prediction says
shares.py       bytes that one rank has of each value
moves.py        what changes of layout take while they run
storages.py     storages and the times at which they are alive
temporaries.py  what operators take for themselves: a table
operators.py    that under runtime algorithms, and what their backward gives on without a copy
summed_gradients.py  whose backward makes the gradient of a sum whole
forward.py      the forward of one stage, in the order in which it is emitted
backward.py     the way back over what the forward has noted
stage.py        both, as the profile of one microbatch in one stage
at_rest.py      parameters, gradients, optimizer state, buffers
hosts.py        what of them is in the memory of hosts
place.py        the stages of one place under their schedule: the fullest moment
largest.py      the largest batch and sequence that fit
"""

from __future__ import annotations

from autopar.memory.habits import Habits
from autopar.memory.predict import memory_of, predict
from autopar.memory.types import Entry, Place, Prediction

__all__ = ["Entry", "Habits", "Place", "Prediction", "memory_of", "predict"]
