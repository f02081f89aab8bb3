"""How often each operator and reshard runs on the ranks of one place in one step: for prices, and for verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from autopar.codegen.edges import Reshard
from autopar.layout import dim_of, is_shard
from autopar.pipeline.microbatches import ancestors
from autopar.pipeline.stage_views import RESULTS, View, total_ref, views
from autopar.plan import Plan
from autopar.problem.graph import Program, Ref, Run
from passes import facts


class Moved(NamedTuple):
    """A reshard as a place runs it: `runs` times per step, `first` of them on values that the first block of a run
    makes. Each run is on one of the `parts` microbatches that the batch falls into, or on the whole batch (1)."""

    reshard: Reshard
    runs: int
    first: int
    parts: int = 1


class Ran(NamedTuple):
    """Runs of one operator per step, whether they are in blocks that are run again (`again`), and in the first block of
    its run (`first`); `parts` as of Moved."""

    runs: int
    again: bool
    first: bool
    parts: int = 1


@dataclass(frozen=True)
class Tally:
    """The stages of `plan` on one `place`."""

    program: Program
    plan: Plan
    place: int = 0

    @cached_property
    def stages(self) -> list[View]:
        """The views of this place's stages."""
        found = views(self.program, self.plan)
        return [found[number] for number in self.plan.stages_on(self.place)]

    @cached_property
    def before(self) -> dict[str, None]:
        """The operators that run once, over the whole batch, for the totals."""
        return ancestors(self.program, [total_ref(text) for text in self.plan.totals])

    def op(self, name: str) -> int:
        """Runs of one operator per step on a microbatch, or on the batch where that is not cut."""
        op = self.program.ops[name]
        if not self.plan.pipelined:
            return op.count
        if op.scope:
            return self.plan.microbatches * sum(self._instances(view, op.scope) for view in self.stages)
        return self.plan.microbatches * sum(name in view.ops and name not in self._given(view) for view in self.stages)

    def operators(self, name: str, *, again: bool) -> list[Ran]:
        """The runs of one operator per step, grouped by `Ran.again` and `Ran.first`. `again`: whether the operator runs
        again in blocks that do, which are the first ones of a run."""
        parts, twice, first = self.plan.microbatches, self.again(name) if again else 0, self._firsts(name)
        both = min(twice, first)
        return [
            Ran(both, again=True, first=True, parts=parts),
            Ran(twice - both, again=True, first=False, parts=parts),
            Ran(first - both, again=False, first=True, parts=parts),
            Ran(self.op(name) - twice - first + both, again=False, first=False, parts=parts),
            Ran(int(self.plan.pipelined and name in self.before), again=False, first=False),
        ]

    def _firsts(self, name: str) -> int:
        """How many runs of an operator are in the first block of a run."""
        if not self.plan.pipelined:
            return self.program.first_runs((name, 0))
        scope = self.program.ops[name].scope
        return (
            self.plan.microbatches
            * sum(first == 0 < stop for first, stop in (view.blocks.get(scope, (0, 0)) for view in self.stages))
            if scope
            else 0
        )

    def reshards(self, found: Sequence[Reshard]) -> Iterator[Moved]:
        """Each reshard that runs on this place, for each stage. For the role sync, `runs` is the number of tensors."""
        for reshard in found:
            if not self.plan.pipelined:
                count = self.plan.again(self.plan.stages[0], reshard.scope, reshard.count)
                yield from self._parted(reshard, reshard.count, self.program.first_runs(reshard.ref), count)
                continue
            if any(name in self.before for name in reshard.readers):
                yield Moved(reshard, 1, 0)
            for view in self.stages:
                runs = self._in_stage(view, reshard)
                if runs and reshard.role == "sync" and not view.grades(self.program.ops[reshard.ref[0]]):
                    yield Moved(reshard.onward, runs, 0)
                elif runs and reshard.each:
                    yield Moved(reshard.onward, runs, 0)
                    yield Moved(reshard.back, runs * self.plan.microbatches, 0)
                elif runs:
                    again = self.plan.microbatches * self._again(view, reshard.scope)
                    yield from self._parted(self._seen_by(view, reshard), runs, self._first(view, reshard), again)

    def _parted(self, reshard: Reshard, runs: int, first: int, again: int) -> Iterator[Moved]:
        """The runs of a reshard in blocks that are run again (the first `again` ones), and those in other blocks,
        separately."""
        parts = self.plan.microbatches
        if not reshard.replay or again >= runs:
            yield Moved(reshard, runs, first, parts)
            return
        if again:
            yield Moved(reshard, again, min(first, again), parts)
        yield Moved(replace(reshard, replay=""), runs - again, first - min(first, again), parts)

    def bytes_of(self, ref: Ref, parts: int) -> float:
        """Bytes of the value `ref` on all ranks of the place together, in one of `parts` microbatches."""
        return self.program.bytes_of(ref) / (1 if self._cut_dim(ref) is None else parts)

    def sizes_of(self, ref: Ref, parts: int) -> tuple[int, ...]:
        """The sizes of the whole value `ref` in one of `parts` microbatches."""
        cut, sizes = self._cut_dim(ref), self.program.ops[ref[0]].call.outs[ref[1]].sizes
        return tuple(size // parts if dim == cut else size for dim, size in enumerate(sizes))

    def _cut_dim(self, ref: Ref) -> int | None:
        """The dim of a value that microbatches cut, None where all have the whole of it or parts of a sum."""
        entries = self.plan.nodes[ref[0]].micro
        return dim_of(entries[ref[1]]) if entries and is_shard(entries[ref[1]]) else None

    def again(self, name: str) -> int:
        """Runs of one operator in blocks that are run again in the backward."""
        op = self.program.ops[name]
        if not op.scope:
            return 0
        if not self.plan.pipelined:
            return self.plan.again(self.plan.stages[0], op.scope, op.count)
        return self.plan.microbatches * sum(self._again(view, op.scope) for view in self.stages)

    def _again(self, view: View, scope: str) -> int:
        """How many instances of a run are run again in a stage."""
        return self.plan.again(self.plan.stages[view.index], scope, self._instances(view, scope)) if scope else 0

    def _first(self, view: View, reshard: Reshard) -> int:
        """The runs in this stage of a reshard whose value the first block of a run makes."""
        scope = self.program.ops[reshard.ref[0]].scope
        if not scope or reshard.role == "sync":
            return 0
        start, stop = view.blocks.get(scope, (0, 0))  # a stage may read what blocks of another one made
        reader = 1 if reshard.role == "carry" else 0
        return self.plan.microbatches * (start <= reader < stop)

    def _seen_by(self, view: View, reshard: Reshard) -> Reshard:
        """The reshard with only the readers in this stage, and `saved` for these: it decides whether the stage gathers
        again."""
        if reshard.scope or reshard.role != "edge":
            return reshard
        readers = tuple(name for name in reshard.readers if name in view.ops)
        ops = self.program.ops
        saved = reshard.saved and any(
            ref == reshard.ref and ops[name].needs_again(i)
            for name in readers
            for i, ref in enumerate(ops[name].operands)
        )
        return replace(reshard, readers=readers, saved=saved)

    def sends(self) -> list[Ref]:
        """The values that this place sends to others for each microbatch: outputs to next stages, and gradients of
        received values, listed as these values."""
        places, ops = [stage.place for stage in self.plan.stages], self.program.ops
        found: list[Ref] = []
        for view in self.stages:
            if view.index + 1 < len(places) and places[view.index + 1] != self.place:
                found += view.sends
            if view.index and places[view.index - 1] != self.place:
                found += [(name, number) for name, number in view.receives if ops[name].call.outs[number].grad]
        return found

    def shared(self) -> list[str]:
        """The operators of trained parameters of this place of which another place has a copy."""
        by_place: dict[int, dict[str, None]] = {}
        for view, stage in zip(views(self.program, self.plan), self.plan.stages, strict=True):
            by_place.setdefault(stage.place, {}).update(view.held)
        count = Counter(name for held in by_place.values() for name in held)
        return [
            name
            for name in by_place.get(self.place, {})
            if count[name] > 1 and facts.is_trained(self.program.ops[name].node)
        ]

    def _given(self, view: View) -> set[str]:
        """The operators that a stage does not run, since all their results are totals, which are computed before."""
        return {
            name
            for name, _ in view.given
            if all((name, i) in view.given for i in range(len(self.program.ops[name].call.outs)))
        }

    def _instances(self, view: View, scope: str) -> int:
        first, stop = view.blocks.get(scope, (0, 0))
        return stop - first

    def _in_stage(self, view: View, reshard: Reshard) -> int:
        """How often per step a reshard runs in one stage; of role sync, the number of tensors."""
        ops, micro = self.program.ops, self.plan.microbatches
        if reshard.role == "sync":
            scope = ops[reshard.ref[0]].scope
            return self._instances(view, scope) if scope else int(reshard.ref[0] in view.held)
        if reshard.role == "carry":
            run = self._fed(reshard.readers[0])
            return (
                micro * (self._instances(view, run.scope) - (view.blocks[run.scope][0] == 0))
                if run.scope in view.blocks
                else 0
            )
        if reshard.role == "feed":
            return micro * any(self._is_fed(view, port) for port in reshard.readers)
        if reshard.scope:
            return micro * self._instances(view, reshard.scope)
        results = {op.name for _, op in view.results}
        given = self._given(view)
        return micro * any(
            (name in view.ops and name not in given) or (ops[name].role in RESULTS and name in results)
            for name in reshard.readers
        )

    def _fed(self, port: str) -> Run:
        """The run of blocks that a placeholder belongs to."""
        return self.program.runs[self.program.ops[port].scope]

    def _is_fed(self, view: View, port: str) -> bool:
        """Whether a stage feeds a placeholder of a run: states of blocks where the run begins, all else wherever it has
        blocks of it."""
        run = self._fed(port)
        return run.scope in view.blocks and (
            view.blocks[run.scope][0] == 0 or run.ports.index(port) >= len(run.carried)
        )
