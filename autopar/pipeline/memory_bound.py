"""A lower bound of a step under a schedule, with the memory of each place, however the model is cut into stages and
whatever its blocks keep that run again.

Each part of the model (a run of blocks, or all that is outside of blocks) is divided among stages and ways to keep
results: the linear program of pipeline.makespan_bound, with

    y_spw >= 0    the share of part p that stage s runs in way w, sum over s and w = 1

and, with n_sp the sum over w of y_spw, and r_s that of y_spw x the seconds of w:

    forward_s  >= sum over p of F_p n_sp
    backward_s >= sum over p of B_p n_sp + r_s
    inputs_s   >= sum over p of I_p n_sp
    m (forward_s + backward_s) + once_s + sums_s >= sum over p of T_p n_sp + m r_s
    both of the latter also without r_s, for closer bounds of B and T
    F, B and T also with all that blocks leave to each other, plus z_(s-1) - z_s, 0 <= z_s <= what may be left
    at each moment on each place: sum of microbatches in flight x bytes of w x y_spw + sum of rest_p n_sp <= limit

So bytes are tied to the seconds of the same blocks: a place keeps less by running more of its blocks again, or by
having fewer of them while others have more.

A model is cut between pieces. Of these every stage has at least one, so that the first ones of a model cannot be in its
last stages. The solver shares blocks among stages all the same; that they are whole is a matter of cases (`Whole`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.pipeline.in_flight import InFlight
from autopar.pipeline.makespan import Flow
from autopar.pipeline.makespan_bound import MOST, SLACK, Program, outermost
from autopar.search.solver import Answer


@dataclass(frozen=True, slots=True)
class Part:
    """The least that a part of the model takes on one place, over all layouts, if it is there as a whole.

    forward_s, backward_s, inputs_s    F, B, I: of one microbatch, with nothing run again: its passes, and the compute
                                       of its backward that is not for the gradients of weights
    step_s        T: of all microbatches and once per step, sums of gradients included, with nothing run again
    roomy_s       closer bounds of B and of T, which hold whatever runs again, but do not rise by what that takes
    chain_s       closer bounds of F, B and T, as the roomy ones, with what its blocks leave to each other, and how much
                  of each may be left to the next stage: what a stage takes less by that, the next one takes more
    rest_bytes    of parameters with gradients and optimizer state
    ways          (seconds, bytes) of one microbatch: what running blocks again takes, and what is kept meanwhile; the
                  first one takes nothing
    first, count  its pieces: the number of the first one, and how many follow each other; 0 of what may be anywhere
    """

    forward_s: float
    backward_s: float
    inputs_s: float
    step_s: float
    rest_bytes: float = 0.0
    ways: Sequence[tuple[float, float]] = ((0.0, 0.0),)
    roomy_s: tuple[float, float] = (0.0, 0.0)
    first: int = 0
    count: int = 0
    chain_s: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True)
class Whole:
    """A case: no place has more than `most` pieces of the part number `part`, and the part number `single`, of one
    piece, is in `stage`."""

    part: int
    most: int
    single: int
    stage: int


@dataclass(frozen=True, eq=False)
class Step:
    """A step to bound.

    at         the place of each stage
    flying     of each place, with `limit_bytes`
    flow       the schedule, of which the waits of the first and the last microbatch count
    sends_s    the least seconds of a send between each stage and the next (default: 0)
    """

    at: Sequence[int]
    microbatches: int
    flying: Sequence[InFlight]
    limit_bytes: float
    flow: Flow
    sends_s: Sequence[float] = ()

    def least_s(self, parts: Sequence[Part], whole: Whole | None = None) -> float:
        """A lower bound in seconds for a model of `parts`, of the plans of one case if there is one; infinite where
        nothing fits. Memory is looked at where blocks that all keep everything do not fit."""
        unit_s = sum(part.step_s for part in parts) / self.microbatches
        if unit_s <= 0.0:
            return 0.0
        bare = [replace(part, ways=part.ways[:1]) for part in parts]
        answer, y = self._solved(bare, unit_s, whole, short=False)
        if answer.values is not None and self._most_bytes(bare, y, answer.values) > self.limit_bytes:
            answer, _ = self._solved(parts, unit_s, whole, short=True)
        if answer.status == "infeasible":
            return math.inf
        return answer.objective * unit_s * (1 - SLACK) if answer.status == "optimal" else 0.0

    def _solved(
        self, parts: Sequence[Part], unit_s: float, whole: Whole | None, *, short: bool
    ) -> tuple[Answer, Sequence[Sequence[range]]]:
        """What the solver finds, in units of `unit_s`, and the columns y; with the rows of memory if it is `short`."""
        program = Program(len(self.at), len(self.flying), unit_s)
        y, once = _shares(program, parts, len(self.at), whole), program.columns(len(self.at))
        _divide(program, parts, y, once, self.microbatches)
        for place, mine in enumerate(self._stages):
            program.row([(program.once[place], 1.0), *((once[stage], -1.0) for stage in mine)], 0.0)
            if short:
                _hold(program, parts, [y[stage] for stage in mine], self.flying[place], self.limit_bytes)
            if whole is not None:
                blocks = [(column, float(parts[whole.part].count)) for stage in mine for column in y[stage][whole.part]]
                program.row(blocks, -math.inf, whole.most * (1 + SLACK))
        wanted = outermost(self.flow)
        program.order(
            self.flow, self.sends_s or (0.0,) * (len(self.at) - 1), wanted if len(wanted) <= MOST else frozenset()
        )
        return program.solved(), y

    def _most_bytes(self, parts: Sequence[Part], y: Sequence[Sequence[range]], values: np.ndarray) -> float:
        """The bytes of the fullest place, where each part of which there is one way is divided as in `values`."""
        share = np.array([[values[columns].sum() for columns in stage] for stage in y])  # [stages, parts]
        kept = share @ [part.ways[0][1] for part in parts]
        rest = share @ [part.rest_bytes for part in parts]
        return max(
            float((own.kept @ kept[mine]).max() + rest[mine].sum())
            for own, mine in zip(self.flying, self._stages, strict=True)
        )

    @property
    def _stages(self) -> list[list[int]]:
        """The stages of each place."""
        return [[stage for stage, at in enumerate(self.at) if at == place] for place in range(len(self.flying))]


def _shares(program: Program, parts: Sequence[Part], stages: int, whole: Whole | None) -> list[list[range]]:
    """The columns y [stages][parts][ways], of none where a stage cannot have a part; with rows by which each part is
    somewhere, and each stage has a piece."""
    places = [where(part, parts, stages, whole) for part in parts]
    y = [
        [program.columns(len(part.ways) * (stage in here)) for part, here in zip(parts, places, strict=True)]
        for stage in range(stages)
    ]
    for p in range(len(parts)):
        program.row([(column, 1.0) for stage in y for column in stage[p]], 1.0, 1.0)
    for stage in y if any(part.count for part in parts) else ():
        program.row(
            [(column, float(part.count)) for part, mine in zip(parts, stage, strict=True) for column in mine],
            1.0 - SLACK,  # where there are as many pieces as stages, the solver must not take it for impossible
        )
    return y


def where(part: Part, parts: Sequence[Part], stages: int, whole: Whole | None = None) -> range:
    """The stages that may have something of `part`: each stage before it takes a piece, and so does each one behind."""
    if not part.count:
        return range(stages)
    begin, end = stages - sum(each.count for each in parts) + part.first, part.first + part.count
    if whole is not None and part.first >= parts[whole.single].first:
        begin = max(begin, whole.stage)
    if whole is not None and part.first <= parts[whole.single].first:
        end = min(end, whole.stage + 1)
    return range(max(0, begin), min(stages, end))


def _divide(
    program: Program, parts: Sequence[Part], y: Sequence[Sequence[range]], once: range, microbatches: int
) -> None:
    """Add the rows of the seconds of stages, in units of `program.unit_s`; `once`: the columns of their seconds once
    per step."""
    forward_s, inputs_s = [part.forward_s for part in parts], [part.inputs_s for part in parts]
    backward_s, step_s = [part.backward_s for part in parts], [part.step_s for part in parts]
    roomy_s, roomy_step_s = (
        [max(own_s, part.roomy_s[way]) for own_s, part in zip(each, parts, strict=True)]
        for way, each in enumerate((backward_s, step_s))
    )
    slower = any(seconds > 0.0 for part in parts for seconds, _ in part.ways)
    chains = _chains(program, parts, len(y))
    for stage, shares in enumerate(y):
        forward, backward, inputs = program.forward[stage], program.backward[stage], program.inputs[stage]
        all_ = [(forward, float(microbatches)), (backward, float(microbatches)), (once[stage], 1.0)]
        all_.append((program.sums[stage], 1.0))
        rows = [
            ([(forward, 1.0)], forward_s, 0.0),
            ([(backward, 1.0)], roomy_s, 0.0),
            ([(inputs, 1.0)], inputs_s, 0.0),
            (all_, roomy_step_s, 0.0),
        ]
        if slower:
            rows += [([(backward, 1.0)], backward_s, 1.0), (all_, step_s, float(microbatches))]
        for columns, (least_s, left) in zip(([(forward, 1.0)], [(backward, 1.0)], all_), chains, strict=False):
            rows.append(([*columns, (left[stage], -1.0), (left[stage + 1], 1.0)], least_s, 0.0))
        for columns, least_s, again in rows:  # `columns` take at least n `least_s`, by part, and `again` times r
            took = [
                (column, -(own_s + again * seconds) / program.unit_s)
                for part, own_s, mine in zip(parts, least_s, shares, strict=True)
                for column, (seconds, _) in zip(mine, part.ways, strict=False)
            ]
            program.row([*columns, *took], 0.0)


def _chains(program: Program, parts: Sequence[Part], stages: int) -> list[tuple[list[float], range]]:
    """Where blocks leave something to each other, for F, B and T: the seconds of each part with that, and the columns z
    of what is left to the first stage, from each to the next, and by the last."""
    made: list[tuple[list[float], range]] = []
    for way in range(3) if any(part.chain_s for part in parts) else ():
        least_s = [
            part.chain_s[way][0] if part.chain_s else (part.forward_s, part.backward_s, part.step_s)[way]
            for part in parts
        ]
        most_s = sum(part.chain_s[way][1] for part in parts if part.chain_s)
        left = program.columns(stages + 1)
        for column in left:
            program.row([(column, 1.0)], 0.0, most_s / program.unit_s)
        made.append((least_s, left))
    return made


def _hold(
    program: Program, parts: Sequence[Part], y: Sequence[Sequence[range]], flying: InFlight, limit_bytes: float
) -> None:
    """Add the rows of the memory of a place that has the shares `y`, in units of `limit_bytes`."""
    for moment in flying.kept:
        held = [
            (column, (kept * nbytes + part.rest_bytes) / limit_bytes)
            for shares, kept in zip(y, moment, strict=True)
            for part, columns in zip(parts, shares, strict=True)
            for column, (_, nbytes) in zip(columns, part.ways, strict=False)
        ]
        program.row(held, -math.inf, 1.0)
