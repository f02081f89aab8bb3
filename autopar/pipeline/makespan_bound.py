"""A lower bound of a step under a schedule, however the model is cut into stages.

    step >= f F + b B + i I + o O + fixed

    F      seconds of the forwards of all stages together, for one microbatch
    B      seconds of their backwards; of split ones at most the sum of both parts
    I      seconds of compute in the parts for inputs, where backwards are split
    O      seconds once per step, of all places together, after their last actions
    fixed  from the least seconds of each send

The weights f, b, i, o are dual values of a linear program in which the seconds of every stage are free, and add up to
F, B, I, O of an example. The seconds of a step are a convex and homogeneous function of those of its stages and sends,
so that the tangent at one example is a lower bound for all others. Waiting of sends for each other on one link, and the
host, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.pipeline.makespan import FORWARD, INPUTS, WEIGHTS, WHOLE, Flow
from autopar.search.model import Linear
from autopar.search.solver import GLOP, solve

MOST = 4096  # actions: steps with more of them are bounded by `mean` alone
SLACK = 1e-6  # relative: the weights are lowered by the error that the solver may make


@dataclass(frozen=True, slots=True)
class Example:
    """F, B, I and O of the example, in seconds."""

    forward_s: float
    backward_s: float
    inputs_s: float
    once_s: float


@dataclass(frozen=True, slots=True)
class Least:
    """The weights f, b, i, o of the bound, and `fixed_s`."""

    forward: float
    backward: float
    inputs: float
    once: float
    fixed_s: float = 0.0

    def step_s(self, example: Example) -> float:
        """The least seconds of a step whose stages together take `example`."""
        return (
            self.forward * example.forward_s
            + self.backward * example.backward_s
            + self.inputs * example.inputs_s
            + self.once * example.once_s
            + self.fixed_s
        )


def mean(places: int, microbatches: int) -> Least:
    """The bound that some place has at least the mean of the work of all places."""
    return Least(microbatches / places, microbatches / places, 0.0, 1 / places)


def chain(places: int, alone: float = 1.0) -> Least:
    """The bound for one microbatch: places run one after the other, each `alone` times as fast as if all ran
    (Device.alone), but no faster than all together."""
    speed = min(alone, places)
    return Least(1 / speed, 1 / speed, 0.0, 0.0)


def least(flow: Flow, stages: int, microbatches: int, example: Example, sends_s: Sequence[float] = ()) -> Least:
    """The weights for `flow` that give the highest bound for `example`. `sends_s`: the least seconds of a send between
    each stage and the next (default: 0)."""
    plain = mean(flow.places, microbatches)
    if len(flow.steps) > MOST:
        return plain
    found = _Program(flow, stages, example, sends_s or (0.0,) * (stages - 1)).weights()
    return found if found is not None and found.step_s(example) > plain.step_s(example) else plain


class _Program:
    """The linear program, in units of F + B: columns for the seconds of each stage and for the end of each action; its
    least last end is the bound."""

    def __init__(self, flow: Flow, stages: int, example: Example, sends_s: Sequence[float]) -> None:
        self.flow, self.sends_s, self.unit_s = flow, sends_s, example.forward_s + example.backward_s
        self.sent: list[tuple[int, float]] = []  # the rows of actions that wait for a send, and its seconds
        self.model = Linear(1.0, 1.0)
        self.model.starts = np.zeros(1, int)
        self.forward, self.backward, self.inputs, self.early, self.late = (self._columns(stages) for _ in range(5))
        self.once = self._columns(flow.places)
        self.ends = self._columns(len(flow.steps))
        self.last = self._columns(1, 1.0)
        for stage in range(stages):  # the parts of a split backward take at least a whole one together
            self._row([(self.early[stage], 1.0), (self.late[stage], 1.0), (self.backward[stage], -1.0)], 0.0)
            self._row([(self.early[stage], 1.0), (self.inputs[stage], -1.0)], 0.0)
            self._row([(self.backward[stage], 1.0), (self.inputs[stage], -1.0)], 0.0)
        wanted = (
            (self.forward, example.forward_s),
            (self.backward, example.backward_s),
            (self.inputs, example.inputs_s),
            (self.once, example.once_s),
        )
        self.totals = [
            self._row([(int(column), 1.0) for column in columns], seconds / self.unit_s) for columns, seconds in wanted
        ]
        self._order()

    def _columns(self, count: int, cost: float = 0.0) -> np.ndarray:
        return self.model.add_columns(np.full(count, cost), np.zeros(count))

    def _row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float = math.inf) -> int:
        row = self.model.add_rows(1, lower, upper)
        self.model.add_entries(
            np.full(len(terms), row), np.array([column for column, _ in terms]), np.array([value for _, value in terms])
        )
        return row

    def _order(self) -> None:
        """Add rows: each action ends its own seconds after everything that it waits for, and a step ends once-per-step
        seconds after the last action of each place."""
        took = {FORWARD: self.forward, WHOLE: self.backward, INPUTS: self.early, WEIGHTS: self.late}
        before: dict[int, int] = {}
        for index, step in enumerate(self.flow.steps):
            own = [] if step.place not in before else [before[step.place]]
            for other in dict.fromkeys((*own, *step.here, *step.sent)) or [None]:
                sent_s = self.sends_s[self.flow.steps[other].hop] if other in step.sent else 0.0
                row = self._row(
                    [
                        (self.ends[index], 1.0),
                        (took[step.kind][step.stage], -1.0),
                        *([] if other is None else [(self.ends[other], -1.0)]),
                    ],
                    sent_s / self.unit_s,
                )
                self.sent += [(row, sent_s)] * (sent_s > 0.0)
            before[step.place] = index
        for place, index in before.items():
            self._row([(self.last[0], 1.0), (self.ends[index], -1.0), (self.once[place], -1.0)], 0.0)

    def weights(self) -> Least | None:
        """The weights: dual values of the rows of F, B, I, O, lowered by SLACK; None where the solver finds none."""
        answer = solve(self.model, GLOP, integer=False, time_limit_s=20.0)
        if answer.status != "optimal" or answer.dual is None:
            return None
        fixed_s = sum(max(0.0, float(answer.dual[row])) * sent_s for row, sent_s in self.sent)
        forward, backward, inputs, once = (max(0.0, float(answer.dual[row])) * (1 - SLACK) for row in self.totals)
        return Least(forward, backward, inputs, once, fixed_s * (1 - SLACK))
