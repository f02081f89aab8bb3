"""One step of a plan, as it runs on a rank of each place: a discrete-event simulation with the prices of the search.

simulate(gm, plan) -> Simulation     step time, shares, memory, and spans for a trace
engine.py     tasks on streams that share links and compute units; knows nothing of plans
pieces.py     what operators and reshards do on a rank, with their prices
work.py       the forward of a stage in the order of the emitted code
rank.py       forward and backward of a stage as tasks, as the runtime starts them
sync.py       buckets: gathers of leaves, and sums of gradients
stages.py     each distinct stage once
schedule.py   the actions of a pipeline and what they send
beginnings.py  what happens once per step, beside the first actions of a place
endings.py    the same, beside its last actions and after them
step.py       the simulation of a step: stages, pipeline, endings
memory.py     the memory of a place over time
result.py     what a simulation finds, as plain data
trace.py      a simulation as a file for Perfetto
"""

from __future__ import annotations

from autopar.simulate.result import Place, Simulation, Span
from autopar.simulate.step import simulate

__all__ = ["Place", "Simulation", "Span", "simulate"]
