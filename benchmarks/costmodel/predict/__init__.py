"""Seconds of a training step under a *given* configuration, and its memory: nothing is searched but what the
configuration leaves open.

    Setup       how it is trained: axis sizes, schedule, microbatches, recomputation, what the software does beside the
                plan
    Place       what every unit of the model costs on the mesh of one place, by part (from the prices of
                autopar.problem)
    Layers      how many layers the model has, and which blocks of the place they are like
    predict     Setup and Place -> Prediction: the step by part
    peak        Setup and graph -> memory.Prediction: its plan, walked as plans of ours are, with the habits of the
                software that runs it
"""

from benchmarks.costmodel.predict.peak import peak
from benchmarks.costmodel.predict.place import Decided, Place, UnitTime, decide, price
from benchmarks.costmodel.predict.setup import Setup, Software
from benchmarks.costmodel.predict.step import Layers, Prediction, predict

__all__ = [
    "Decided",
    "Layers",
    "Place",
    "Prediction",
    "Setup",
    "Software",
    "UnitTime",
    "decide",
    "peak",
    "predict",
    "price",
]
