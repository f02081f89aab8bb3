"""What the places of a pipeline do once per step beside the first forwards of their stages: gathers of leaves
(pipeline.gathering)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.pipeline.orders import Action
from autopar.simulate.endings import Ending, stream
from autopar.simulate.engine import Task
from autopar.simulate.stages import Stages


@dataclass(eq=False)
class Beginnings:
    """Adds the gathers of leaves that come before a stage to the `tasks` of a pipeline, of which `numbers` are those of
    actions; `lines` are the actions of each place."""

    stages: Stages
    tasks: list[Task]
    numbers: dict[Action, int]
    lines: Sequence[Sequence[Action]]

    def added(self) -> list[list[Ending]]:
        """The tasks of each place, in the order in which they run."""
        return [self._added(place, line) for place, line in enumerate(self.lines)]

    def _added(self, place: int, line: Sequence[Action]) -> list[Ending]:
        """The gathers of one place: of its first stage they begin with the step, of others with the last block of the
        stage before, in the first forward of that. A stage waits for its own, and what the place does until then is
        slowed down."""
        prices, found, before = self.stages.pieces[place].prices, list[Ending](), -1
        units, begun = f"units of {stream(place)}", set[int]()
        for at, action in enumerate(line):
            if action.kind != "F" or action.stage in begun:
                continue
            begun.add(action.stage)
            ran = self.stages.ran(action.stage, "ahead")
            if ran.length_s > 0.0:
                begin = (self._last_block(line, before),) if before >= 0 else ()
                task = Task(f"leaves of stage {action.stage}", f"leaves of {stream(place)}", ran.length_s, begin)
                self.tasks.append(replace(task, units=units, takes=prices.contention))
                found.append(Ending(len(self.tasks) - 1, "leaves", ran))
                for slowed in line[max(0, before) : at]:
                    number = self.numbers[slowed]
                    self.tasks[number] = replace(self.tasks[number], units=units)
                own = self.tasks[self.numbers[action]]
                self.tasks[self.numbers[action]] = replace(own, after=(*own.after, found[-1].number))
            before = at
        return found

    def _last_block(self, line: Sequence[Action], at: int) -> int:
        """Add a task that ends when the last block of an action of `line` begins. Its number."""
        action = line[at]
        earlier = [self.numbers[other] for other in line[:at][-1:]]
        own = self.tasks[self.numbers[action]]
        name, lead_s = f"blocks before the last of stage {action.stage}", own.work_s - self.stages.block_s(action.stage)
        self.tasks.append(Task(name, name, max(0.0, lead_s), (*earlier, *own.after)))
        return len(self.tasks) - 1
