"""A lower bound of a step under a schedule, with the memory of each place, however the model is cut into stages and
whatever its blocks keep that run again.

Each part of the model (a run of blocks, or all that is outside of blocks) is divided among stages and ways to keep
results: the linear program of pipeline.makespan_bound, with

    y_spw >= 0    the share of part p that stage s runs in way w, sum over s and w = 1

and, with n_sp the sum over w of y_spw, and r_s that of y_spw x the seconds of w:

    forward_s  >= sum over p of F_p n_sp
    backward_s >= sum over p of B_p n_sp + r_s
    inputs_s   >= sum over p of I_p n_sp
    m (forward_s + backward_s) + once_s >= sum over p of T_p n_sp + m r_s
    at each moment on each place: sum of microbatches in flight x bytes of w x y_spw + sum of rest_p n_sp <= limit

So bytes are tied to the seconds of the same blocks: a place keeps less by running more of its blocks again, or by
having fewer of them while others have more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.pipeline.in_flight import InFlight
from autopar.pipeline.makespan import Flow
from autopar.pipeline.makespan_bound import MOST, SLACK, Program, outermost


@dataclass(frozen=True, slots=True)
class Part:
    """The least that a part of the model takes on one place, over all layouts, if it is there as a whole.

    forward_s, backward_s, inputs_s    F, B, I: of one microbatch, with nothing run again: its passes, and the compute
                                       of its backward that is not for the gradients of weights
    step_s        T: of all microbatches and once per step, with nothing run again
    rest_bytes    of parameters with gradients and optimizer state
    ways          (seconds, bytes) of one microbatch: what running blocks again takes, and what is kept meanwhile
    """

    forward_s: float
    backward_s: float
    inputs_s: float
    step_s: float
    rest_bytes: float
    ways: Sequence[tuple[float, float]]


def step_s(
    parts: Sequence[Part],
    at: Sequence[int],
    microbatches: int,
    flying: Sequence[InFlight],
    limit_bytes: float,
    flow: Flow,
    sends_s: Sequence[float] = (),
) -> float:
    """A lower bound in seconds; infinite where nothing fits.

    at         the place of each stage
    flying     of each place
    flow       the schedule, of which the waits of the first and the last microbatch count
    sends_s    the least seconds of a send between each stage and the next (default: 0)
    """
    unit_s = sum(part.step_s for part in parts) / microbatches
    if unit_s <= 0.0:
        return 0.0
    program = Program(len(at), len(flying), unit_s)
    _divide(program, parts, at, microbatches, flying, limit_bytes)
    wanted = outermost(flow)
    program.order(flow, sends_s or (0.0,) * (len(at) - 1), wanted if len(wanted) <= MOST else ())
    answer = program.solved()
    if answer.status == "infeasible":
        return math.inf
    return answer.objective * unit_s * (1 - SLACK) if answer.status == "optimal" else 0.0


def _divide(
    program: Program,
    parts: Sequence[Part],
    at: Sequence[int],
    microbatches: int,
    flying: Sequence[InFlight],
    limit_bytes: float,
) -> None:
    """Add the columns y and all rows that have them, in units of `program.unit_s` and of `limit_bytes`."""
    y = [[program.columns(len(part.ways)) for part in parts] for _ in at]
    for p in range(len(parts)):
        program.row([(column, 1.0) for stage in y for column in stage[p]], 1.0, 1.0)
    once = program.columns(len(at))
    for stage, shares in enumerate(y):
        forward, backward, inputs = program.forward[stage], program.backward[stage], program.inputs[stage]
        all_ = [(forward, microbatches), (backward, microbatches), (once[stage], 1.0)]
        for columns, least_s, again in (
            ([(forward, 1.0)], [part.forward_s for part in parts], 0.0),
            ([(backward, 1.0)], [part.backward_s for part in parts], 1.0),
            ([(inputs, 1.0)], [part.inputs_s for part in parts], 0.0),
            (all_, [part.step_s for part in parts], float(microbatches)),
        ):  # the sum of `columns` is at least n `least_s`, by part, and `again` times r
            took = [
                (column, -(own_s + again * seconds) / program.unit_s)
                for part, own_s, mine in zip(parts, least_s, shares, strict=True)
                for column, (seconds, _) in zip(mine, part.ways, strict=True)
            ]
            program.row([*columns, *took], 0.0)
    for place, own in enumerate(flying):
        mine = [stage for stage, other in enumerate(at) if other == place]
        program.row([(program.once[place], 1.0), *((once[stage], -1.0) for stage in mine)], 0.0)
        for moment in own.kept:
            held = [
                (column, (kept * nbytes + part.rest_bytes) / limit_bytes)
                for stage, kept in zip(mine, moment, strict=True)
                for part, columns in zip(parts, y[stage], strict=True)
                for column, (_, nbytes) in zip(columns, part.ways, strict=True)
            ]
            program.row(held, -math.inf, 1.0)
