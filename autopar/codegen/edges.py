"""The reshards that a plan implies: one list, from which they are emitted, counted, explained and priced.

For every value and every distinct layout pair that its readers ask for there is one `Reshard`, shared by these readers.
Where a parameter rests whole on an axis and its readers leave partial gradients on it, the gradient is not reduced at
each use: such axes are the parameter's `sync` axes, reduced in buckets in the backward. On axes on which a parameter
rests cut and its readers see it whole (`problem.at_rest`), the leaf is gathered once per step, and its gradient is
partial until it is reduce-scattered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from autopar.errors import PlanError
from autopar.layout import NO_GRAD, Step, crosses, is_placed, parse, steps
from autopar.plan import NodePlan, Plan
from autopar.problem.at_rest import EACH
from autopar.problem.graph import Op, Program, Ref
from autopar.problem.pairs import LayoutPair
from autopar.problem.rerun import Rerun, check, rerun, saves_results
from autopar.rules.language import Option, Use

Spot = tuple[int, int]  # (axis, coordinate)


@dataclass(frozen=True, slots=True)
class Reshard:
    """One change of layout of the value `ref`, from `src` to `dst`.

    role      edge (between operators), feed (into a run of blocks), carry (from block to block), or sync (a
              parameter at rest to its leaf, and gradients back, in buckets)
    count     how often it runs per step
    weight    whether the value is a parameter
    saved     whether a reader's backward needs the value; False for vectors, and where a reader runs on some ranks
              only
    late      whether the value has no gradient in the first block of its run
    spared    whether in the first block no reader's backward needs the value
    replay    where its block is run again (problem.rerun): "again", "kept" or "skipped"; "" where the second run
              ends before it, or there is none
    each      whether gradients go back after every microbatch (sync)
    """

    ref: Ref
    src: LayoutPair
    dst: LayoutPair
    role: str
    scope: str
    count: int
    weight: bool
    saved: bool
    readers: tuple[str, ...]
    late: bool = False
    spared: bool = False
    replay: str = ""
    each: bool = False

    def regathers(self, sizes: tuple[int, ...]) -> bool:
        """Whether the gathered value is not kept for the backward, which gathers it again."""
        # a block that is run again gathers it then, and has it for the backward
        return not self.replay and self.gathers(sizes)

    def gathers(self, sizes: tuple[int, ...]) -> bool:
        """Whether it gathers a weight that the backward needs (a frozen weight, too)."""
        return self.saved and self.fetches(sizes)

    def fetches(self, sizes: tuple[int, ...]) -> bool:
        """Whether it gathers a weight at its use, so that the gather can begin earlier (runtime.prefetch)."""
        if any(map(is_placed, self.dst.value)):
            return False  # only the ranks that compute would gather again
        return self.weight and self.role != "sync" and any(s.kind == "all_gather" for s in self.forward(sizes))

    @property
    def in_first(self) -> Reshard:
        """The same reshard in the first block of a run."""
        dst = LayoutPair(self.dst.value, (NO_GRAD,) * len(self.dst.grad)) if self.late else self.dst
        return replace(self, dst=dst, saved=self.saved and not self.spared)

    @property
    def onward(self) -> Reshard:
        """The same reshard without a gradient."""
        none = (NO_GRAD,) * len(self.src.value)
        return replace(self, src=LayoutPair(self.src.value, none), dst=LayoutPair(self.dst.value, none))

    @property
    def back(self) -> Reshard:
        """The same reshard of the gradient alone; the value stays."""
        return replace(self, src=LayoutPair(self.dst.value, self.src.grad))

    @property
    def gradient(self) -> bool:
        """Whether a gradient flows back through it."""
        return self.src.has_grad and self.dst.has_grad

    def forward(self, sizes: tuple[int, ...]) -> tuple[Step, ...]:
        """The steps of the value, on a mesh of these `sizes`."""
        return steps(self.src.value, self.dst.value, sizes)

    def backward(self, sizes: tuple[int, ...]) -> tuple[Step, ...]:
        """The steps of the gradient; none where there is none."""
        return steps(self.dst.grad, self.src.grad, sizes) if self.gradient else ()


@dataclass(frozen=True)
class Edges:
    """All reshards of a plan, and the sync axes of each parameter."""

    reshards: tuple[Reshard, ...]
    sync: Mapping[Ref, tuple[int, ...]]
    reruns: Mapping[str, Rerun] = field(default_factory=dict)  # of the scopes that are run again
    # kept operators whose results are needed again as they are made
    as_made: Mapping[str, None] = field(default_factory=dict)

    def runs_again(self, op: Op) -> bool:
        """Whether an operator runs again in the backward."""
        return op.scope in self.reruns and op.name in self.reruns[op.scope].again

    def mark(self, op: Op) -> str:
        """The mark of an operator in a block that is run again: "keep" where its result is stored in the layout in
        which it is made, "skip" where it is not needed again (or only after a reshard, whose result is stored); ""
        where it runs again, or the block does not."""
        about = self.reruns.get(op.scope)
        if about is None or op.name not in {**about.kept, **about.skipped}:
            return ""
        if op.name in about.skipped:
            return "skip"
        return "keep" if op.name in self.as_made or saves_results(op) else "skip"

    def behind(self, plan: Plan) -> tuple[int, ...]:
        """The mesh axes that need a second process group: on them some collectives run in the background (gathers of
        weights, sums and scatters of gradients), and compute waits for others."""
        sizes, behind, waited = tuple(plan.mesh), set[int](), set[int]()
        for reshard in self.reshards:
            moved = {step.axis for step in (*reshard.forward(sizes), *reshard.backward(sizes)) if crosses(step, sizes)}
            (behind if reshard.role == "sync" or reshard.fetches(sizes) else waited).update(moved)
        behind.update(axis for axes in self.sync.values() for axis in axes)
        waited.update(axis for runs in plan.runs.values() for axis, run in enumerate(runs) if run)
        return tuple(sorted(axis for axis in behind & waited if sizes[axis] > 1))

    def between(self, ref: Ref, dst: LayoutPair, role: str = "edge", scope: str | None = None) -> Reshard | None:
        """The reshard from `ref` to `dst` that readers in `scope` share, or None where none is needed."""
        for reshard in self.reshards:
            if reshard.ref == ref and reshard.role == role and reshard.dst == dst and scope in (None, reshard.scope):
                return reshard
        return None


def edges(program: Program, plan: Plan) -> Edges:
    """Derive the reshards of `plan` for the graph that `program` was read from."""
    found: list[Reshard] = []
    reruns, as_made = reruns_of(program, plan), dict[str, None]()
    sync: dict[Ref, tuple[int, ...]] = {}
    for ref in (*program.readers, *(feed for feed in program.fed if feed not in program.readers)):
        rest, src = out_pair(plan, ref), given(program, plan, ref)
        if program.is_weight(ref) and rest.has_grad:
            axes = sync.setdefault((program.source(ref), 0), _sync_axes(rest, _in_the_end(program, plan, ref)))
            src = src.partial(axes)
            if program.ops[ref[0]].role == "param" and src != rest:
                found.append(_to_leaf(program, plan, ref, src))
        for (scope, dst), readers in _readers_by_layout(program, plan, ref).items():
            scope_rerun = reruns.get(scope)
            if scope_rerun and src.value == dst.value and any((op.name, i) in scope_rerun.reads for op, i in readers):
                as_made[ref[0]] = None
            # the gradient of what it makes is as its readers leave it
            follows = any(op.name in program.following for op, _ in readers)
            if needed(src, dst._replace(grad=src.grad) if follows else dst):
                found.append(_edge(program, plan, ref, src, dst, readers, scope_rerun))
    found += _fed(program, plan, sync)
    found += _carried(program, plan)
    return Edges(tuple(found), sync, reruns, as_made)


def _readers_by_layout(program: Program, plan: Plan, ref: Ref) -> dict[tuple[str, LayoutPair], list[tuple[Op, int]]]:
    """(scope, layout pair that is asked for) -> the readers of `ref`, each with the number of its operand. The readers
    of one entry share a reshard."""
    found: dict[tuple[str, LayoutPair], list[tuple[Op, int]]] = {}
    for op, operand in program.readers.get(ref, ()):
        found.setdefault((op.scope, in_pair(plan, op.name, operand)), []).append((op, operand))
    return found


def _to_leaf(program: Program, plan: Plan, ref: Ref, leaf: LayoutPair) -> Reshard:
    """The reshard of role sync of a parameter: from its layout at rest to that of its leaf, and gradients back."""
    producer, rest = program.ops[ref[0]], out_pair(plan, ref)
    return Reshard(
        ref,
        LayoutPair(rest.rest, rest.grad),
        leaf,
        "sync",
        producer.scope,
        producer.count,
        weight=True,
        saved=False,
        readers=(),
        each=EACH in plan.nodes[ref[0]].runs,
    )


def _edge(
    program: Program,
    plan: Plan,
    ref: Ref,
    src: LayoutPair,
    dst: LayoutPair,
    readers: list[tuple[Op, int]],
    scope_rerun: Rerun | None,
) -> Reshard:
    """The reshard of role edge that `readers`, all in one scope, share. `scope_rerun`: what of that scope runs again
    in the backward; None where nothing does."""
    on_some_ranks = any(beside(plan, op.name) for op, _ in readers)
    return Reshard(
        ref,
        src,
        dst,
        "edge",
        readers[0][0].scope,
        readers[0][0].count,
        program.is_weight(ref),
        saved=any(op.needs_again(operand) for op, operand in readers) and not on_some_ranks,
        readers=tuple(op.name for op, _ in readers),
        late=program.ops[ref[0]].late,
        spared=not any(op.needs_again(operand, first=True) for op, operand in readers),
        replay=_replay(scope_rerun, readers, ref, moves=src.value != dst.value) if scope_rerun else "",
    )


def _carried(program: Program, plan: Plan) -> list[Reshard]:
    """The reshards of the values that a block hands to the next block of its run."""
    found = []
    for run in program.runs.values():
        calls = program.ops[run.ports[0]].count // run.count  # of the whole run, per step
        for port, ref in zip(run.ports, run.carried, strict=False):
            src, dst = out_pair(plan, ref), in_pair(plan, port, 0)
            if needed(src, dst) and run.count > 1:
                found.append(
                    Reshard(
                        ref,
                        src,
                        dst,
                        "carry",
                        run.scope,
                        calls * (run.count - 1),
                        weight=False,
                        saved=False,
                        readers=(port,),
                        late=program.ops[ref[0]].late,
                    )
                )
    return found


def _fed(program: Program, plan: Plan, sync: Mapping[Ref, tuple[int, ...]]) -> list[Reshard]:
    """The reshards of values that are fed to runs of blocks; runs that want the same layout share one. A weight is fed
    in the layout that its other readers get."""
    asked: dict[tuple[Ref, LayoutPair], list[str]] = {}
    for feed, ports in program.fed.items():
        for port in ports:
            asked.setdefault((feed, in_pair(plan, port, 0)), []).append(port)
    outer = {port: program.ops[port].count // run.count for run in program.runs.values() for port in run.ports}
    found = []
    for (feed, dst), ports in asked.items():
        src = given(program, plan, feed)
        src = src.partial(sync.get((program.source(feed), 0), ())) if program.is_weight(feed) else src
        if needed(src, dst):
            found.append(
                Reshard(
                    feed,
                    src,
                    dst,
                    "feed",
                    program.ops[feed[0]].scope,
                    outer[ports[0]],
                    weight=False,
                    saved=False,
                    readers=tuple(ports),
                )
            )
    return found


def reruns_of(program: Program, plan: Plan) -> dict[str, Rerun]:
    """For each scope of `plan.remat`, which operators run again, are kept or are skipped (problem.rerun). Raises
    PlanError for blocks that cannot be run again."""
    check(program, plan.remat)
    for scope in plan.remat:
        placed = [op.name for op in program.ops.values() if op.scope == scope and beside(plan, op.name)]
        if placed:  # ranks would end at different tensors, some of them before a collective of all
            raise PlanError(f"blocks {scope} cannot be run again: {placed[0]} runs on one coordinate of an axis only")
    split = [op.name for op in program.ops.values() if op.role == "op" and any(plan.nodes[op.name].runs)]
    return {scope: rerun(program, scope, kept, split) for scope, kept in plan.remat.items()}


def spot_of(node: NodePlan) -> Spot | None:
    """The (axis, coordinate) on which alone the plan runs an Op; None where all ranks run it."""
    return next(
        ((axis, int(factor[2:-1])) for axis, factor in enumerate(node.factors) if factor.startswith("O(")), None
    )


def beside(plan: Plan, name: str) -> bool:
    """Whether an operator reads or makes a value that only one coordinate of an axis has. What its backward needs is
    then kept, since only some ranks would take part in gathering it again."""
    return any(
        is_placed(e) for text in (*plan.nodes[name].ins, *plan.nodes[name].outs) for e in parse(text.split("|")[0])
    )


def _replay(about: Rerun, readers: list[tuple[Op, int]], ref: Ref, *, moves: bool) -> str:
    """`Reshard.replay` of the reshard of `ref` for these `readers`, in a block that is run again; `moves`: whether the
    value changes its layout."""
    if any((op.name, operand) in about.reads for op, operand in readers):
        return "kept" if moves and ref[0] in about.kept else "again"
    return "skipped" if any(about.reached(op.name) for op, _ in readers) else ""


def out_pair(plan: Plan, ref: Ref) -> LayoutPair:
    """The layout pair in which the plan makes the value `ref`."""
    return LayoutPair.of(plan.nodes[ref[0]].outs[ref[1]])


def given(program: Program, plan: Plan, ref: Ref) -> LayoutPair:
    """The layout pair in which readers get the value `ref` and leave its gradient; of a weight that is gathered once
    per step, the gradient is partial on the gathered axes."""
    pair = out_pair(plan, ref)
    return pair.partial(pair.gathered) if program.is_weight(ref) else pair


def in_pair(plan: Plan, name: str, operand: int) -> LayoutPair:
    """The layout pair in which node `name` reads its operand number `operand`."""
    return LayoutPair.of(plan.nodes[name].ins[operand])


@lru_cache(maxsize=4096)  # walks through the memory of a step ask several times for each operator of each plan
def options(node: NodePlan) -> tuple[Option, ...]:
    """The options of a plan's node, one per mesh axis."""
    ins, outs = ([LayoutPair.of(text) for text in texts] for texts in (node.ins, node.outs))

    def uses(pairs: list[LayoutPair], axis: int) -> tuple[Use, ...]:
        return tuple(Use(pair.value[axis], pair.grad[axis]) for pair in pairs)

    return tuple(
        Option(factor, uses(ins, axis), uses(outs, axis), node.runs[axis], node.divides[axis])
        for axis, factor in enumerate(node.factors)
    )


def needed(src: LayoutPair, dst: LayoutPair) -> bool:
    """Whether a reader that wants `dst` cannot take `src` as it is."""
    return src.value != dst.value or (src.has_grad and dst.has_grad and src.grad != dst.grad)


def _in_the_end(program: Program, plan: Plan, ref: Ref) -> list[LayoutPair]:
    """The layout pairs asked of the weight `ref` by its final readers: through permutations and casts, and by runs of
    blocks that it is fed to."""
    read = [
        pair
        for op, operand in program.readers.get(ref, ())
        for pair in (
            _in_the_end(program, plan, (op.name, 0))
            if op.name in program.following
            else [in_pair(plan, op.name, operand)]
        )
    ]
    return read + [in_pair(plan, port, 0) for port in program.fed.get(ref, ())]


def _sync_axes(rest: LayoutPair, asked: list[LayoutPair]) -> tuple[int, ...]:
    """Axes on which the parameter rests whole and every reader that leaves a gradient leaves a partial one."""
    graded = [pair for pair in asked if pair.has_grad]
    return tuple(
        a
        for a, entry in enumerate(rest.rest)
        if graded and entry == "R" and all(p.value[a] == "R" and p.grad[a] == "P" for p in graded)
    )
