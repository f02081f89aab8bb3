"""The runtime algorithms that split one Op, with what their prices and counts depend on."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.memory import itemsize, rests_in
from autopar.problem.graph import Op
from autopar.rules.algorithms import ALGORITHMS, Algorithm
from autopar.rules.language import Option
from autopar.rules.site import Site


def sites(op: Op, options: Sequence[Option], sizes: tuple[int, ...], precision: str = "") -> list[tuple[Algorithm, Site]]:
    """One entry per axis on which an algorithm splits `op`; `options` and `sizes` have one per axis. `precision` is that of training, ""
    where gradients are summed in the dtype of the weight."""
    if op.role != "op" or not any(option.run for option in options):
        return []
    wider = itemsize(rests_in(op.dtype, precision)) / itemsize(op.dtype) if op.dtype else 1.0
    return [(ALGORITHMS[option.run], Site(op.call.ins, options, sizes, axis, op.call, wider)) for axis, option in enumerate(options) if option.run]
