"""A plan file against the graph that it is for: whether each of its decisions is one that the graph's operators have.
Called by every command that reads a plan file and captures its model.

`suits` is asked where a plan that was read meets the graph that was captured again, before anything is simulated,
emitted or run. A plan that the search made passes; one that was edited passes where it is another plan of the same
model.

    nodes       each has on each axis one of the options of its operator, and all axes go together
    micro       microbatches share values by the rules of the operators
    stages      they are pieces of the graph, one behind the other, that the schedule can run on so many places
    memory      each place has room for what it holds, and so have the hosts
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from torch import fx

from autopar.cluster import Cluster
from autopar.codegen.edges import options
from autopar.errors import ClusterError, InfeasibleError, PlanError
from autopar.memory import hosts, predict
from autopar.pipeline.microbatches import microbatching
from autopar.pipeline.orders import lines_of
from autopar.pipeline.schedules import SCHEDULES
from autopar.pipeline.stage_views import total_ref
from autopar.pipeline.units import barred, free_ops, stages_of, units
from autopar.plan import Plan
from autopar.planner import Planner
from autopar.problem.build import fits_together
from autopar.problem.clusters import Cluster as OpCluster
from autopar.problem.clusters import Joint
from autopar.problem.graph import Op, Ref
from autopar.problem.rerun import check as check_rerun
from autopar.problem.settings import Settings
from autopar.recipes import offload as offloads
from autopar.recipes.kinds import kind
from autopar.request import Request
from autopar.rules.language import Option
from autopar.rules.rule import Rule
from autopar.rules.tiles import COUNTS, NAMES, tiles
from autopar.text import gibibytes

ENDS = ("loss", "output")  # results, which take values as they are made
UNCUT = "none"  # the schedule of a plan that is not cut


def suits(gm: fx.GraphModule, plan: Plan, rules: Mapping[Any, Rule] | None) -> None:
    """Check that `plan` is one of the plans of the captured graph `gm`, which is already in the parts that the plan
    says (`Captured.parted`), with these `rules` of the user. Raises PlanError, with the field, got and wanted;
    ClusterError where its mesh does not lie on its cluster; InfeasibleError where a place or a host has too little
    memory."""
    suited = _Suited(gm, plan, rules)
    suited.cluster.places(plan.places, plan.mesh)
    suited.check_schedule()
    suited.check_nodes()
    suited.check_stages()
    if plan.microbatches > 1:
        suited.check_microbatches()
    suited.check_again()
    suited.check_memory()


def fail(path: str, got: object, wanted: str) -> NoReturn:
    """Raise PlanError: the field of the plan, got and wanted."""
    raise PlanError(
        f"the plan does not fit the graph: {path} is {got}; wanted {wanted}. Plan the model again, or bring the field "
        "back"
    )


@dataclass(eq=False)
class _Suited:
    """The checks of one plan against one graph. Each raises as `suits`."""

    gm: fx.GraphModule
    plan: Plan
    rules: Mapping[Any, Rule] | None

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster of the plan. Raises PlanError where it is none."""
        try:
            return Cluster.from_dict(dict(self.plan.cluster))
        except ClusterError as error:
            raise PlanError(
                f"the plan's cluster is malformed: {error}. Plan the model again, or bring the field back"
            ) from error

    @cached_property
    def planner(self) -> Planner:
        """The options at the sizes of a microbatch."""
        return self._planner(self.plan.micro_hints)

    @cached_property
    def whole(self) -> Planner:
        """The options at the sizes of the whole batch."""
        return self.planner if self.plan.microbatches == 1 else self._planner(self.plan.hints)

    def _planner(self, hints: Mapping[str, int]) -> Planner:
        """The operators and their options at the sizes `hints`."""
        return Planner.of(
            self.gm, hints, Request(self.cluster, Settings.of(self.plan), rules=self.rules), self.plan.runs
        )

    # -- schedule and stages

    def check_schedule(self) -> None:
        """The schedule is known, and runs so many stages and microbatches."""
        plan, cut = self.plan, len(self.plan.stages) > 1 or self.plan.stages[0].nodes or self.plan.stages[0].blocks
        if plan.schedule != UNCUT and plan.schedule not in SCHEDULES:
            fail(
                "schedule",
                repr(plan.schedule),
                f"{UNCUT!r} of a plan that is not cut, or one of {', '.join(SCHEDULES)}",
            )
        if (plan.schedule == UNCUT) != (not cut) or (plan.schedule == UNCUT and plan.microbatches > 1):
            fail(
                "schedule",
                f"{plan.schedule!r} with {plan.microbatches} microbatches and {len(plan.stages)} stages",
                f"a pipeline's where there are several, {UNCUT!r} where nothing is cut",
            )
        if plan.schedule == "naive" and plan.microbatches > 1:
            fail("microbatches", plan.microbatches, "1 with the schedule naive; use gpipe or 1f1b")
        if plan.schedule != UNCUT:
            lines_of(plan)

    def check_stages(self) -> None:
        """The stages are the pieces of the graph in order, each once."""
        plan, program = self.plan, self.planner.program
        if plan.schedule == UNCUT:
            return
        self._check_names_of_stages()
        free = free_ops(program)
        counts = [
            sum(stop - first for first, stop in stage.blocks.values()) + sum(name not in free for name in stage.nodes)
            for stage in plan.stages
        ]
        if sum(counts) != (pieces := len(units(program))):
            fail(
                "stages",
                f"of {counts} pieces",
                f"all {pieces} pieces of the graph (operators and blocks), each in one stage",
            )
        bounds = list(itertools.accumulate(counts[:-1]))
        wanted = stages_of(
            program, bounds, SCHEDULES[plan.schedule], plan.places, [total_ref(text) for text in plan.totals]
        )
        for index, (stage, right) in enumerate(zip(plan.stages, wanted, strict=True)):
            for what in ("nodes", "blocks", "place"):
                if (got := getattr(stage, what)) != (due := getattr(right, what)):
                    fail(
                        f"stages[{index}].{what}",
                        got,
                        f"{due}, as the graph has them in order on the places of {plan.schedule}",
                    )
        if wrong := [bound for bound in bounds if bound in barred(program)]:
            fail(
                "stages",
                f"cut in front of {units(program)[wrong[0]].name}",
                "no cut between what reads a buffer and what makes its new value",
            )

    def _check_names_of_stages(self) -> None:
        """The graph has the operators and the runs of blocks that stages name."""
        program = self.planner.program
        for i, stage in enumerate(self.plan.stages):
            for what, names, known in (("nodes", stage.nodes, program.ops), ("blocks", stage.blocks, program.runs)):
                for name in names:
                    if name not in known:
                        fail(f"stages[{i}].{what}", repr(name), "operators and runs of blocks of the graph")

    def check_again(self) -> None:
        """Blocks that are run again exist, and so do so many instances of them."""
        plan, program = self.plan, self.planner.program
        if plan.remat and plan.mode != "train":
            fail("remat", dict(plan.remat), "nothing: there is no backward in inference")
        check_rerun(program, plan.remat)
        for index, stage in enumerate(plan.stages):
            held = (
                dict(stage.blocks)
                if plan.schedule != UNCUT
                else {scope: (0, run.count) for scope, run in program.runs.items()}
            )
            for scope, count in stage.again.items():
                first, stop = held.get(scope, (0, -1))
                if count > stop - first:
                    fail(
                        f"stages[{index}].again.{scope}",
                        count,
                        f"at most {stop - first}, the blocks of that run in the stage"
                        if scope in held
                        else f"runs of blocks of the stage: {', '.join(held) or 'there are none'}",
                    )

    # -- decisions

    def check_nodes(self) -> None:
        """Each node has one of the options of its operator on each axis, and the options of its axes go together."""
        plan, program = self.plan, self.planner.program
        gone, new = (
            [name for name in program.ops if name not in plan.nodes],
            [name for name in plan.nodes if name not in program.ops],
        )
        if gone or new:
            fail(
                "nodes",
                f"without {', '.join(gone[:3]) or 'any'} and with {', '.join(new[:3]) or 'no'} unknown ones",
                "the nodes of the graph",
            )
        for op in program.ops.values():
            self._check_node(op)
        inputs = [op for op in program.ops.values() if op.role == "input" and op.batch[0]]
        cuts = (
            {op.name: plan.nodes[op.name].factors for op in inputs if len(self.table(plan.mesh[0])[op.name]) > 1}
            if plan.mesh
            else {}
        )
        for name, factors in cuts.items():
            if factors != (first := next(iter(cuts.values()))):
                fail(
                    f"nodes.{name}.factors",
                    list(factors),
                    f"{list(first)}, as the other inputs: a rank has one part of the batch",
                )

    def table(self, ways: int) -> Mapping[str, list[Option]]:
        """The options of each operator on an axis of `ways` ranks."""
        return {name: list(found) for name, found in self.planner.table(ways, placed=True, tiled=True).items()}

    def _check_node(self, op: Op) -> None:
        """As check_nodes, for one operator."""
        plan, node, path = self.plan, self.plan.nodes[op.name], f"nodes.{op.name}"
        for what, count in (("ins", len(op.call.ins)), ("outs", len(op.call.outs))):
            if len(got := getattr(node, what)) != count:
                fail(f"{path}.{what}", list(got), f"{count}, one for each tensor")
        chosen = options(node)
        found = []
        for axis, mine in enumerate(chosen):
            able = self.tables[plan.mesh[axis]][op.name]
            same = next((option for option in able if _told(option) == _told(mine)), None)
            if same is None:
                near = [option for option in able if option.factor == mine.factor and option.run == mine.run] or [
                    option for option in able if _uses(option) == _uses(mine)
                ]
                fail(
                    f"{path} on axis {plan.axes[axis]}",
                    _shown(mine),
                    f"one of its options, as {' or '.join(dict.fromkeys(map(_shown, near[:3] or able[:3])))}",
                )
            if (wanted := kind(op, same)) != node.kinds[axis]:
                fail(f"{path}.kinds[{axis}]", repr(node.kinds[axis]), repr(wanted))
            if tiles(same.run) > 1 and (
                tiles(same.run) not in COUNTS
                or op.call.ins[NAMES[same.run.rstrip("0123456789")]].sizes[0] % (plan.mesh[axis] * tiles(same.run))
            ):
                fail(
                    f"{path}.runs[{axis}]",
                    repr(same.run),
                    f"tiles that cut every shard of the weight evenly, of {', '.join(map(str, COUNTS))}",
                )
            found.append(same)
        if not fits_together(
            OpCluster(op.name, [op], anchor=False), tuple(Joint((option,)) for option in found), plan.mesh
        ):
            fail(
                path,
                ", ".join(map(_shown, found)),
                "layouts that go together on all axes: dims that several cut divide evenly",
            )

    @cached_property
    def tables(self) -> dict[int, Mapping[str, list[Option]]]:
        return {ways: self.table(ways) for ways in dict.fromkeys(self.plan.mesh)}

    # -- microbatches

    def check_microbatches(self) -> None:
        """Microbatches share each value by the rules of the operators."""
        plan, program = self.plan, self.whole.program
        totals = dict.fromkeys(map(total_ref, plan.totals))
        for ref in totals:
            self._check_total(ref)
        able = self.whole.table(plan.microbatches, placed=False)
        entries = {
            (name, i): "P" if (name, i) in totals else entry
            for name, node in plan.nodes.items()
            for i, entry in enumerate(node.micro)
        }
        found = {}
        for op in program.ops.values():
            mine = [entries[op.name, i] for i in range(len(op.call.outs))]
            given = [
                "P" if f"{op.name}:{i}" in plan.shared else "R" if ref in totals else entries[ref]
                for i, ref in enumerate(op.operands)
            ]
            fitting = [o for o in able[op.name] if [use.value for use in o.outs] == mine and not o.run]
            same = next(
                (o for o in fitting if op.role in ENDS or [use.value for use in o.ins] == given or op.role == "port"),
                None,
            )
            if same is None:
                fail(
                    f"nodes.{op.name}.micro",
                    list(plan.nodes[op.name].micro),
                    f"how {plan.microbatches} microbatches share its values where its operands are {given}",
                )
            found[op.name] = same
        made = microbatching(program, found, plan.microbatches)
        if dict.fromkeys(made.totals) != dict.fromkeys(plan.totals):
            fail("totals", list(plan.totals), f"{list(made.totals)}, the values that are taken over all microbatches")
        if dict.fromkeys(made.shared) != dict.fromkeys(plan.shared):
            fail(
                "shared",
                list(plan.shared),
                f"{list(made.shared)}, the operands of which each microbatch takes its part",
            )

    def _check_total(self, ref: Ref) -> None:
        """A total is a value of the graph, and all microbatches have it whole."""
        (name, index), ops = ref, self.whole.program.ops
        if name not in ops or index >= len(ops[name].call.outs):
            fail("totals", f"{name}:{index}", "values of the graph")
        if (entry := self.plan.nodes[name].micro[index]) != "R":
            fail(
                f"nodes.{name}.micro[{index}]",
                repr(entry),
                "'R': it is one of totals, which all microbatches have whole",
            )

    # -- memory

    def check_memory(self) -> None:
        """Each place has room for its peak."""
        at, needs = self.cluster.places(self.plan.places, self.plan.mesh), predict(self.whole.program, self.plan)
        for place in needs.places:
            device = at.device(place.number) if at.mixed else self.cluster.device
            if place.peak_bytes > device.usable_memory_bytes:
                where = f"place {place.number}" if self.plan.places > 1 else "the plan"
                raise InfeasibleError(
                    f"{where} needs {gibibytes(place.peak_bytes)} at its peak ({place.when}), {device.name} has "
                    f"{gibibytes(device.usable_memory_bytes)} usable of {gibibytes(device.memory_bytes)}: plan for "
                    "this cluster again, or for more devices",
                    place.peak_bytes - device.usable_memory_bytes,
                )
        if self.plan.offload:
            self._check_hosts()

    def _check_hosts(self) -> None:
        """What is in the memory of hosts is of a training step, and hosts have room for it."""
        if self.plan.mode != "train":
            fail("offload", repr(self.plan.offload), "'': in inference there is nothing to update")
        offloads.fits("the plan", hosts.of_a_device(self.whole.program, self.plan), self.cluster)


def _told(option: Option) -> tuple[object, ...]:
    """The factor, algorithm and layouts of an option, as a plan says them."""
    return option.factor, option.run, _uses(option)


def _uses(option: Option) -> tuple[object, ...]:
    """The layouts of all operands and outputs of an option."""
    return tuple(option.ins), tuple(option.outs)


def _shown(option: Option) -> str:
    """An option as messages write it."""
    ins, outs = (" ".join(map(str, uses)) for uses in (option.ins, option.outs))
    return f"{option.factor!r}: {ins} -> {outs}".rstrip() + (f" by {option.run}" if option.run else "")
