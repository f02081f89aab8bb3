"""Splits that need more than the plain operator on shards: what the runtime runs inside them, for prices and counts.

    embedding        rows of other ranks are masked to zero: nothing is sent
    cross_entropy    two all-reduces of one number per row: the maximum and the sum of exponentials
    causal_rows      queries are a chunk of rows, keys and values whole and cut to what the rows may see: nothing is sent
    own_experts      tokens are whole, each rank computes the rows of its own experts: nothing is sent
    expert_dispatch  tokens and experts are cut: numbers of rows, rows and results go all to all, and their gradients back
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.rules import experts
from autopar.rules.site import Inner, Site


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The inner collectives of one call, forward and backward, in the order in which they run."""

    forward: tuple[Inner, ...] = ()
    backward: tuple[Inner, ...] = ()

    def inner(self, *, training: bool) -> tuple[Inner, ...]:
        """The inner collectives of one call, backward included when training."""
        return (*self.forward, *(self.backward if training else ()))


def _statistic(site: Site) -> float:
    """One number per row of operand 0, at least a float32."""
    return site.local(0, *range(len(site.operands[0].shape) - 1)) * max(4, site.operands[0].itemsize)


ALGORITHMS: dict[str, Algorithm] = {
    "causal_rows": Algorithm(),
    "cross_entropy": Algorithm(forward=(Inner("all_reduce", _statistic),) * 2),
    "embedding": Algorithm(),
    "expert_dispatch": Algorithm(forward=(experts.COUNTS, experts.ROWS, experts.RESULTS), backward=(experts.RESULTS, experts.ROWS)),
    "own_experts": Algorithm(),
}
