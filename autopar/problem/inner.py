"""The runtime algorithms that split one Op, with what their prices and counts depend on."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.problem.graph import Op
from autopar.rules.algorithms import ALGORITHMS, Algorithm
from autopar.rules.language import Option
from autopar.rules.site import Site


def sites(op: Op, options: Sequence[Option], sizes: tuple[int, ...]) -> list[tuple[Algorithm, Site]]:
    """One entry per axis on which an algorithm splits `op`; `options` and `sizes` have one per axis."""
    return [(ALGORITHMS[option.run], Site(op.call.ins, options, sizes, axis, op.call))
            for axis, option in enumerate(options) if op.role == "op" and option.run]
