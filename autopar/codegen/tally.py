"""How often the parts of a plan run on the ranks of one place in one step: what is priced, and what verification counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.codegen.edges import Reshard
from autopar.pipeline.microbatches import ancestors
from autopar.pipeline.stage_views import RESULTS, View, total_ref, views
from autopar.plan import Plan
from autopar.problem.graph import Program, Run


@dataclass(frozen=True)
class Tally:
    """The stages of `plan` on one `place`."""

    program: Program
    plan: Plan
    place: int = 0

    @cached_property
    def stages(self) -> list[View]:
        """The views of this place's stages."""
        return [view for view, stage in zip(views(self.program, self.plan), self.plan.stages, strict=True) if stage.place == self.place]

    @cached_property
    def before(self) -> dict[str, None]:
        """The operators that run once, over the whole batch, for the totals."""
        return ancestors(self.program, [total_ref(text) for text in self.plan.totals])

    def op(self, name: str) -> int:
        """Runs of one operator per step."""
        op = self.program.ops[name]
        if not self.plan.pipelined:
            return op.count
        if op.scope:
            return self.plan.microbatches * sum(self._instances(view, op.scope) for view in self.stages)
        return self.plan.microbatches * sum(name in view.ops for view in self.stages) + (name in self.before)

    def operators(self, name: str, *, again: bool) -> list[tuple[int, bool, bool]]:
        """The runs of one operator per step as (how many, whether in blocks that are run again, whether in the first block of its run); those that are
        run again, where operators like it are (`again`), are the first ones."""
        twice, first = self.again(name) if again else 0, self._firsts(name)
        both = min(twice, first)
        return [(both, True, True), (twice - both, True, False), (first - both, False, True), (self.op(name) - twice - first + both, False, False)]

    def _firsts(self, name: str) -> int:
        """How many runs of an operator are in the first block of a run."""
        if not self.plan.pipelined:
            return self.program.first_runs((name, 0))
        scope = self.program.ops[name].scope
        return self.plan.microbatches * sum(first == 0 < stop for first, stop in (view.blocks.get(scope, (0, 0)) for view in self.stages)) if scope else 0

    def reshards(self, found: Sequence[Reshard]) -> Iterator[tuple[Reshard, int, int]]:
        """Each reshard that runs here, as each stage has it, with its runs per step, and how many of them are of values that the first
        block of a run makes; of gradients that are summed over ranks, how many tensors there are."""
        for reshard in found:
            if not self.plan.pipelined:
                count = self.plan.again(self.plan.stages[0], reshard.scope, reshard.count)
                yield from self._parted(reshard, reshard.count, self.program.first_runs(reshard.ref), count)
                continue
            if any(name in self.before for name in reshard.readers):
                yield reshard, 1, 0
            for view in self.stages:
                runs = self._in_stage(view, reshard)
                if runs and reshard.each:
                    yield reshard.onward, runs, 0
                    yield reshard.back, runs * self.plan.microbatches, 0
                elif runs:
                    again = self.plan.microbatches * self._again(view, reshard.scope)
                    yield from self._parted(self._seen_by(view, reshard), runs, self._first(view, reshard), again)

    @staticmethod
    def _parted(reshard: Reshard, runs: int, first: int, again: int) -> Iterator[tuple[Reshard, int, int]]:
        """The runs in blocks that are run again, which are the first ones, apart from the others."""
        if not reshard.replay or again >= runs:
            yield reshard, runs, first
            return
        if again:
            yield reshard, again, min(first, again)
        yield replace(reshard, replay=""), runs - again, first - min(first, again)

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
        """The reshard with the readers that the stage has: whether one of them keeps the value decides about gathering again."""
        if reshard.scope or reshard.role != "edge":
            return reshard
        readers = tuple(name for name in reshard.readers if name in view.ops)
        ops = self.program.ops
        saved = reshard.saved and any(ref == reshard.ref and ops[name].needs_again(i) for name in readers for i, ref in enumerate(ops[name].operands))
        return replace(reshard, readers=readers, saved=saved)

    def sends(self) -> int:
        """Tensors that go from this place to the next stages in the forward of one step."""
        places = [stage.place for stage in self.plan.stages]
        leaving = [view for view in self.stages if view.index + 1 < len(places) and places[view.index + 1] != self.place]
        return self.plan.microbatches * sum(len(view.sends) for view in leaving)

    def shared(self) -> int:
        """Trained parameters of this place of which another place has a copy."""
        by_place: dict[int, dict[str, None]] = {}
        for view, stage in zip(views(self.program, self.plan), self.plan.stages, strict=True):
            by_place.setdefault(stage.place, {}).update(view.held)
        count = Counter(name for held in by_place.values() for name in held)
        ops = self.program.ops
        return sum(count[name] > 1 and ops[name].role == "param" and bool(ops[name].node.meta.get("requires_grad", True))
                   for name in by_place.get(self.place, {}))

    def _instances(self, view: View, scope: str) -> int:
        first, stop = view.blocks.get(scope, (0, 0))
        return stop - first

    def _in_stage(self, view: View, reshard: Reshard) -> int:
        ops, micro = self.program.ops, self.plan.microbatches
        if reshard.role == "sync":
            scope = ops[reshard.ref[0]].scope
            return self._instances(view, scope) if scope else int(reshard.ref[0] in view.held)
        if reshard.role == "carry":
            run = self._fed(reshard.readers[0])
            return micro * (self._instances(view, run.scope) - (view.blocks[run.scope][0] == 0)) if run.scope in view.blocks else 0
        if reshard.role == "feed":
            return micro * any(self._is_fed(view, port) for port in reshard.readers)
        if reshard.scope:
            return micro * self._instances(view, reshard.scope)
        results = {op.name for _, op in view.results}
        given = {name for name, index in view.given if all((name, i) in view.given for i in range(len(ops[name].call.outs)))}
        return micro * any((name in view.ops and name not in given) or (ops[name].role in RESULTS and name in results)
                           for name in reshard.readers)

    def _fed(self, port: str) -> Run:
        """The run of blocks that a placeholder belongs to."""
        return self.program.runs[self.program.ops[port].scope]

    def _is_fed(self, view: View, port: str) -> bool:
        """Whether a stage feeds a placeholder of a run: states of blocks where the run begins, all else wherever it has blocks of it."""
        run = self._fed(port)
        return run.scope in view.blocks and (view.blocks[run.scope][0] == 0 or run.ports.index(port) >= len(run.carried))
