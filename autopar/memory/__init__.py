"""The memory that a plan needs on each device, when, and for what: liveness analysis of the emitted program.

memory_of(gm, plan) -> Prediction       the peak of every place of a pipeline, with the tensors that make it up
predict(program, plan) -> Prediction    the same at other sizes

habits.py       how software holds memory: emitted modules, and other training software
types.py        the result of a prediction
shares.py       bytes of each value on one rank
moves.py        bytes that changes of layout use while they run
storages.py     storages, and the times at which they are alive
temporaries.py  temporary memory of operators: a table
operators.py    temporary memory under runtime algorithms, and operators that pass gradients on without a copy
summed_gradients.py  operators whose backward copies the expanded gradient of a sum
forward.py      the walk over the forward of one stage, in the order in which it is emitted
backward.py     the walk back over what the forward has recorded
stage.py        both, as the profile of one microbatch in one stage
at_rest.py      parameters, gradients, optimizer state, buffers
hosts.py        which of these are in the memory of hosts
place.py        the stages of one place under their schedule: the peak
largest.py      the largest batch and sequence that fit"""

from __future__ import annotations

from autopar.memory.habits import Habits
from autopar.memory.predict import memory_of, predict
from autopar.memory.types import Entry, Place, Prediction

__all__ = ["Entry", "Habits", "Place", "Prediction", "memory_of", "predict"]
