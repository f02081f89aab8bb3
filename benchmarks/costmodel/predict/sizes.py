"""Batch and sequence of a given configuration as sizes of a captured graph."""

from __future__ import annotations

from torch import fx

from autopar.errors import PlanError
from passes import facts


def sizes(gm: fx.GraphModule, samples: int, seq: int) -> dict[str, int]:
    """The value of each size. Raises PlanError where the graph is for other sequences."""
    known = facts.spans(gm)
    for name, value in (("b", samples), ("s", seq)):
        if name not in known:
            raise PlanError(
                f"setup: {name} is {value}, and the graph has one size {name} alone, that of the inputs that it was "
                f"captured with; wanted a graph of any {name}"
            )
        if value % known[name][2]:
            raise PlanError(f"setup: {name} is {value}; the graph wants a multiple of {known[name][2]}")
    return {"b": samples, "s": seq}
