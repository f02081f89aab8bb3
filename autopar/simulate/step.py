"""The simulation of one step: the stages one by one, the pipeline of their actions, and the work that is done once per
step."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from autopar.cost.memory import computes_in
from autopar.memory.place import Holding
from autopar.memory.predict import fullest
from autopar.pipeline.orders import Action, last_backwards, lines_of
from autopar.plan import Plan
from autopar.problem.graph import Op
from autopar.problem.read_graph import read
from autopar.simulate import schedule
from autopar.simulate.beginnings import Beginnings
from autopar.simulate.endings import Ending, Endings, begins_in
from autopar.simulate.engine import Task, Timeline, run
from autopar.simulate.memory import over_time
from autopar.simulate.rank import Ran, covered
from autopar.simulate.result import Place, Simulation, Span
from autopar.simulate.stages import Stages

# stream and kind of an Ending, if it is no action
STREAMS = {"sums": ("sums", "all_reduce"), "leaves": ("leaves", "all_gather"), "copies": ("compute", "copy")}
# kind of an action -> the pass of a stage (Stages.ran)
PARTS = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}
# spans of all actions; beyond it only the first and the last microbatch are shown operator by operator
DETAILED = 200_000


def simulate(gm: fx.GraphModule, plan: Plan, progress: Callable[[str], None] | None = None) -> Simulation:
    """Simulate one training step (or forward, of a plan for inference) of `plan`, which was made for the captured graph
    `gm`.

    `progress` is told what happens. Raises PlanError where the plan's schedule cannot run.
    """
    say = progress or (lambda _: None)
    say("reading the graph")
    stages = Stages.of(gm, plan)
    say(f"simulating {len(stages.turns)} stage{'s' * (len(stages.turns) > 1)}")
    say("following memory")
    program = (
        stages.program
        if plan.microbatches == 1
        else read(gm, plan.hints, training=stages.training, device=stages.cluster.device.kind)
    )
    held = fullest(program, plan)
    places = _Pipeline(stages, held, lines_of(plan)).places() if plan.pipelined else [_alone(stages, held[0])]
    return _summed(stages, places)


def _alone(stages: Stages, held: Holding) -> Place:
    """The single Place of a plan without a pipeline; one rank stands for all."""
    ran = stages.whole()
    ends = {
        during: max(
            (end for end, mark in zip(ran.timeline.end_s, ran.marks, strict=True) if mark.during == during), default=0.0
        )
        for during in ("forward", "backward", "sync")
    }
    turns = [
        0.0,
        ends["forward"],
        *((ends["backward"], max(ends["backward"], ends["sync"]), ran.length_s) if stages.training else ()),
    ]
    memory = over_time(held.levels(), list(itertools.pairwise(turns)))
    optimizer_s = sum(
        task.work_s for task, mark in zip(ran.tasks, ran.marks, strict=True) if mark.during == "optimizer"
    )
    busy = ran.compute_s + ran.exposed_s
    return Place(
        0,
        (0,),
        ran.compute_s - optimizer_s,
        ran.exposed_s,
        ran.communication_s - ran.exposed_s,
        ran.length_s - busy,
        optimizer_s,
        memory,
        ran.launches,
        lambda: spans(ran),
    )


def spans(ran: Ran, at_s: float = 0.0, pace: float = 1.0) -> list[Span]:
    """The tasks of a rank as spans, shifted by `at_s` and stretched by the factor `pace`."""
    return [
        Span(
            task.stream,
            _named(mark.piece.name, mark.instance),
            mark.piece.kind,
            at_s + pace * begin,
            at_s + pace * end,
            mark.piece.nbytes,
        )
        for task, mark, begin, end in zip(ran.tasks, ran.marks, ran.timeline.begin_s, ran.timeline.end_s, strict=True)
    ]


def _named(name: str, instance: int) -> str:
    """`model.layers/linear` of instance 3 -> `model.layers 3/linear`."""
    scope, slash, rest = name.partition("/")
    return f"{scope} {instance}/{rest}" if slash and instance >= 0 else name


@dataclass(eq=False)
class _Pipeline:
    """The actions of all places; `lines` are those of each, in order."""

    stages: Stages
    held: Sequence[Holding]
    lines: Sequence[Sequence[Action]]
    tasks: list[Task] = field(default_factory=list)
    actions: list[Action | None] = field(default_factory=list)

    @cached_property
    def last(self) -> dict[int, Action]:
        """By stage, the action that completes its gradients."""
        return {stage: line[index] for line in self.lines for stage, index in last_backwards(line).items()}

    @cached_property
    def first(self) -> dict[int, Action]:
        """By stage, its first forward."""
        return {action.stage: action for line in self.lines for action in reversed(line) if action.kind == "F"}

    def ran(self, action: Action) -> Ran | None:
        """The simulated rank of an action; None for a "W" of a stage whose backward is not split, which has run with
        its "I"."""
        part, view, plan = PARTS[action.kind], self.stages.views[action.stage], self.stages.plan
        if part == "forward" and action == self.first[action.stage] and self.stages.training:
            return self.stages.ran(action.stage, "first")
        if part in ("inputs", "weights") and not view.separable:
            return self.stages.ran(action.stage, "backward") if part == "inputs" else None
        if part == "backward" and action == self.last.get(action.stage):
            if plan.places == 1:
                return self.stages.ran(action.stage, "last")
            sums = self.stages.sums(action.stage) if begins_in(action) else None
            if sums and sums.alone.tasks and self.stages.pieces[plan.stages[0].place].prices.overlap > 0.0:
                return sums.last
        return self.stages.ran(action.stage, part)

    def places(self) -> list[Place]:
        """Simulate the step; one rank of each place."""
        plan = self.stages.plan
        where = [stage.place for stage in plan.stages]
        sends = {
            (stage, what): self.stages.send_s(stage, gradients=what == schedule.GRADIENTS)
            for stage in range(len(where))
            for what in schedule.SENT
        }
        alone = min(self.stages.cluster.device.alone, plan.places) if plan.places > 1 else 1.0
        host_s = [self._host_s(place) for place in where]

        def took_s(action: Action) -> float:
            ran = self.ran(action)
            return host_s[action.stage] + (0.0 if ran is None else ran.length_s)

        self.tasks, self.actions = schedule.tasks(self.lines, where, took_s, sends, alone)
        numbers = {action: index for index, action in enumerate(self.actions) if action is not None}
        ends: list[list[Ending]] = [[] for _ in self.lines]
        if self.stages.training:
            begins = Beginnings(self.stages, self.tasks, numbers, self.lines).added() if plan.places > 1 else ends
            ends = Endings(self.stages, self.tasks, numbers, self.lines, self.last).added()
            ends = [[*begin, *end] for begin, end in zip(begins, ends, strict=True)]
        timeline = run(self.tasks, {schedule.CORES: plan.places / alone})
        mine: list[list[int]] = [[] for _ in self.lines]
        for index, action in enumerate(self.actions):
            if action is not None:
                mine[where[action.stage]].append(index)
        detailed = sum(len(ran.tasks) for line in self.lines for a in line if (ran := self.ran(a))) <= DETAILED
        return [self._place(place, timeline, mine[place], ends[place], detailed) for place in range(plan.places)]

    def _host_s(self, place: int) -> float:
        """Seconds of the host of a place for one action."""
        return self.stages.places.device(place).action_s if self.stages.plan.places > 1 else 0.0

    def _place(
        self, place: int, timeline: Timeline, mine: Sequence[int], ending: Sequence[Ending], detailed: bool
    ) -> Place:
        """The result of one place: `mine` are its tasks in `timeline`, `ending` those after its last action."""
        did = [(index, ran) for index in mine if (ran := self.ran(self._action(index))) is not None]
        did += [(index, own) for index, what, own in ending if what == "sync" and own is not None]
        times = [(begin, end) for begin, end in zip(timeline.begin_s, timeline.end_s, strict=True)]
        copies_s, shared_s, optimizer_s = (
            sum(times[index][1] - times[index][0] for index, kind, own in ending if kind == what and own is None)
            for what in ("copies", "sync", "optimizer")
        )
        compute_s, exposed_s, communication_s = (
            sum(_pace(ran, *times[index]) * part(ran) for index, ran in did)
            for part in map(operator.attrgetter, ("compute_s", "exposed_s", "communication_s"))
        )
        # sums of gradients, and gathers of leaves, beside actions
        sums = [times[index] for index, what, _ in ending if what in ("sums", "leaves")]
        beside = [span for index, ran in did for span in self._beside(sums, ran, *times[index])]
        moves = [(span.begin_s, span.end_s) for span in beside if span.kind not in ("compute", "copy")]
        works = [(span.begin_s, span.end_s) for span in beside]
        works += [times[index] for index, what, _ in ending if what == "copies"]
        more_s = covered([*sums, *works]) - covered(works)
        hidden_s = communication_s - exposed_s + covered([*sums, *moves]) - covered(moves) - more_s
        exposed_s, compute_s = exposed_s + more_s + shared_s, compute_s + copies_s
        phases = [times[index] for index in mine]
        if ending:
            begun = max((end for _, end in phases), default=0.0)
            synced = max((times[index][1] for index, what, _ in ending if what != "optimizer"), default=begun)
            phases += [(begun, max(begun, synced)), (max(begun, synced), times[ending[-1][0]][1])]
        elif not self.stages.training:
            phases.append((timeline.length_s, timeline.length_s))
        memory = over_time(self.held[place].levels(), phases)
        return Place(
            place,
            self.stages.plan.stages_on(place),
            compute_s,
            exposed_s,
            hidden_s,
            timeline.length_s - compute_s - exposed_s - optimizer_s,
            optimizer_s,
            memory,
            sum(ran.launches for _, ran in did)
            + sum(own.launches for _, what, own in ending if what == "sums" and own),
            lambda: self._spans(place, timeline, mine, ending, detailed),
        )

    def _beside(self, sums: Sequence[tuple[float, float]], ran: Ran, begin_s: float, end_s: float) -> list[Span]:
        """What `ran`, from `begin_s` to `end_s`, has done in that time; nothing where no `sums` run beside it."""
        if not any(begin < end_s and begin_s < end for begin, end in sums):
            return []
        return spans(ran, begin_s, _pace(ran, begin_s, end_s))

    def _action(self, index: int) -> Action:
        """The action that task number `index` stands for."""
        action = self.actions[index]
        assert action is not None, "only actions are of a place"
        return action

    def _spans(
        self, place: int, timeline: Timeline, mine: Sequence[int], ending: Sequence[Ending], detailed: bool
    ) -> list[Span]:
        """The actions of a place, operator by operator (of the first and last microbatch, where not `detailed`), and
        its sends."""

        def span(index: int, stream: str, kind: str) -> Span:
            return Span(stream, self.tasks[index].name, kind, timeline.begin_s[index], timeline.end_s[index])

        made, last = [], self.stages.plan.microbatches - 1
        for index in mine:
            made.append(span(index, "actions", "action"))
            ran = self.ran(self._action(index))
            if ran is not None and (detailed or self._action(index).microbatch in (0, last)):
                begin_s, end_s = timeline.begin_s[index], timeline.end_s[index]
                made += spans(ran, begin_s, _pace(ran, begin_s, end_s))
        for index, what, own in ending:
            stream, kind = STREAMS.get(what, ("actions", "action"))
            made.append(span(index, stream, kind))
            made += spans(own, timeline.begin_s[index]) if own is not None and what == "sync" else []
        return made + [
            span(index, "sends", "send") for index, task in enumerate(self.tasks) if task.stream == schedule.link(place)
        ]


def _pace(ran: Ran, begin_s: float, end_s: float) -> float:
    """The factor from the seconds of `ran` by itself to its seconds in the pipeline: below 1 where other places leave
    cores free, above 1 with the host's work for actions, and beside sums of gradients."""
    return (end_s - begin_s) / ran.length_s if ran.length_s > 0 else 1.0


def _flops(op: Op, stages: Stages) -> float:
    """FLOPs of all runs of an operator in one microbatch, forward and backward, without recomputation."""
    if not (stages.training and op.graded):
        return op.count * op.flops
    spared = stages.program.first_runs((op.name, 0)) * (1.0 - op.first_share)
    return op.count * op.flops + (op.count - spared) * op.backward_flops


def _summed(stages: Stages, places: Sequence[Place]) -> Simulation:
    """The Simulation of all places together."""
    plan, at = stages.plan, stages.places
    peak = stages.cluster.flops(computes_in(plan.precision)) * plan.ranks / stages.cluster.devices
    step_s = max(p.compute_s + p.exposed_s + p.idle_s + p.optimizer_s for p in places)
    flops = plan.microbatches * sum(_flops(op, stages) for op in stages.program.ops.values() if op.role == "op")
    tokens = plan.hints.get("b", 1) * plan.hints.get("s", 1)
    busiest = max(places, key=lambda p: p.compute_s)
    return Simulation(
        model=plan.model,
        cluster=stages.cluster.label,
        ranks=plan.ranks,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        step_s=step_s,
        predicted_s=plan.predicted.step_s,
        mfu=flops / (step_s * peak),
        tokens_s=tokens / step_s / plan.ranks,
        tokens="tokens" if "s" in plan.hints else "samples",
        launch_s=busiest.launches * at.device(busiest.place).launch_s,
        places=tuple(places),
    )
