"""A lower bound of a step under a schedule, however the model is cut into stages.

    step >= f F + b B + i I + o O + s S + fixed

    F      seconds of the forwards of all stages together, for one microbatch
    B      seconds of their backwards; of split ones at most the sum of both parts
    I      seconds of compute in the parts for inputs, where backwards are split
    O      seconds once per step, of all places together, after their last actions
    S      seconds of the sums of gradients of all stages together, which begin when those of their stage are complete
           (of the first stage in its last backward), and run one after the other on a place (pipeline.summing)
    fixed  from the least seconds of each send

The weights f, b, i, o, s are dual values of a linear program in which the seconds of every stage are free, and add up
to F, B, I, O, S of a mixture of examples. The seconds of a step are a convex and homogeneous function of those of its
stages and sends, so that the tangent at one mixture is a lower bound for all others. Waiting of sends for each other on
one link, and the host, are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.pipeline.makespan import FORWARD, INPUTS, WEIGHTS, WHOLE, Flow
from autopar.search.model import Linear
from autopar.search.solver import GLOP, Answer, solve

MOST = 4096
"""Actions of which the waits count at most: of longer schedules only the first and the last microbatch wait."""

SLACK = 1e-6
"""Relative: the weights are lowered by the error that the solver may make."""


@dataclass(frozen=True, slots=True)
class Example:
    """F, B, I, O and S of the example, in seconds."""

    forward_s: float
    backward_s: float
    inputs_s: float
    once_s: float
    sums_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Least:
    """The weights f, b, i, o of the bound, and `fixed_s`; `beside` is s: that of collectives once per step which
    backwards may overlap."""

    forward: float
    backward: float
    inputs: float
    once: float
    fixed_s: float = 0.0
    beside: float = 0.0

    def step_s(self, example: Example) -> float:
        """The least seconds of a step whose stages together take `example`."""
        return (
            self.forward * example.forward_s
            + self.backward * example.backward_s
            + self.inputs * example.inputs_s
            + self.once * example.once_s
            + self.beside * example.sums_s
            + self.fixed_s
        )


def mean(places: int, microbatches: int, slows: float = 0.0) -> Least:
    """The bound that some place has at least the mean of the work of all places. A second of sums makes a place take
    `slows` longer at least: the work beside it takes as much longer, or the place has no work meanwhile."""
    return Least(microbatches / places, microbatches / places, 0.0, 1 / places, beside=slows / places)


def chain(places: int, alone: float = 1.0) -> Least:
    """The bound for one microbatch: places run one after the other, each `alone` times as fast as if all ran
    (Device.alone), but no faster than all together."""
    speed = min(alone, places)
    return Least(1 / speed, 1 / speed, 0.0, 0.0)


def least(
    flow: Flow,
    stages: int,
    microbatches: int,
    examples: Sequence[Example],
    sends_s: Sequence[float] = (),
    slows: float = 0.0,
    *,
    quick: bool = False,
) -> Least:
    """The weights for `flow` that give the highest bound for all mixtures of `examples`. `sends_s`: seconds at
    least of a send between each stage and the next (default: 0). `slows` as in `mean`. `quick`: only the first and the
    last microbatch wait."""
    plain = mean(flow.places, microbatches, slows)
    wanted = range(len(flow.steps)) if len(flow.steps) <= MOST and not quick else outermost(flow)
    if len(wanted) > MOST:
        return plain
    program = Program(stages, flow.places, examples[0].forward_s + examples[0].backward_s)
    program.order(flow, sends_s or (0.0,) * (stages - 1), wanted, slows)
    found = _weights(program, examples)
    return max((plain, *([found] if found else [])), key=lambda each: min(map(each.step_s, examples)))


def outermost(flow: Flow) -> frozenset[int]:
    """The actions, by number, of the first and the last microbatch of each stage: by their waits pipelines fill and
    drain, however many microbatches there are."""
    first, last = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    for index, step in enumerate(flow.steps):
        first.setdefault((step.stage, step.kind), index)
        last[step.stage, step.kind] = index
    return frozenset((*first.values(), *last.values()))


class Program:
    """The linear program of a step under a schedule, in units of `unit_s`: columns for the seconds of each stage (its
    forward, its backward, of this the compute for inputs and both parts of a split one, and its sums of gradients), for
    those of each place once per step, and for the end of the step, `last`, which is least. `sent`: the rows of actions
    that wait for a send, with its seconds."""

    def __init__(self, stages: int, places: int, unit_s: float) -> None:
        self.unit_s = unit_s
        self.sent: list[tuple[int, float]] = []
        self._costs: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._entries: list[tuple[int, int, float]] = []  # row, column, value
        self.forward, self.backward, self.inputs, self.early, self.late, self.sums = (
            self.columns(stages) for _ in range(6)
        )
        self.once = self.columns(places)
        self.last = self.columns(1, 1.0)
        for stage in range(stages):  # the parts of a split backward take at least a whole one together
            self.row([(self.early[stage], 1.0), (self.late[stage], 1.0), (self.backward[stage], -1.0)], 0.0)
            self.row([(self.early[stage], 1.0), (self.inputs[stage], -1.0)], 0.0)
            self.row([(self.backward[stage], 1.0), (self.inputs[stage], -1.0)], 0.0)

    def columns(self, count: int, cost: float = 0.0) -> range:
        """New columns of this cost each, all at least 0; their numbers."""
        first = len(self._costs)
        self._costs += [cost] * count
        return range(first, first + count)

    def row(self, terms: Iterable[tuple[int, float]], lower: float, upper: float = math.inf) -> int:
        """A new row lower <= sum of (column, factor) `terms` <= upper; its number."""
        row = len(self._lower)
        self._lower.append(lower)
        self._upper.append(upper)
        self._entries += [(row, column, value) for column, value in terms if value]
        return row

    def order(self, flow: Flow, sends_s: Sequence[float], wanted: Container[int], slows: float = 0.0) -> None:
        """Add columns and rows: each of the `wanted` actions of `flow`, by number, ends its own seconds after the other
        wanted ones that it waits for, and after all that its place does before; and a step ends once-per-step seconds
        after the last action of each place, after its sums, and no sooner than after all work of a place, which sums
        slow down. `sends_s` and `slows` as in `least`."""
        took = {FORWARD: self.forward, WHOLE: self.backward, INPUTS: self.early, WEIGHTS: self.late}
        ends: dict[int, int] = {}
        before = [(-1, Counter[int]()) for _ in range(flow.places)]  # the last wanted action's end, and what follows it
        work = [Counter[int]() for _ in range(flow.places)]
        for index, step in enumerate(flow.steps):
            end, since = before[step.place]
            own = took[step.kind][step.stage]
            since[own] += 1
            work[step.place][own] += 1
            if index not in wanted:
                continue
            ends[index] = mine = self.columns(1)[0]
            self._after(mine, end, since)
            for other in dict.fromkeys((*step.here, *step.sent)):
                if other in ends and (ends[other] != end or other in step.sent):
                    sent_s = sends_s[flow.steps[other].hop] if other in step.sent else 0.0
                    row = self._after(mine, ends[other], {own: 1}, sent_s)
                    self.sent += [(row, sent_s)] * (sent_s > 0.0)
            before[step.place] = mine, Counter()
        completing = [(index, step) for index, step in enumerate(flow.steps) if step.last]
        for place, (once, (end, since)) in enumerate(zip(self.once, before, strict=True)):
            complete = [(index, step) for index, step in completing if step.place == place]
            self._after(self.last[0], end, {**since, once: 1})
            if slows and complete:
                slower = {self.sums[step.stage]: slows for _, step in complete}
                self._after(self.last[0], -1, {**work[place], once: 1, **slower})
            for number, (index, step) in enumerate(complete):
                later = {self.sums[other.stage]: 1 for _, other in complete[number:]}
                if index in ends:  # those of the first stage begin in its whole backward
                    begun = {self.backward[step.stage]: -1} if step.kind == WHOLE and not step.stage else {}
                    self._after(self.last[0], ends[index], {**begun, **later, once: 1})
                elif not number:
                    self._after(self.last[0], -1, {**later, once: 1})

    def _after(self, column: int, end: int, took: Mapping[int, float], sent_s: float = 0.0) -> int:
        """A new row: `column` is no earlier than `end` (-1: the begin), what `took` so many times, and a send."""
        later = [(each, -float(times)) for each, times in took.items() if times]
        return self.row([(column, 1.0), *later, *([(end, -1.0)] if end >= 0 else [])], sent_s / self.unit_s)

    def solved(self) -> Answer:
        """What the solver finds."""
        model = Linear(1.0, 1.0)
        model.starts = np.zeros(1, int)
        model.add_columns(np.array(self._costs), np.zeros(len(self._costs)))
        model.add_rows(len(self._lower), np.array(self._lower), np.array(self._upper))
        rows, columns, values = np.array(self._entries).reshape(-1, 3).T
        model.add_entries(rows.astype(int), columns.astype(int), values)
        return solve(model, GLOP, integer=False, time_limit_s=20.0)


def _weights(program: Program, examples: Sequence[Example]) -> Least | None:
    """The weights: dual values of the rows by which the stages add up to F, B, I, O and S of the examples, in any
    mixture, lowered by SLACK; None where the solver finds none."""
    shares = program.columns(len(examples))
    program.row([(share, 1.0) for share in shares], 1.0)
    wanted = (
        (program.forward, [each.forward_s for each in examples]),
        (program.backward, [each.backward_s for each in examples]),
        (program.inputs, [each.inputs_s for each in examples]),
        (program.once, [each.once_s for each in examples]),
        (program.sums, [each.sums_s for each in examples]),
    )
    totals = [
        program.row(
            [
                *((column, 1.0) for column in columns),
                *((share, -own_s / program.unit_s) for share, own_s in zip(shares, seconds, strict=True)),
            ],
            0.0,
        )
        for columns, seconds in wanted
    ]
    answer = program.solved()
    if answer.status != "optimal" or answer.dual is None:
        return None
    fixed_s = sum(max(0.0, float(answer.dual[row])) * sent_s for row, sent_s in program.sent)
    forward, backward, inputs, once, beside = (max(0.0, float(answer.dual[row])) * (1 - SLACK) for row in totals)
    return Least(forward, backward, inputs, once, fixed_s * (1 - SLACK), beside)
