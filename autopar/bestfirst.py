"""The free search over all meshes: a first look at each, what is nearest to the best is honed, and what promises to be better is solved, the most promising first.

A look and what is made of it are apart (`first_look`, `Look.finished`): where memory is short, blocks run again and pipelines are looked at before anything is solved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from autopar.errors import InfeasibleError
from autopar.partly import filled
from autopar.planner import Candidate, Planner
from autopar.recipes.free import space, unfolded
from autopar.search import ilp
from autopar.text import times
from autopar.timer import Timer

Mesh = tuple[int, ...]

GLANCE_S = 2.0  # seconds for the first look at a mesh
HONED = 1.1  # times the fastest: what is farther off does not become the fastest by descent
MOST_HONED = 3  # meshes
FAR = 4  # times the least work: what takes longer tells nothing of what there is
WINS = 0.1  # relative: stages that are so much faster at first sight win in the end
CLOSE = 0.01  # relative: prices are less exact than this


@dataclass(eq=False)
class Elsewhere:
    """What plans of several stages come to. `ask` gives the seconds of one, given those of the best plan so far, or of that plan; it is asked
    once, before anything is solved to the end, and nothing is solved that does not promise better than `seconds`. `search` gives those of the best one; `tell` is told those of the
    best plan of all once every mesh was looked at or stages were asked for, and whenever it is better."""

    ask: Callable[[float], float]
    search: Callable[[float], float] = lambda known_s: math.inf
    tell: Callable[[float], None] = lambda known_s: None
    seconds: float = math.inf
    done: bool = False

    @property
    def waits(self) -> bool:
        """Whether there are such plans, and the best of them is yet to be searched for."""
        return not self.done and self.seconds < math.inf

    def asked(self, known_s: float) -> float:
        """The seconds, known from now on, and told: where nothing else is near, this is the first answer there is."""
        if math.isinf(self.seconds):
            self.seconds = self.ask(known_s)
            self.tell(min(known_s, self.seconds))
        return self.seconds

    def searched(self, alone_s: float) -> float:
        """The seconds, of the best one where they promise to be far below `alone_s`, those of the best plan of one stage so far."""
        if not self.done and self.seconds < alone_s * (1 - WINS):
            self.done, self.seconds = True, min(self.seconds, self.search(alone_s))
        return self.seconds


def nowhere() -> Elsewhere:
    """Where there are no plans of several stages."""
    return Elsewhere(lambda known_s: math.inf)


def first_look(planner: Planner, meshes: Sequence[Mesh], timer: Timer, alone_s: float, elsewhere: Elsewhere) -> Look:
    """A glance at every mesh with the blocks run again that `planner` has; `alone_s` is the fastest step of one stage that is known."""
    known_s = min(alone_s, elsewhere.seconds)
    if FAR * planner.work(planner.open_levels[0]).step_s(planner.request.cluster.devices, 1, 1) < known_s < math.inf:
        elsewhere.asked(known_s)  # recipes say little
    look = Look(planner, timer, elsewhere, alone_s)
    look.glance(meshes)
    return look


@dataclass(eq=False)
class Look:
    """A search as far as it has come: the fastest step of one stage that is known, the first look at each mesh (`seen`), answers that were honed, and what is proven of each mesh."""

    planner: Planner
    timer: Timer
    elsewhere: Elsewhere
    alone_s: float
    seen: list[Candidate] = field(default_factory=list)
    honed: list[Candidate] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)

    def finished(self, alone_s: float, until: float = math.inf) -> tuple[Candidate | None, float]:
        """Hone what is nearest to the best; then solve what promises better than that, than `alone_s`, which other plans of one stage take by now, and than what is
        `elsewhere`, the most promising first, and hone those answers too; nothing is begun after `until` (time.monotonic) where more is to be looked for elsewhere. The best of all and the
        least that is proven of any mesh."""
        self.alone_s = min(self.alone_s, alone_s)
        self.hone(until)
        self.solve(until)
        self.fill(until)
        return self.best, min(self.bounds, default=0.0)

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits."""
        return min((*self.fit, *self.honed), key=lambda c: c.cost.time_s, default=None)

    @property
    def known_s(self) -> float:
        """The fastest step that is known, of one stage or of several."""
        return min(self.alone_s, self.elsewhere.seconds)

    @property
    def fit(self) -> list[Candidate]:
        """First looks that fit."""
        return [first for first in self.seen if first.peak_bytes is not None]

    def glance(self, meshes: Sequence[Mesh]) -> None:
        """Look at all `meshes`, then at the best ones unfolded."""
        planner = self.planner

        def nearest() -> Iterator[Mesh]:
            yield from _unfolded(self.seen, self.known_s, meshes) if planner.request.mesh is None else ()

        for sizes in chain(meshes, nearest()):
            if self.known_s < math.inf and self.timer.skips():
                self.bounds.append(0.0)  # of what was not looked at nothing is proven
                return
            planner.request.say(f"search on {times(sizes)}")
            look = partial(ilp.glance, time_limit_s=GLANCE_S, cutoff_s=self.known_s)
            try:
                self.seen.append(planner.wary(planner.candidate(sizes, space(sizes), "search", look, cutoff_s=self.known_s), self.known_s * HONED, GLANCE_S))
            except InfeasibleError as error:
                self.bounds += error.proven
            else:
                self._know(self.seen[-1])

    def _until(self, until: float) -> float:
        """Until when something may be begun."""
        return min(until, self.timer.ends_at) if self.elsewhere.waits else self.timer.ends_at

    def hone(self, until: float) -> None:
        """Hone the best ones, unless what is elsewhere is far better."""
        self.elsewhere.tell(self.known_s)
        if any(self._promises(first) for first in self.seen):
            self.elsewhere.asked(self.known_s)
            self.elsewhere.searched(self.alone_s)
        self.honed += _honed(self.planner, self.fit, self.known_s, partial(self.timer.skips, self._until(until)))
        self.alone_s = min([self.alone_s, *(each.cost.time_s for each in self.honed)])
        self.elsewhere.tell(self.known_s)

    def solve(self, until: float) -> None:
        """Solve what may be better than what is known, to the end or `until` then."""
        until = self._until(until)
        for first in sorted(self.seen, key=lambda c: c.cost.time_s):
            if not self._promises(first) or self.timer.skips(until):
                self.bounds.append(first.solution.bound_s)
                continue
            self.planner.request.say(f"solving {times(first.mesh.sizes)}")
            here = self._solved(first, until)
            self.bounds.append(max(first.solution.bound_s, here.solution.bound_s))
            self._know(here)
            if here.peak_bytes is not None and (first.peak_bytes is None or here.cost.time_s < first.cost.time_s):
                self.honed += [here, *_honed(self.planner, [here], self.known_s, partial(self.timer.skips, until), min((each.cost.time_s for each in self.honed), default=math.inf))]

    def fill(self, until: float) -> None:
        """Run no more blocks again than memory wants of what may become the best by that, the fastest first."""
        known_s = self.alone_s
        for number, each in enumerate(sorted((*self.fit, *self.honed), key=lambda c: c.cost.time_s)[:MOST_HONED]):
            if number and self.timer.skips(self._until(until)):
                break
            made = filled(self.planner, each, known_s)
            if made.cost.time_s < known_s:
                self.honed.append(made)
                known_s = made.cost.time_s

    def _know(self, found: Candidate) -> None:
        """There is such a plan, if it fits: what was not walked may not."""
        if found.peak_bytes is not None:
            self.alone_s = min(self.alone_s, found.cost.time_s)

    def _promises(self, first: Candidate) -> bool:
        """Whether it may be better than what is known by more than prices tell apart."""
        return first.solution.bound_s < self.known_s * (1 - CLOSE)

    def _solved(self, first: Candidate, until: float) -> Candidate:
        """A first look solved to the end, or `until` then; where that does not fit it is the first look, with its bound."""
        request = self.planner.request
        solution = ilp.search(first.model.problem, time_limit_s=until - time.monotonic(), seed=request.seed, start=first.solution.choice, cutoff_s=self.known_s, gap=CLOSE)
        here = self.planner.counted(first.refined(solution))
        if here.peak > request.limit_bytes:  # the glance had room for all that lives for a moment
            return replace(first, solution=replace(first.solution, bound_s=here.solution.bound_s))
        return here


def _nearest(among: Sequence[Candidate], known_s: float) -> list[Candidate]:
    """Those that may become the fastest, the fastest first."""
    return sorted((c for c in among if c.cost.time_s < known_s * HONED), key=lambda c: c.cost.time_s)[:MOST_HONED]


def _unfolded(seen: Sequence[Candidate], known_s: float, meshes: Sequence[Mesh]) -> list[Mesh]:
    """The meshes, unfolded, of what may become the fastest: those that are not among `meshes`."""
    return [sizes for sizes in dict.fromkeys(unfolded(c.mesh) for c in _nearest(seen, known_s)) if sizes is not None and sizes not in meshes]


def _honed(planner: Planner, fit: Sequence[Candidate], known_s: float, skips: Callable[[], bool], least_s: float = math.inf) -> list[Candidate]:
    """Those that may become the fastest, honed: linear prices do not see what hides in which pass. Where another takes `least_s`, honed, or one of them,
    one tangent says whether they may: whether more hides there where linear prices prove no less than that, else whether it comes near."""
    honed: list[Candidate] = []
    for each in _nearest(fit, known_s):
        if least_s < math.inf and not planner.promises(each, least_s * (1 + CLOSE * (each.solution.bound_s < least_s))):
            continue
        if skips():
            break
        planner.request.say(f"honing {times(each.mesh.sizes)}")
        honed.append(planner.honed(each, skips))
        least_s = min(least_s, honed[-1].cost.time_s)
    return honed
