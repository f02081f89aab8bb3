"""Verification of an emitted program against a single device: outputs, loss, gradients, parameters after an optimizer
step; then gradients of a second batch accumulated onto these, a second optimizer step, and an evaluation.

    reference            the captured graph on one device (passes.interpret), all floats lifted to float64
    graph_against_model  the user's own module against that graph, in float32
    ranks                the emitted module on local gloo ranks, the same weights and global batch; each rank compares
                         all that it holds
    second_step          the second batch, the second optimizer step and the evaluation
    collectives, volume  the collectives that ran, and their bytes, against those that were priced
    tables               what the emitted model says of itself, its state dict's order for one, against the captured one

Where something differs, a second run with probes names the first node whose value differs, or, if all values agree, the
last one in forward order whose gradient does: the first that the backward got wrong. Sums of values are compared
(`digest`), not all values, which take many times the memory of a step. Where only gradients of parameters are wrong and
the schedule splits backwards, a third run without the split says whether the split is at fault.
"""

from autopar.verify.case import Case, case_of, inputs_of
from autopar.verify.check import verify
from autopar.verify.graph_against_model import graph_rows
from autopar.verify.report import Report, Row

__all__ = ["Case", "Report", "Row", "case_of", "graph_rows", "inputs_of", "verify"]
