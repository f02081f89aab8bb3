"""Tensors in transit between the stages of a pipeline while an action runs: received and not used yet, or sent and not
known to have arrived. Called by the walk over the memory of a place (autopar.memory).

torch's schedules of several stages per place receive when the other side sends, which may be some actions before the
tensor is used. Those of one stage per place receive right before the use, but hold the last tensors that they received
and sent until the next transfer of that kind. Under gloo, whose works hold what they send, they also hold what was sent
by works that they keep after they have waited for them: GPipe all of them until the step ends, 1F1B the last one that
it waited for by itself, until it sends the next one so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from autopar._torch import with_transfers
from autopar.pipeline.orders import PLAIN, Action, actions_of, laid_out, orders
from autopar.pipeline.schedules import SCHEDULES
from autopar.plan import Plan

Kind: TypeAlias = Literal["activation", "gradient", "sent activation", "sent gradient"]
Transit: TypeAlias = Mapping[tuple[Kind, int], int]
"""The number of tensors of a kind, by the stage that receives them, or of sent ones by the stage that sent them."""

_TRANSFER = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")  # as torch writes them: stage, way, kind, microbatch


def transits_of(plan: Plan) -> Sequence[Sequence[Transit]]:
    """For each place, what is in transit while each action of `orders.lines_of` runs."""
    if plan.mode != "train" or plan.places == 1:
        return [[] for _ in range(plan.places)]
    return transits(
        plan.schedule, plan.places, len(plan.stages), plan.microbatches, works_hold=plan.device_kind == "cpu"
    )


@lru_cache(maxsize=256)
def transits(
    schedule: str, places: int, stages: int, microbatches: int, *, works_hold: bool = False
) -> tuple[tuple[Transit, ...], ...]:
    """For each place, what is in transit while each action of `orders` runs. `works_hold`: a send that has ended holds
    its tensor until nobody holds the send. Raises PlanError as `orders` does."""
    if schedule in PLAIN:
        return tuple(
            tuple(_held(line, stages, at_once=schedule == "1f1b", works_hold=works_hold))
            for line in orders(schedule, places, stages, microbatches)
        )
    place_of: Callable[[int], int] = lambda stage: SCHEDULES[schedule].place(stage, places)  # noqa: E731
    lines = with_transfers(laid_out(schedule, places, stages, microbatches))
    return tuple(
        tuple(_walked(lines[place], stages, [i for i in range(stages) if place_of(i) == place]))
        for place in range(places)
    )


def _held(line: Sequence[Action], stages: int, *, at_once: bool, works_hold: bool) -> Iterator[Transit]:
    """What is in transit during each action of `line`, of a place with one stage. Sends are waited for `at_once`, or
    only when all sends of one direction have been posted.

    At once: the last forward before the first backward is sent together with the receive of its gradient, those before
    by themselves, and so are the gradients behind the last forward."""
    there, back = 0, 0  # forwards and backwards so far
    forwards = sum(action.kind == "F" for action in line)
    warm = next((i for i, action in enumerate(line) if action.kind != "F"), len(line))
    for action in line:
        stage, forward = action.stage, action.kind == "F"
        if at_once:
            # the last of those that were sent by themselves, until a gradient is: behind the last forward
            lingers = works_hold and warm > 1 and there >= warm and back <= forwards - warm
            sent = min(there, 1) + lingers
        else:
            sent = there * (forward or works_hold)
        counts: dict[tuple[Kind, int], int] = {
            ("gradient", stage): int(forward and back > 0 and stage + 1 < stages),
            ("sent activation", stage): sent * (stage + 1 < stages),
            ("sent gradient", stage): (min(back, 1) if at_once else back) * (stage > 0),
        }
        yield {key: n for key, n in counts.items() if n}
        there, back = there + forward, back + (not forward)


def _walked(line: Sequence[Any], stages: int, mine: Sequence[int]) -> list[Transit]:
    """What is in transit during each action of `line`, the actions and transfers of a place that has the stages
    `mine`."""
    now, found = Counter[tuple[Kind, int]](), list[Transit]()
    sent: dict[Kind, int] = {}  # the stage that sent last: earlier sends have arrived (runtime.stages)
    for item in line:
        for stage, way, kind, _ in _TRANSFER.findall(str(item)):
            if way == "RECV":
                now["activation" if kind == "F" else "gradient", int(stage)] += 1
            else:
                sent["sent activation" if kind == "F" else "sent gradient"] = int(stage)
        made = Counter[tuple[Kind, int]]()  # by the first of two actions that overlap: it goes when both have ended
        for action in actions_of([item]):
            stage = action.stage
            if action.kind == "F" and stage and stage - 1 not in mine:
                now["activation", stage] -= 1
            if action.kind in "BI" and stage + 1 < stages:
                now["gradient", stage] -= 1
            found.append(+(now + made + Counter(dict.fromkeys(sent.items(), 1))))
            if action.kind in "BI" and stage - 1 in mine:
                now["gradient", stage - 1] += 1
            elif action.kind in "BI" and stage:
                made["sent gradient", stage] += 1
            elif action.kind == "F" and stage + 1 < stages and stage + 1 not in mine:
                made["sent activation", stage] += 1
    return found
