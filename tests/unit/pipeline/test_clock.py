"""What the model itself gathers, in the order in which it runs."""

from __future__ import annotations

import pytest

from autopar.pipeline.pass_clock import BlockRun, Clock
from autopar.pipeline.pass_ends import Sent
from autopar.problem.hiding import Load, together_s


@pytest.mark.parametrize("contention", [0.0, 0.15, 0.5])
@pytest.mark.parametrize("computes_s", [0.0, 4.0, 10.0])
@pytest.mark.parametrize("moves_s", [0.5, 5.5, 9.0])
def test_what_moves_beside_blocks_slows_what_they_compute(moves_s: float, computes_s: float, contention: float) -> None:
    """Not the collectives that they wait for: all ten seconds of blocks were taken for compute, of which half the axis of tensor parallelism has."""
    blocks = BlockRun(10.0, {}, Sent((), 0.0), 0, (), 1.0, 1, (), computes_s / 10.0)
    clock = Clock([(Sent([Load(0, moves_s, {"slow": 1.0})], 1.0), ())], contention, blocks=True)
    clock.begin_gathers(1)
    clock.run_blocks(blocks)
    together = together_s(computes_s, [Load(1, 10.0 - computes_s, {"fast": 1.0})], [Load(0, moves_s, {"slow": 1.0})], contention)
    assert 10.0 + clock.exposed_s() == pytest.approx(together)
