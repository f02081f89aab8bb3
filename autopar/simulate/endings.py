"""What the places of a pipeline do once per step, beside their last actions and after them: sums of gradients over the
ranks of a place, sums of shared weights over places, the optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.pipeline.orders import Action
from autopar.simulate.engine import Task
from autopar.simulate.rank import Ran
from autopar.simulate.stages import Stages


class Ending(NamedTuple):
    """A task of a place: its `number`; `what` it is: "sums" of gradients beside actions, their "copies", "sync" or
    "optimizer"; and the tasks of the rank that it stands for, if there are any."""

    number: int
    what: str
    ran: Ran | None = None


@dataclass(eq=False)
class Endings:
    """Adds such tasks to the `tasks` of a pipeline, of which `numbers` are those of actions; `lines` are the actions of
    each place, and `last` by stage that which completes its gradients."""

    stages: Stages
    tasks: list[Task]
    numbers: dict[Action, int]
    lines: Sequence[Sequence[Action]]
    last: Mapping[int, Action]

    def added(self) -> list[list[Ending]]:
        """The tasks of each place, added in the order in which they run."""
        places = range(len(self.lines))
        found = [self._sums(place) if len(places) > 1 else [] for place in places]
        before = [
            [task.number for task in ending] or [self.numbers[line[-1]]]
            for ending, line in zip(found, self.lines, strict=True)
        ]
        for shared in self.stages.shared:
            name = f"gradients of {', '.join(shared.names)} over places"
            after = tuple([number for place in shared.places for number in before[place]])
            for place in shared.places:
                found[place].append(self._add(Task(name, stream(place), shared.seconds, after), "sync"))
        for place, ending in enumerate(found):
            name, update_s = self.stages.plan.optimizer, self.stages.optimizer(place).seconds
            ending.append(
                self._add(Task(name, stream(place), update_s, tuple(each.number for each in ending)), "optimizer")
            )
        return found

    def _sums(self, place: int) -> list[Ending]:
        """The sums of gradients of a place, one after the other. Those of each stage begin when its gradients are
        complete, of the first one in its last backward, and run beside what the place does then (runtime.stages); the
        copies around them come last. Where all share the cores, they take as long as if they came last."""
        line, prices = self.lines[place], self.stages.pieces[place].prices
        last = [action for action in line if action == self.last.get(action.stage)]
        sums = {action: own for action in last if (own := self.stages.sums(action.stage)).alone.length_s > 0.0}
        if prices.overlap == 0.0 or not sums:
            return [
                self._add(Task(_name(action), stream(place), own.alone.length_s), "sync", own.alone)
                for action, own in sums.items()
            ]
        units, found = f"units of {stream(place)}", list[Ending]()
        for action in line[line.index(next(iter(sums))) :]:
            self._replace(action, units)
        for action, own in sums.items():
            task, left_s = Task(_name(action), f"sums of {stream(place)}", 0.0), own.alone.length_s
            if begins_in(action):  # which is slower for that already
                before_s, left_s = max(0.0, left_s - own.left_s), own.left_s
                if own.lead_s < own.last.length_s:  # else only copies come before its end
                    head = replace(task, work_s=before_s, after=(self._lead(action, own.lead_s),))
                    found.append(self._add(head, "sums"))
            rest = replace(task, work_s=left_s, after=(self.numbers[action],), units=units, takes=prices.contention)
            found.append(self._add(rest, "sums", own.alone))
        copies_s = sum(own.copies_s if begins_in(action) else own.alone.compute_s for action, own in sums.items())
        return [*found, self._add(Task("copies of gradients", stream(place), copies_s), "copies")]

    def _replace(self, action: Action, units: str) -> None:
        """Let other tasks take a share of the `units` that an action computes on."""
        number = self.numbers[action]
        self.tasks[number] = replace(self.tasks[number], units=units)

    def _lead(self, action: Action, lead_s: float) -> int:
        """Add a task that ends `lead_s` after the begin of an action, when the first bucket is full. Its number."""
        line = next(line for line in self.lines if action in line)
        before = [self.numbers[earlier] for earlier in line[: line.index(action)][-1:]]
        after = (*before, *self.tasks[self.numbers[action]].after)
        return self._add(Task(f"{_name(action)} come", f"{_name(action)} come", lead_s, after), "sums").number

    def _add(self, task: Task, what: str, ran: Ran | None = None) -> Ending:
        self.tasks.append(task)
        return Ending(len(self.tasks) - 1, what, ran)


def begins_in(action: Action) -> bool:
    """Whether sums of gradients begin in an action that completes the gradients of its stage, not after it."""
    return action.kind == "B" and action.stage == 0


def stream(place: int) -> str:
    """The stream of the actions of a place (simulate.schedule)."""
    return f"place {place}"


def _name(action: Action) -> str:
    return f"gradients of stage {action.stage}"
