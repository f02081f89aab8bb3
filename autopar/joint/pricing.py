"""The price of a shape: its Problems are solved, the model is cut into stages and timed under every timetable of the
space, and as many blocks are run again as memory requires. Called by joint.explore."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from autopar.bestfirst import PRICE_TOLERANCE
from autopar.errors import InfeasibleError
from autopar.joint.floors import Floors
from autopar.joint.kept_results import Fuller, opens
from autopar.joint.place_kinds import Ground
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_problems import Chosen, Models
from autopar.joint.shapes import Shape
from autopar.joint.spaces import Space, Used
from autopar.joint.spare_room import Spare
from autopar.joint.staging import Found, lay
from autopar.joint.timetables import Timetable, runnable
from autopar.joint.walk_limits import GAINED
from autopar.joint.ways import Beaten, Glance, Overfull, even_s, fastest, first_that_fits, leaving_room
from autopar.named_strategies import FULL

TABLES = 3
"""Timetables for which it is tried what blocks that run again may keep, as each try costs a price: the fastest ones."""

OTHERS = 4
"""Other results of the glance at a shape that are laid out as they run at most."""

SHIFTED = 0.05
"""Relative: how much faster a pipeline may become by cuts that are shifted, which a glance does not try. Results of a
glance that are slower by more are not laid out."""

SHOWN = 0.02
"""Relative: how much longer a step must be if none of its sums of gradients hide for other layouts to be looked for,
with that Problem."""

ROOMY = 0.5
"""Share of its memory that a place may fill by the sum of its pieces for which it is taken to fit as it runs."""

HIDDEN = 0.1
"""Relative: how much faster than its linear price says a pipeline may be as other work overlaps sends."""


@dataclass(eq=False)
class Pricing:
    """Prices the shapes of one space.

    `proven` is a lower bound in seconds for each shape that was priced (an estimate for pipelines, `HIDDEN`, and where
    only some blocks are run again, Floors.eased). `roomy` is the step time of those for which more memory would not
    help (a lower bound of it where they are beaten). `laid` are all results of the glances, `spare` is the room that
    these leave.
    """

    context: SearchContext
    space: Space
    proven: dict[Shape, float] = field(default_factory=dict)
    roomy: dict[Shape, float] = field(default_factory=dict)
    laid: dict[Shape, list[Glance]] = field(default_factory=dict)
    spare: dict[Shape, Spare] = field(default_factory=dict)
    _opened: dict[tuple[int, str, tuple[int, ...]], Fuller] = field(default_factory=dict)

    def glance(self, shape: Shape, cutoff_s: float, known_s: float = math.inf) -> Found:
        """A quick result: the best of all levels of rematerialisation that memory makes worth trying, and what is best
        kept of blocks that are run again where it may become faster than `known_s` by that. One that is near `known_s`
        and does not fit as it runs is looked for again with as much room left (joint.spare_room). Raises Beaten where
        nothing is as fast as `cutoff_s`, InfeasibleError where nothing fits."""
        found, proven_s = self._looked(shape, cutoff_s, known_s), self.proven[shape]
        if shape in self.spare or found.filled < ROOMY or found.step_s >= known_s * GAINED:
            return found
        if (spare := Spare.of(found)) is None:
            return found
        self.spare[shape], before = spare, self.laid.pop(shape)
        try:
            return self._looked(shape, cutoff_s, known_s)
        except Beaten:
            raise
        except InfeasibleError:  # other choices may still fit as they run
            self.spare[shape], self.laid[shape] = Spare(), before
            return found
        finally:
            self.proven[shape] = proven_s  # of all that fits; the second look proves something of less room

    def _looked(self, shape: Shape, cutoff_s: float, known_s: float) -> Found:
        """As `glance`, of what leaves the room that is known to be needed."""
        tables = self.tables(shape)
        bounds: list[float] = []
        best: Found | None = None
        failed = InfeasibleError("")
        for level in self.levels:
            if best is not None and best.filled < FULL:
                break  # not short of memory
            try:
                self.floors.check_memory(shape, level)
                self.floors.check_step(shape, level, cutoff_s, bounds)
                found = self.price(shape, tables, level, exact=False, cutoff_s=cutoff_s, bounds=bounds)
                cutoff_s = min(cutoff_s, found.step_s)
            except InfeasibleError as error:
                failed = error if not isinstance(failed, Beaten) else failed
                if isinstance(error, Beaten) and not error.full:
                    self._note_roomy(shape, level, error.bound_s)
                    break
                continue
            if found.filled < FULL:
                self._note_roomy(shape, level, found.step_s)
            best = found if best is None or found.step_s < best.step_s else best
        self.proven[shape] = min(bounds, default=math.inf)
        if best is None:
            raise failed
        if self._runs_again(best) and self._roomy_s(best) < known_s:
            best = self._with_other_results_kept(best)
        self.proven[shape] = min(self.proven[shape], best.step_s)
        return best

    def _with_other_results_kept(self, found: Found) -> Found:
        """`found`, or the same with other results kept of the blocks that it runs again, where that is faster."""
        way = found.table, found.ground
        made = self._open(found.chosen).fastest(lambda chosen: self._estimated(found.shape, way, chosen))
        made = made and self._estimated(found.shape, way, made.chosen, shifts=True)
        return found if made is None or made.step_s >= found.step_s else made

    def _roomy_s(self, found: Found) -> float:
        """Seconds of a step of the same choices if memory had room for all results."""
        roomy = replace(found.ground, limits=(math.inf,) * len(found.ground.limits))
        return self._estimated(found.shape, (found.table, roomy), found.chosen).step_s

    def _open(self, chosen: Chosen) -> Fuller:
        """What blocks may keep under the choices of `chosen`, found once for the glance and the exact solution."""
        key = id(chosen.models), chosen.level, chosen.solution.choice
        if key not in self._opened:
            self._opened[key] = Fuller.of(chosen, self.context.whole)
        return self._opened[key]

    def _ways_with_other_results_kept(self, shape: Shape, chosen: Chosen) -> Iterator[Glance]:
        """The same choices with other results kept, under the TABLES timetables that are fastest with nothing kept."""
        opened = self._open(chosen)

        def laid(way: tuple[Timetable, Ground]) -> Callable[[Chosen], Found]:
            return lambda chosen: self._estimated(shape, way, chosen)

        least: list[tuple[float, int, tuple[Timetable, Ground]]] = []
        for way in itertools.product(self.tables(shape), self.context.grounds(shape)):
            with suppress(InfeasibleError):
                least.append((laid(way)(opened.keeping(opened.nothing)).step_s, len(least), way))
        for _, _, way in sorted(least)[:TABLES]:
            if (made := opened.fastest(laid(way))) is not None:
                yield Glance(made.step_s, *way, made.chosen)

    def _estimated(self, shape: Shape, way: tuple[Timetable, Ground], chosen: Chosen, *, shifts: bool = False) -> Found:
        """`chosen` laid out by estimates (staging.lay without `whole`), with the room left that is known to be needed;
        `shifts` as there."""
        table, ground = way
        room = self._spare(shape).left(ground, table)
        return replace(lay(self.context, self.space.name, shape, table, room, chosen, shifts=shifts), ground=ground)

    def _spare(self, shape: Shape) -> Spare:
        """The room that is known to be needed on `shape`."""
        return self.spare.get(shape, Spare())

    def _runs_again(self, found: Found) -> bool:
        """Whether it runs blocks again, and the request leaves open what these keep."""
        return opens(found, self.context.whole)

    def _note_roomy(self, shape: Shape, level: str, step_s: float) -> None:
        if level == self.levels[0]:
            self.roomy[shape] = step_s

    def exact(self, found: Found) -> Found | None:
        """The best plan of a shape, laid out as it runs; None where nothing fits.

        Candidates are the exact solution, the glance's `found`, and as long as they promise as much as the best so far,
        or may once their cuts are shifted, other results of the glance and the same with other results kept. Where none
        of them fits, the fastest of solutions with more blocks run again, under another timetable, and of less room.
        Once time is up, and its grace, the first two of them are enough.
        """
        best: Found | None = None
        late = partial(self.context.timer.skips, begun=True)
        price = partial(self.price, found.shape, exact=True, late=late)
        with suppress(InfeasibleError):
            best = price([found.table], found.level, models=found.chosen.models)
        solved = best

        def others() -> Iterator[Glance]:
            yield Glance(found.step_s, found.table, found.ground, found.chosen)
            if best is not None and late():
                return
            own = found.table, found.level, found.chosen.models
            ways = [
                other
                for other in self.laid.get(found.shape, [])
                if (other.table, other.chosen.level, other.chosen.models) != own
            ]
            ways += self._kept_otherwise(found, solved)
            yield from sorted(ways, key=lambda way: way.step_s)[:OTHERS]

        known = {(best.table, best.ground.kinds, *best.chosen.key)} if best is not None else set()
        for number, other in enumerate(others()):
            if (other.table, other.ground.kinds, *other.chosen.key) in known:
                continue
            if best is not None and (
                best.step_s <= other.step_s * (1 + PRICE_TOLERANCE if other.table.stages == 1 else 1 - SHIFTED)
                or (number and late())
            ):
                break
            with suppress(InfeasibleError):
                as_it_is = self.laid_exactly(found.shape, other.table, other.ground, other.chosen)
                best = as_it_is if best is None or as_it_is.step_s < best.step_s else best
        if best is not None:
            return best
        deeper = self.levels[self.levels.index(found.level) + 1 :]
        tables = [table for table in self.tables(found.shape) if table != found.table]
        ways = (
            lambda: first_that_fits(price, [found.table], deeper),
            lambda: first_that_fits(price, tables, dict.fromkeys((found.level, *self.levels))),
            lambda: leaving_room(lambda spare_bytes: price([found.table], found.level, spare_bytes=spare_bytes)),
        )
        with suppress(InfeasibleError):
            best = fastest(ways, lambda solve: solve(), lambda solve: 0.0, late)
        return best

    def _kept_otherwise(self, found: Found, exact: Found | None) -> Iterator[Glance]:
        """Every distinct solution that was found on a shape, with other results kept, where blocks are run again for
        want of memory."""
        if not any(self._runs_again(each) for each in (found, exact) if each is not None):
            return
        seen = [
            *([] if exact is None else [exact.chosen]),
            found.chosen,
            *(way.chosen for way in self.laid.get(found.shape, ())),
        ]
        for chosen in {id(each.solution): each for each in reversed(seen)}.values():
            if exact is not None and self.context.timer.skips(begun=True):
                return
            yield from self._ways_with_other_results_kept(found.shape, chosen)

    def price(
        self,
        shape: Shape,
        tables: list[Timetable],
        level: str,
        *,
        exact: bool,
        cutoff_s: float = math.inf,
        bounds: list[float] | None = None,
        models: Models | None = None,
        each: bool = False,
        spare_bytes: float = 0.0,
        late: Callable[[], bool] = lambda: False,
    ) -> Found:
        """The best result under `tables`, with choices of `models`: left out, of all there are, and under timetables
        that take the backward apart also of those that let them; `each` and `spare_bytes` as SearchContext.solve has
        them. The bound of the shape at this level is appended to `bounds`. Once `late`, the first that fits is enough.
        Raises InfeasibleError where nothing fits, Overfull where only what runs does not, Beaten where nothing is as
        fast as `cutoff_s`."""
        if not tables:
            raise InfeasibleError(f"no schedule runs {shape.microbatches} microbatches on {shape.places} places")
        spare_bytes = max(spare_bytes, self._spare(shape).mean_bytes(shape.places))
        priced = partial(self._priced, shape, level=level, exact=exact, each=each, spare_bytes=spare_bytes, late=late)
        best = priced(models or self.models(shape), tables, cutoff_s=cutoff_s, bounds=bounds)
        splitting = [table for table in tables if table.schedule.splits_backward]
        # at a glance, one choice was tried
        if models is None and splitting and (exact or not best.chosen.separable) and not late():
            with suppress(InfeasibleError):
                taken_apart = priced(
                    best.chosen.models.separable,
                    splitting,
                    cutoff_s=min(cutoff_s, best.step_s),
                    start=best.chosen.solution.choice,
                )
                best = taken_apart if taken_apart.step_s < best.step_s else best
        return best

    def _priced(
        self,
        shape: Shape,
        models: Models,
        tables: list[Timetable],
        *,
        level: str,
        exact: bool,
        cutoff_s: float,
        each: bool,
        spare_bytes: float,
        late: Callable[[], bool],
        bounds: list[float] | None = None,
        start: tuple[int, ...] | None = None,
    ) -> Found:
        """As `price`, of choices made by `models` for the timetable that keeps least in memory; `start`, `each` and
        `spare_bytes` as SearchContext.solve has them."""
        least = min(tables, key=lambda t: (t.kept, t.length))
        # a bound under the timetable that keeps least, scaled by lengths, holds for the shortest, with no more room
        alone, shortest = shape.places == 1, min(table.length for table in tables)
        slack = least.length / shortest / self.floors.eased(shape, level) * (1 + HIDDEN * (not alone))
        solve = partial(self.context.solve, models, least, level, each=each, spare_bytes=spare_bytes)
        chosen = solve(exact=exact, cutoff_s=cutoff_s * slack, start=start)
        proven_s = chosen.bound_s / slack
        if bounds is not None:
            bounds.append(proven_s)
        if proven_s >= cutoff_s:
            room_bytes = self.context.mean_bytes(shape.places) - spare_bytes
            raise Beaten(proven_s, full=chosen.counted_bytes >= FULL * room_bytes)
        tried = [chosen]
        if alone and models.sums and not late():  # all passes overlap sums in one Problem, none in the other
            tried.append(solve(exact=exact, beside=False))
        lay_out = self.laid_exactly if exact else self._glanced

        def fastest_of(tried: Sequence[Chosen]) -> Found:
            ways = itertools.product(sorted(tables, key=lambda t: t.length), self.context.grounds(shape), tried)
            return fastest(ways, lambda way: lay_out(shape, *way), lambda way: even_s(*way), late)

        try:
            best = fastest_of(tried)
        except InfeasibleError as error:
            if not exact or not error.missing_bytes:
                raise
            raise self.overfull(shape, tried, error) from error
        if not alone and models.sums and not late() and _disappoints(best, chosen, least):
            with suppress(InfeasibleError):
                other = fastest_of([solve(exact=exact, beside=False)])
                best = other if other.step_s < best.step_s else best
        if exact and models.sums and not alone and not each and not late():
            self._note_glances(best, chosen)
        return best

    def _glanced(self, shape: Shape, table: Timetable, ground: Ground, chosen: Chosen) -> Found:
        """`chosen` laid out by estimates, and noted in `laid`."""
        made = self._estimated(shape, (table, ground), chosen, shifts=True)
        self.laid.setdefault(shape, []).append(Glance(made.step_s, table, ground, chosen))
        return made

    def _note_glances(self, found: Found, chosen: Chosen) -> None:
        """Note `chosen` in `laid` under all timetables that may be faster: another one may hide its sums best."""
        for way in itertools.product(self.tables(found.shape), self.context.grounds(found.shape)):
            if even_s(*way, chosen) < found.step_s:
                with suppress(InfeasibleError):
                    self._glanced(found.shape, *way, chosen)

    def overfull(self, shape: Shape, tried: Sequence[Chosen], error: InfeasibleError) -> Overfull:
        """`error` of what runs of the solutions `tried`, with how much room others have to leave free."""
        unfilled_bytes = self.context.mean_bytes(shape.places) - max(chosen.counted_bytes for chosen in tried)
        return Overfull(error, unfilled_bytes + (error.missing_bytes or 0.0))

    def laid_exactly(self, shape: Shape, table: Timetable, ground: Ground, chosen: Chosen) -> Found:
        """`chosen` laid out as it runs, with as many blocks run again as memory requires, or with all of them where no
        smaller number is found to fit. Raises InfeasibleError where that does not fit either."""
        try:
            return lay(self.context, self.space.name, shape, table, ground, chosen, whole=True)
        except InfeasibleError:
            if chosen.all_again or chosen.level == self.levels[0]:
                raise
            return lay(self.context, self.space.name, shape, table, ground, replace(chosen, all_again=True), whole=True)

    @cached_property
    def floors(self) -> Floors:
        """What is known of shapes before they are priced."""
        return Floors(self.context, self.space.kinds)

    def floor_s(self, shape: Shape, level: str) -> float:
        """A lower bound in seconds on plans of `shape` with all blocks run again at `level` (Floors.step_s)."""
        return self.floors.step_s(shape, level)

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels at which blocks may be run again."""
        return self.context.whole.open_levels

    def models(self, shape: Shape) -> Models:
        """The Problems of a shape under the roles that the space has on its mesh. Raises InfeasibleError where those
        leave no choice."""
        return self.context.models(shape, self._used(shape))

    def _used(self, shape: Shape) -> Used:
        used = self.space.roles_on(shape.mesh)
        assert used is not None, "shapes of a space have meshes that the space can be on"
        return used

    def tables(self, shape: Shape, *, finely: bool = False) -> list[Timetable]:
        """The timetables of the space that can run `shape`; `finely` as in Kind.decided."""
        sizes = shape.places, shape.microbatches, self.context.alike
        decided = (each for kind in self.space.kinds for each in kind.decided(*sizes, finely=finely))
        pieces = self.context.pieces
        return [t for kind in decided if (t := runnable(kind, shape.places, shape.microbatches, pieces)) is not None]


def _disappoints(found: Found, chosen: Chosen, table: Timetable) -> bool:
    """Whether `found`, laid out from `chosen`, takes longer than its Problem, made for `table`, says of it, and that
    may be since its sums do not hide."""
    problem, choice = chosen.model.problem, chosen.solution.choice
    hidden_s, shown_s = problem.price(choice).time_s, problem.shown().price(choice).time_s
    return shown_s > hidden_s * (1 + SHOWN) and found.step_s > hidden_s * found.table.length / table.length
