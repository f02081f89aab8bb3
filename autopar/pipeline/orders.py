"""The order of actions of each place, taken from torch's own schedules, and the microbatches in flight.

    # [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), ...]
    orders("1f1b", places=2, stages=2, microbatches=4)[0]

`F` is a forward, `B` a whole backward, `I` and `W` its parts for the inputs and for the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch.distributed import pipelining

from autopar._torch import order_only
from autopar.errors import PlanError
from autopar.pipeline import gathering
from autopar.pipeline.gathering import Gathering
from autopar.pipeline.schedules import SCHEDULES
from autopar.pipeline.summing import NOTHING, Summing
from autopar.plan import Plan

FILLING_ROUNDS = 4
"""Rounds, of one microbatch per place, after which every pipeline is full."""

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")  # as torch writes them: stage, kind, microbatch


class Action(NamedTuple):
    """One piece of work of a place: its kind, stage and microbatch."""

    kind: str
    stage: int
    microbatch: int


class _Stage:
    """What torch's schedules read of a stage when they make their order: of one on the first place."""

    def __init__(self, index: int, places: int, stages: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = 0, places
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.submod = None


@lru_cache(maxsize=256)
def orders(schedule: str, places: int, stages: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of each place. Raises PlanError where the schedule cannot run so many microbatches in so many
    stages."""
    if schedule in PLAIN:
        return tuple(tuple(PLAIN[schedule](place, places, microbatches)) for place in range(places))
    lines: Mapping[int, Sequence[Any]] = laid_out(schedule, places, stages, microbatches).pipeline_order
    return tuple(tuple(actions_of(lines[place])) for place in range(places))


def short(places: int, microbatches: int) -> tuple[int, ...]:
    """Numbers of microbatches that show what a step of `microbatches` does: its own, or two smaller ones, a round of
    one microbatch per place apart.

    Once a pipeline is full (FILLING_ROUNDS), every further round is like the one before: it takes as long (exact for
    even stages, within half a percent for uneven ones: tests/unit/joint/test_timetables.py, all schedules), and keeps
    as much (tests/unit/memory/test_many_microbatches.py). That does not hold where all forwards run first.
    """
    if microbatches <= (FILLING_ROUNDS + 2) * places:
        return (microbatches,)
    first = FILLING_ROUNDS * places + microbatches % places
    return first, first + places


def laid_out(schedule: str, places: int, stages: int, microbatches: int) -> Any:
    """torch's schedule, of one that is not in `PLAIN`: its `pipeline_order` has the actions of each place, with None
    where it waits. Raises PlanError as `orders` does."""
    about = SCHEDULES[schedule]
    kind = order_only(getattr(pipelining.schedules, about.torch_name))
    mine = [_Stage(i, places, stages) for i in range(stages) if about.place(i, places) == 0]
    try:
        return kind(mine, microbatches, loss_fn=len, scale_grads=False)
    except ValueError as error:
        raise PlanError(
            f"schedule {schedule} cannot run {microbatches} microbatches in {stages} stages on {places} groups of "
            f"ranks: {' '.join(str(error).split())}"
        ) from error


def telling(schedule: str, places: int, microbatches: int) -> int:
    """Of how many microbatches a step is in which each place holds all that it does in one of `microbatches`
    (`short`)."""
    return microbatches if SCHEDULES[schedule].forwards_first else short(places, microbatches)[-1]


def lines_of(plan: Plan) -> Sequence[Sequence[Action]]:
    """What each place runs in a step of `plan`, in order: the schedule's actions, or on one place one microbatch after
    the other. A plan for inference runs all microbatches through a stage before the next one
    (runtime.stepping.run_forward)."""
    stages, micro = range(len(plan.stages)), range(plan.microbatches)
    if plan.mode != "train":
        return [
            [Action("F", i, m) for i in stages if plan.stages[i].place == place for m in micro]
            for place in range(plan.places)
        ]
    if plan.places == 1:
        return [
            [Action(kind, i, m) for m in micro for kind in "FB" for i in (stages if kind == "F" else reversed(stages))]
        ]
    return orders(plan.schedule, plan.places, len(stages), plan.microbatches)


def _gpipe(place: int, places: int, microbatches: int) -> list[Action]:
    """The actions of a place: all forwards, then all backwards."""
    return [Action(kind, place, m) for kind in "FB" for m in range(microbatches)]


def _one_forward_one_backward(place: int, places: int, microbatches: int) -> list[Action]:
    """The actions of a place as torch runs 1F1B. The order that torch itself reports has a microbatch too many on the
    last place."""
    if microbatches < places:
        raise PlanError(
            f"schedule 1f1b cannot run {microbatches} microbatches in {places} stages: it wants at least {places}; the "
            "schedule gpipe runs any number"
        )
    begun = min(microbatches, places - place)
    found = [Action("F", place, m) for m in range(begun)]
    for m in range(microbatches):
        found.append(Action("B", place, m))
        if begun + m < microbatches:
            found.append(Action("F", place, begun + m))
    return found


PLAIN = {"naive": _gpipe, "gpipe": _gpipe, "1f1b": _one_forward_one_backward}
"""Schedules of one stage per place, by what makes the actions of a place."""


def actions_of(line: Sequence[Any]) -> list[Action]:
    """torch's actions as Actions, in order, without transfers. Two actions that torch overlaps follow each other here,
    as in eager execution."""
    return [
        Action(kind, int(stage), int(micro))
        for item in line
        if item is not None
        for stage, kind, micro in _ACTION.findall(str(item))
    ]


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one microbatch in one stage: of its forward; of the backward's parts for inputs and for weights
    (`weights_s` is 0 where the backward is not split); of sending its result; and of both parts at once (0: their
    sum). `summing`: its sums of gradients, `gathering`: its gathers of leaves, both once per step."""

    forward_s: float
    inputs_s: float
    weights_s: float = 0.0
    send_s: float = 0.0
    both_s: float = 0.0
    summing: Summing = NOTHING
    gathering: Gathering = gathering.NOTHING

    def of(self, kind: str) -> float:
        """Seconds of an action of this kind."""
        return {
            "F": self.forward_s,
            "B": self.both_s or self.inputs_s + self.weights_s,
            "I": self.inputs_s,
            "W": self.weights_s,
        }[kind]


class Flying(NamedTuple):
    """Microbatches in flight in a stage: of how many it keeps activations, and for how many it keeps gradients between
    the two parts of a split backward."""

    kept: int
    halfway: int = 0


_MORE = {"F": Flying(1), "I": Flying(0, 1), "W": Flying(-1, -1), "B": Flying(-1)}
"""The change of Flying by an action of each kind; a `B` whose microbatch has a `W` later counts as an `I`."""


def last_backwards(line: Sequence[Action]) -> dict[int, int]:
    """By stage of a place, the number of the action in its line that completes the gradients of the stage."""
    return {action.stage: index for index, action in enumerate(line) if action.kind in "BW"}


def changed(line: Sequence[Action]) -> Iterator[tuple[int, Flying]]:
    """For each action of a place, its stage, and by how much the microbatches in flight there change."""
    split = {(a.stage, a.microbatch) for a in line if a.kind == "W"}
    for action in line:
        yield (
            action.stage,
            _MORE["I" if action.kind == "B" and (action.stage, action.microbatch) in split else action.kind],
        )


def in_flight(lines: Sequence[Sequence[Action]], stages: int) -> list[Flying]:
    """For each stage, the microbatches in flight at the moment at which its place keeps most, where all stages keep
    alike. Activations of a microbatch count twice as much as the gradients that it keeps between the parts of a split
    backward."""
    found = [Flying(0)] * stages
    for line in lines:
        now, size, largest = dict[int, Flying](), 0, 0
        for stage, more in changed(line):
            kept, halfway = now.get(stage, Flying(0))
            now[stage] = Flying(kept + more.kept, halfway + more.halfway)
            size += 2 * more.kept + more.halfway
            if size > largest:
                largest = size
                for other, flying in now.items():
                    found[other] = flying
    return found
