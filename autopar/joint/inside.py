"""Pipelines whose stages end inside of blocks. Called by joint.choice.

The search cuts a model between its blocks, which leaves stages uneven by up to one block. So the cuts of the result may
move into blocks, all at the same point: where as much is sent as between two blocks, as near to the middle of the
block's work as can be. The halves have the layouts of the block. What they cost is taken from
a graph in which one block of each run is divided; with these costs the cuts are shifted (pipeline.cut_search). Then
the blocks with a cut inside are divided, and the result is laid out as all others are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

from autopar.bestfirst import PRICE_TOLERANCE
from autopar.errors import InfeasibleError
from autopar.joint.parted_graph import fixed, kept_in_part
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_problems import Chosen
from autopar.joint.stage_times import Laying, one_time, pieces_send_s
from autopar.joint.staging import Found, lay
from autopar.pipeline.balance import balance
from autopar.pipeline.cut_search import Shifting
from autopar.pipeline.filling import Cuts
from autopar.pipeline.in_flight import place_bytes
from autopar.pipeline.rerun_counts import fitted
from autopar.pipeline.stage_views import views
from autopar.pipeline.stretches import Pieces
from autopar.pipeline.units import Unit
from autopar.problem.build import Decisions
from autopar.rules.language import Option, Use
from autopar.text import seconds
from passes.divide_block import points
from passes.fold_repeats import body_of, is_folded
from passes.part_runs import Parts, divided_at

HARDLY = 1e-3  # relative to the step: a block stays whole if dividing it gains less
STAGE_S = 0.06  # seconds of the search per stage (0.03 to 0.11 for 12 to 128 stages of 8B, 70B and 405B)

Blocks = Mapping[str, Mapping[int, str]]
"""Of each run of blocks, the instances that are divided, and the operator behind which."""


def cut_inside(context: SearchContext, found: Found) -> Found:
    """`found`, or the same with stages that end inside of blocks, where that is faster and fits. Its places are laid
    out alike."""
    middles, timer = _middles(context), context.timer
    if found.table.stages == 1 or context.request.cluster.device.alone > 1 or not middles:
        return found
    if timer.skips(timer.ends_at - takes_s(found) / 2):
        return found
    context.request.say(f"{found.shape}: cuts inside of blocks")
    with suppress(InfeasibleError):
        halved = _Halved.of(context, found, middles)
        bounds = halved.cut(found)
        blocks = halved.divided(bounds, middles)
        if blocks:
            made = _laid(context, found, blocks, halved.among(bounds))
            if made.step_s < found.step_s * (1 - PRICE_TOLERANCE):
                note = f"stages end inside of blocks; with cuts between blocks a step takes {seconds(found.step_s)}"
                return replace(made, plan=replace(made.plan, notes=(note,)))
    return found


def takes_s(found: Found) -> float:
    """About how many seconds `cut_inside` takes."""
    return STAGE_S * found.table.stages if found.table.stages > 1 else 0.0


def _middles(context: SearchContext) -> dict[str, str]:
    """Of each run whose blocks can be divided, the operator behind which."""
    program, found = context.whole.program, dict[str, str]()
    for scope, body in ((str(node.target), body_of(node)) for node in context.gm.graph.nodes if is_folded(node)):
        work = {op.node.name: op.flops + op.backward_flops for op in program.ops.values() if op.scope == scope}
        most = sum(program.bytes_of(ref) for ref in program.runs[scope].carried)
        able = {
            name: abs(sum(work.get(op, 0.0) for op in point.front) - sum(work.values()) / 2)
            for name, point in points(body).items()
            if sum(program.bytes_of((f"{scope}/{value}", 0)) for value in (name, *point.passed)) == most
        }
        if able:
            found[scope] = min(able, key=able.__getitem__)
    return found


@dataclass(frozen=True, eq=False)
class _Halved:
    """The pieces of a model whose blocks are divided.

    units     of each piece, the number of the unit (SearchContext.units) that it is, or is a half of
    kinds     by kind of place: the costs
    """

    context: SearchContext
    units: Sequence[int]
    kinds: Sequence[Pieces]

    @staticmethod
    def of(context: SearchContext, found: Found, points: Mapping[str, str]) -> _Halved:
        """All halves cost what those of the last block of their run do. A first block whose input has no gradient,
        where later ones have one, is not laid out as they are, and stays whole. Raises InfeasibleError as `_chosen`."""
        program = context.whole.program
        late = {op.scope for op in program.ops.values() if op.late}
        there, parts, chosen = _chosen(
            context, found, {scope: {program.runs[scope].count - 1: at} for scope, at in points.items()}
        )
        at = {unit: number for number, unit in enumerate(there.units)}
        units: list[int] = []
        rows: list[int] = []
        for number, unit in enumerate(context.units):
            halves = unit.name in points and (unit.instance > 0 or unit.name not in late)
            names = list(parts[unit.name])[-2:] if halves else [unit.name]
            units += [number] * len(names)
            rows += [at[Unit(name, min(unit.instance, 0))] for name in names]
        kinds = [Pieces([own.costs[row] for row in rows], [own.again[row] for row in rows]) for own in chosen.pieces]
        return _Halved(context, units, kinds)

    @cached_property
    def _first(self) -> dict[int, int]:
        """Of each unit, and the end of the model, the number of its first piece."""
        return {number: at for at, number in reversed([*enumerate([*self.units, len(self.context.units)])])}

    def cut(self, found: Found) -> list[int]:
        """Where stages begin (Cuts.bounds): the better one of two cuts, shifted from that of `found` and from the most
        even one. Bounds go back between blocks where that takes hardly longer."""
        shifting = self._shifting(found)
        at, flying = shifting.at, shifting.flying
        starts = [self._as_found(found)]
        with suppress(InfeasibleError):
            room = [shifting.limits[place] for place in at]
            even = balance(shifting.pieces, found.table.flying, room, shifting.sends_s[:-1], [*shifting.barred], at)
            starts.append(fitted(shifting.pieces, even, at, flying, shifting.limits))
        ways = [shifting.shifted(cuts) for cuts in starts]
        best = ways[int(shifting.steps_s(ways).argmin())]
        while others := [*self._whole(best)]:
            steps_s = shifting.steps_s([best, *others])
            fewest = int(steps_s[1:].argmin())
            if not steps_s[1 + fewest] <= steps_s[0] * (1 + HARDLY):
                break
            best = others[fewest]
        return best.bounds

    def _whole(self, cuts: Cuts) -> Iterator[Cuts]:
        """The cuts in which one of the bounds inside of blocks is in front of its block, or behind it."""
        for stage, bound in enumerate(cuts.bounds):
            for other in (bound - 1, bound + 1) if self._is_inside(bound) else ():
                bounds = [*cuts.bounds[:stage], other, *cuts.bounds[stage + 1 :]]
                if all(a < b for a, b in itertools.pairwise([0, *bounds, len(self.units)])):
                    yield Cuts(bounds, cuts.again)

    def _as_found(self, found: Found) -> Cuts:
        """The cuts of `found`."""
        before, first = [0, *found.cuts.bounds], self._first
        return Cuts(
            [first[bound] for bound in before[1:]],
            [first[bound + again] - first[bound] for bound, again in zip(before, found.cuts.again, strict=True)],
        )

    def _shifting(self, found: Found) -> Shifting:
        """What shifts cuts of these pieces, with room for what the walk over `found` counts beyond its pieces."""
        table, ground, first = found.table, found.ground, self._first
        here = Laying(self.context, found.shape, table, ground, found.chosen, found.plan, whole=True)
        pieces = [self.kinds[ground.kinds[place]] for place in table.at]
        parts = self._as_found(found).parts(pieces)
        added = [place_bytes(table.of_place(place, parts), flying) for place, flying in enumerate(table.in_flight)]
        barred, sends_s = self.context.barred, pieces_send_s(here)
        return Shifting(
            pieces,
            table.in_flight,
            [
                limit - max(0.0, walked - nbytes)
                for limit, walked, nbytes in zip(ground.limits, found.places_bytes, added, strict=True)
            ],
            table.at,
            {
                *(first[at] for at in barred),
                *(
                    at
                    for at in range(1, len(self.units))
                    if self._is_inside(at) and {self.units[at], self.units[at] + 1} & {*barred}
                ),
            },
            frozenset(at for at, number in enumerate(self.units) if self.context.units[number].instance >= 0),
            [*(sends_s[number] for number in self.units), 0.0],
            partial(one_time, here, views(found.program, found.plan)),
            table.ends_all_s,
            table.actions,
        )

    def _is_inside(self, bound: int) -> bool:
        """Whether a bound is inside of a block."""
        return self.units[bound] == self.units[bound - 1]

    def _inside(self, bounds: Sequence[int]) -> list[int]:
        """The numbers of the units that one of the bounds is inside of."""
        return [self.units[bound] for bound in bounds if self._is_inside(bound)]

    def divided(self, bounds: Sequence[int], points: Mapping[str, str]) -> dict[str, dict[int, str]]:
        """The blocks that one of the bounds is inside of."""
        found: dict[str, dict[int, str]] = {}
        for unit in map(self.context.units.__getitem__, self._inside(bounds)):
            found.setdefault(unit.name, {})[unit.instance] = points[unit.name]
        return found

    def among(self, bounds: Sequence[int]) -> list[int]:
        """The bounds where only the blocks that they are inside of are divided."""
        inside = self._inside(bounds)
        return [
            self.units[bound] + sum(number < self.units[bound] for number in inside) + self._is_inside(bound)
            for bound in bounds
        ]


def _chosen(context: SearchContext, found: Found, blocks: Blocks) -> tuple[SearchContext, Parts, Chosen]:
    """The graph with these blocks divided, its parts, and the choices of `found` there. Raises InfeasibleError where
    the halves cannot have the layouts of the block."""
    parts = divided_at(context.gm, blocks)
    there = context.parted(parts)
    kept = {
        scope: names
        for scope in there.whole.program.runs
        for names in [kept_in_part(context, there, found.chosen, scope)]
        if names is not None
    }
    return (
        there,
        parts,
        fixed(there, found.shape, found.ground, _decisions(context, there, found), found.chosen, kept),
    )


def _laid(context: SearchContext, found: Found, blocks: Blocks, bounds: Sequence[int]) -> Found:
    """The choices of `found` laid out with these blocks divided and stages that begin at `bounds`. Raises
    InfeasibleError as `_chosen`, and where nothing fits."""
    there, parts, chosen = _chosen(context, found, blocks)
    made = lay(there, found.plan.strategy, found.shape, found.table, found.ground, chosen, whole=True, bounds=bounds)
    return replace(made, plan=replace(made.plan, parted=parts))


def _decisions(context: SearchContext, there: SearchContext, found: Found) -> Decisions:
    """One option per operator and axis: those of the block for its halves; what the rest of a block is fed has the
    layout in which it is made. Raises InfeasibleError where a block cannot be fed that."""
    chosen, program = found.chosen.model.decode(found.chosen.solution.choice), context.whole.program
    made: Decisions = {}
    for name, op in there.whole.program.ops.items():
        made[name] = chosen[there.origin(name)]
        if op.role == "port" and program.ops[there.origin(name)].role == "op":
            made[name] = tuple(
                _passing(there, found, name, axis, option.outs[0]) for axis, option in enumerate(made[name])
            )
    return made


def _passing(there: SearchContext, found: Found, port: str, axis: int, use: Use) -> Option:
    """The option of a port on one axis that takes and gives a value so."""
    able = there.planner(found.shape.microbatches).table(found.shape.mesh[axis], placed=False)[port]
    option = next((option for option in able if option.outs[0] == use), None)
    if option is None:
        raise InfeasibleError(f"{port} cannot be {use}")
    return option
