"""The stages of a plan, simulated one by one: equal stages on equal devices once, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.cluster import Cluster, Places
from autopar.codegen.edges import Edges, edges, options
from autopar.cost.comm import collective_s
from autopar.decisions import local_share
from autopar.pipeline.chains import LeafBucket, at_reading, by_first_forward, travelling
from autopar.pipeline.schedules import SCHEDULES
from autopar.pipeline.shared_weights import Shared, shared_weights
from autopar.pipeline.stage_views import View, views, whole
from autopar.plan import Plan
from autopar.problem.graph import Op, Program, Ref
from autopar.problem.read_graph import read
from autopar.problem.settings import Settings
from autopar.simulate.pieces import COMPUTE, Piece, Pieces
from autopar.simulate.rank import Ran, Rank
from autopar.simulate.sync import Sync
from autopar.simulate.work import Turn, Walk


@dataclass(frozen=True)
class Sums:
    """The sums of the gradients of a stage: with nothing beside them (`alone`), and with the `last` backward.

    lead_s, left_s    when they begin after its begin, and when they end after its end
    copies_s          copies around them that come later than it
    """

    alone: Ran
    last: Ran
    lead_s: float
    left_s: float
    copies_s: float


@dataclass(eq=False)
class Stages:
    """The stages of one plan. `program` has the sizes of one microbatch."""

    gm: fx.GraphModule
    plan: Plan
    program: Program
    cluster: Cluster
    _ran: dict[tuple[int, str, bool], Ran] = field(default_factory=dict)
    _sums: dict[int, Sums] = field(default_factory=dict)

    @staticmethod
    def of(gm: fx.GraphModule, plan: Plan) -> Stages:
        """Read the graph that `plan` was made for at the sizes of a microbatch."""
        cluster = Cluster.from_dict(dict(plan.cluster))
        return Stages(
            gm, plan, read(gm, plan.micro_hints, training=plan.mode == "train", device=cluster.device.kind), cluster
        )

    def __post_init__(self) -> None:
        plan, settings = self.plan, Settings.of(self.plan)
        self.places: Places = self.cluster.places(plan.places, plan.mesh)
        kinds = {
            self.places.homes[p]: Pieces(self.places.mesh(p), self.places.device(p), settings)
            for p in self.places.kinds
        }
        self.pieces = [kinds[home] for home in self.places.homes]  # of each place
        self.edges: Edges = edges(self.program, plan)
        self.views: tuple[View, ...] = views(self.program, plan) if plan.pipelined else (whole(self.program),)
        schedule = SCHEDULES.get(plan.schedule)
        self.splitting = plan.places > 1 and schedule is not None and schedule.splits_backward
        walks = {
            home: Walk(self.gm, self.program, plan, self.edges, pieces, self.splitting)
            for home, pieces in kinds.items()
        }
        homes = [self.places.homes[stage.place] for stage in plan.stages]
        self.turns: list[list[Turn]] = [walks[home].stage(view) for home, view in zip(homes, self.views, strict=True)]
        alike = [
            (home, view.separable, *((turn.item.name, bool(turn.item.replay)) for turn in turns))
            for home, view, turns in zip(homes, self.views, self.turns, strict=True)
        ]
        # for each stage the first one with the same work on the same kind of device
        self._first = [alike.index(names) for names in alike]
        self.shared: list[Shared] = (
            shared_weights(self.program, plan, self.views, self.places) if plan.places > 1 else []
        )
        syncs = {home: Sync(self.program, plan, self.edges, pieces.prices) for home, pieces in kinds.items()}
        self.syncs = [syncs[home] for home in self.places.homes]  # of each place

    @property
    def training(self) -> bool:
        """Whether there is a backward."""
        return self.plan.mode == "train"

    def ran(self, stage: int, part: str) -> Ran:
        """One microbatch in one stage, simulated without other places. `part` is "forward"; the "first" forward, with
        the gathers of leaves that run beside it (all, if it opens the step); "ahead", the gathers of leaves that come
        before it; "backward"; the "last" backward, with the sums of gradients beside it; or a part of a split one:
        "inputs" or "weights"."""
        place = self.plan.stages[stage].place
        key = (self._first[stage], part, part in ("first", "ahead") and self._opens(stage))
        if key not in self._ran:
            rank = self.rank(place)
            if part in ("forward", "first", "ahead"):
                came, beside = self._leaves(stage) if part != "forward" else ((), ())
                if part == "ahead":
                    rank.gather(travelling(came))
                else:
                    rank.do(at_reading(came), "sync")
                    rank.gather(beside)
                rank.forward(self.turns[stage] if part != "ahead" else ())
            else:
                buckets = [
                    bucket
                    for bucket in self.syncs[place].gradient_buckets(self.views[stage], self.turns[stage])
                    if part != "inputs" and (bucket.each or part == "last")
                ]
                during = "backward" if part == "last" else part
                if part != "inputs":  # before sums of these gradients
                    rank.local(self.adding(stage), during)
                rank.backward(self.turns[stage], buckets, during)
                rank.finish(buckets)
            self._ran[key] = rank.run()
        return self._ran[key]

    def rank(self, place: int) -> Rank:
        """A new rank of a place, without tasks."""
        return Rank(self.pieces[place])

    def whole(self) -> Ran:
        """The step of a plan without a pipeline: forward, backward with its sums, optimizer."""
        (view,), (turns,) = self.views, self.turns
        rank, buckets = self.rank(0), self.syncs[0].gradient_buckets(view, turns)
        rank.gather(self.syncs[0].leaf_buckets(view, turns))
        rank.forward(turns)
        if self.training:
            rank.backward(turns, buckets, at_once=True)
            rank.finish(buckets)
            rank.local(self.optimizer(0), "optimizer")
        return rank.run()

    def block_s(self, stage: int) -> float:
        """Seconds of the last block of a stage, and of what comes behind it, in its first forward."""
        ran = self.ran(stage, "first")
        last = next((mark.instance for mark in reversed(ran.marks) if mark.instance >= 0), -1)
        begins = (begin for begin, mark in zip(ran.timeline.begin_s, ran.marks, strict=True) if mark.instance == last)
        return ran.length_s - min(begins, default=ran.length_s)

    def _opens(self, stage: int) -> bool:
        """Whether a stage waits for all of its leaves: the first one of a step; and where compute and communication
        share cores, so that leaves hide under nothing, every one."""
        return not stage or self.pieces[self.plan.stages[stage].place].prices.overlap == 0.0

    def _leaves(self, stage: int) -> tuple[Sequence[LeafBucket], Sequence[LeafBucket]]:
        """The gathers of leaves before the first forward of a stage, and those that run beside it."""
        view, turns = self.views[stage], self.turns[stage]
        found = self.syncs[self.plan.stages[stage].place].leaf_buckets(view, turns)
        first = next(((turn.unit, turn.instance) for turn in turns if turn.instance >= 0), None)
        return ((), found) if self._opens(stage) else by_first_forward(found, (None, first))

    def sums(self, stage: int) -> Sums:
        """The sums of the gradients of one of several stages, once per step."""
        key = self._first[stage]
        if key not in self._sums:
            place, whole = self.plan.stages[stage].place, self.ran(stage, "last")
            buckets = self.syncs[place].gradient_buckets(self.views[stage], self.turns[stage])
            rank = self.rank(place)
            rank.finish([bucket for bucket in buckets if not bucket.each])
            alone, last = rank.run(), whole.begun
            lead_s, left_s = min(whole.sums, default=(0.0, 0.0))[0], max((end for _, end in whole.sums), default=0.0)
            copies_s = whole.compute_s - last.compute_s
            self._sums[key] = Sums(alone, last, lead_s, max(0.0, left_s - last.length_s), copies_s)
        return self._sums[key]

    def optimizer(self, place: int) -> Piece:
        """The optimizer's step over what a rank of `place` holds."""
        here = self.plan.stages_on(place)
        prices, nodes = self.pieces[place].prices, self.plan.nodes
        return Piece(
            self.plan.optimizer,
            "compute",
            COMPUTE,
            sum(share * prices.update_s(op, options(nodes[op.name])) for op, share in self._held(here)),
        )

    def adding(self, stage: int) -> Piece:
        """Accumulating the gradients of one microbatch: (n - 1) / n of the additions, as the average over n
        microbatches, of which the first adds nothing."""
        prices, nodes, count = (
            self.pieces[self.plan.stages[stage].place].prices,
            self.plan.nodes,
            self.plan.microbatches,
        )
        seconds = sum(share * prices.adding_s(op, options(nodes[op.name])) for op, share in self._held([stage]))
        return Piece("adding gradients up", "compute", COMPUTE, seconds * (count - 1) / count)

    def _held(self, stages: Sequence[int]) -> Iterator[tuple[Op, float]]:
        """The parameters that `stages` of one place hold, each with the share of its instances that they have."""
        blocks: dict[str, int] = {}
        tops: dict[str, None] = {}
        for view in (self.views[i] for i in stages):
            tops |= dict.fromkeys(view.held)
            for scope, (first, stop) in view.blocks.items():
                blocks[scope] = blocks.get(scope, 0) + stop - first
        for op in self.program.ops.values():
            if op.role == "param" and (op.scope in blocks or op.name in tops):
                yield op, blocks[op.scope] / self.program.runs[op.scope].count if op.scope else 1.0

    def send_s(self, stage: int, *, gradients: bool = False) -> float:
        """Seconds to send the outputs of a stage for one microbatch to the next stage, or with `gradients` their
        gradients back."""
        ops, refs = self.program.ops, self.views[stage].sends
        if not refs or self.plan.places == 1:
            return 0.0
        link = self.places.link(self.plan.stages[stage].place, self.plan.stages[stage + 1].place)
        moving: Sequence[Ref] = [ref for ref in refs if not gradients or ops[ref[0]].call.outs[ref[1]].grad]
        return sum(
            collective_s("send", local_share(self.plan, ref) * self.program.bytes_of(ref), link) for ref in moving
        )
