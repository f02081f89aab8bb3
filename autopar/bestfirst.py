"""The free search over all meshes, best first:

    glance   every mesh gets a quick solution and a proven lower bound
    hone     the solutions closest to the best (where none is close, the best that memory was short for) are improved
             by descent, priced as the step runs
    solve    meshes whose bound is below the best known step are solved by integer programming, the most promising first
    fill     of blocks that are run again in the backward, no more are than memory requires

The glance (`first_look`) is a function apart from the rest (`Look.finished`): where memory is short, the caller first
glances at every level of rematerialisation and at pipelines, before it spends time on solving anything.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from autopar.candidate import Candidate
from autopar.errors import InfeasibleError
from autopar.partial_remat import filled
from autopar.planner import Planner
from autopar.recipes.free import space, unfolded
from autopar.search import ilp
from autopar.text import times
from autopar.timer import Timer

Mesh = tuple[int, ...]

GLANCE_S = 2.0  # seconds at most for the glance at one mesh
HONED = 1.1  # times the fastest step: a solution slower than this does not become the fastest by descent
MOST_HONED = 3  # solutions that are honed at most
ALONE = 0.6
"""Share of the time left that the search for plans of one stage may take where pipelines are searched after it."""
PATIENCE = 0.25  # share of the time limit after which pipelines are asked where nothing of one stage fits yet
FAR = 4  # times the least work of a step: a known step slower than this says little about how fast a plan can be
WINS = 0.1  # relative: pipelines that are faster by this much at a glance stay faster after everything is solved
PRICE_TOLERANCE = 0.01  # relative: prices do not tell steps apart that differ by less


@dataclass(eq=False)
class Elsewhere:
    """The pipelined plans (of several stages), as far as the search for plans of one stage needs to know of them.

    `ask(known_s)` glances at pipelines, given the step time of the best plan so far, and returns what plans of one
    stage have to beat: the least of both, with some slack for what a glance leaves open. It is called once, before
    anything is solved to the end; from then on, only meshes that may have a faster plan than `seconds` are solved.
    `search(alone_s)` searches pipelines to the end and returns the best step time. `tell(known_s)` is called with the
    best step time of all plans: after the glance at all meshes or at pipelines, and when it improves.
    """

    ask: Callable[[float], float]
    search: Callable[[float], float] = lambda known_s: math.inf
    tell: Callable[[float], None] = lambda known_s: None
    seconds: float = math.inf
    has_asked: bool = False
    done: bool = False

    @property
    def waits(self) -> bool:
        """Whether there are pipelined plans that are yet to be searched to the end."""
        return not self.done and self.seconds < math.inf

    def asked(self, known_s: float) -> float:
        """What `ask` returned; the first call asks. The best step time is told then: it may be the first answer that
        there is."""
        if not self.has_asked:
            self.has_asked, self.seconds = True, self.ask(known_s)
            self.tell(min(known_s, self.seconds))
        return self.seconds

    def searched(self, alone_s: float) -> float:
        """Step time of the best known pipeline. Pipelines are searched to the end, once, where the glance was faster
        than `alone_s`, the best step of one stage, by more than WINS."""
        if not self.done and self.seconds < alone_s * (1 - WINS):
            self.done, self.seconds = True, min(self.seconds, self.search(alone_s))
        return self.seconds


def nowhere() -> Elsewhere:
    """The Elsewhere of a search that has no pipelines to compete with."""
    return Elsewhere(lambda known_s: math.inf)


def first_look(planner: Planner, meshes: Sequence[Mesh], timer: Timer, alone_s: float, elsewhere: Elsewhere) -> Look:
    """A glance at every mesh, under the rematerialisation that `planner.remat` says; `alone_s` is the fastest known
    step of one stage."""
    known_s = min(alone_s, elsewhere.seconds)
    if FAR * planner.work(planner.open_levels[0]).step_s(planner.request.cluster.devices, 1, 1) < known_s < math.inf:
        # what is known so far (recipes) is a poor cutoff for the glances: pipelines may give a better one
        elsewhere.asked(known_s)
    look = Look(planner, timer, elsewhere, alone_s)
    look.glance(meshes)
    return look


@dataclass(eq=False)
class Look:
    """The state of the search over meshes.

    alone_s     the fastest known step of one stage
    seen        the glance at each mesh
    honed       solutions that were improved or solved
    bounds      the proven lower bounds in seconds, one per mesh
    glanced_s   the fastest step of one stage before anything was honed
    """

    planner: Planner
    timer: Timer
    elsewhere: Elsewhere
    alone_s: float
    seen: list[Candidate] = field(default_factory=list)
    honed: list[Candidate] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    glanced_s: float = math.inf

    def finished(self, alone_s: float, until: float = math.inf) -> tuple[Candidate | None, float]:
        """Hone, solve and fill (see the module docstring); the best solution that fits (None where none does) and the
        lowest bound of any mesh, in seconds.

        `alone_s` is the fastest step of one stage that the caller knows by now. Where pipelines are yet to be searched,
        nothing is begun after `until` (time.monotonic).
        """
        self.alone_s = min(self.alone_s, alone_s)
        self.hone(until)
        self.solve(until)
        self.fill(until)
        return self.best, min(self.bounds, default=0.0)

    @property
    def best(self) -> Candidate | None:
        """The fastest solution that fits in memory."""
        return min((*self.fit, *self.honed), key=lambda c: c.cost.time_s, default=None)

    @property
    def known_s(self) -> float:
        """The fastest known step, of one stage or of a pipeline."""
        return min(self.alone_s, self.elsewhere.seconds)

    @property
    def fit(self) -> list[Candidate]:
        """The glances whose solution fits in memory."""
        return [first for first in self.seen if first.peak_bytes is not None]

    def glance(self, meshes: Sequence[Mesh]) -> None:
        """Glance at all `meshes`, then at the unfolded meshes (recipes.free.unfolded) of the best ones, in ALONE of the
        time that is left where pipelines are yet to be searched."""
        planner, until = self.planner, self.timer.after(ALONE)

        def nearest() -> Iterator[Mesh]:
            yield from _unfolded(self.seen, self.known_s, meshes) if planner.request.mesh is None else ()

        for sizes in chain(meshes, nearest()):
            if self.known_s < math.inf and self.timer.skips(self._until(until)):
                self.bounds.append(0.0)  # nothing is proven about the meshes that are left out
                return
            if self.known_s == math.inf and self.timer.left_s < self.timer.limit_s * (1 - PATIENCE):
                self.elsewhere.asked(math.inf)
            planner.request.say(f"search on {times(sizes)}")
            near_s = self.known_s * HONED  # honing may make the fastest of what is below
            look = partial(ilp.glance, time_limit_s=GLANCE_S, cutoff_s=near_s)
            try:
                self.seen.append(
                    planner.wary(
                        planner.candidate(sizes, space(sizes), "search", look, cutoff_s=near_s), near_s, GLANCE_S
                    )
                )
            except InfeasibleError as error:
                self.bounds += error.proven
            else:
                self._know(self.seen[-1])
        self.glanced_s = self.alone_s

    def _until(self, until: float) -> float:
        """The time (time.monotonic) after which nothing is begun: `until` only counts where pipelines are waiting for
        the rest."""
        return min(until, self.timer.ends_at) if self.elsewhere.waits else self.timer.ends_at

    def hone(self, until: float) -> None:
        """Hone the best glances. Pipelines are asked first; where they are far faster, nothing here is near enough to
        the best to be honed."""
        self.elsewhere.tell(self.known_s)
        if any(self._promises(first) for first in self.seen) or _nearest(self.fit, self.glanced_s):
            self.elsewhere.asked(self.known_s)
            self.elsewhere.searched(self.alone_s)
        near_s = min(self.glanced_s, self.elsewhere.seconds)
        self.honed += _honed(
            self.planner,
            self.fit,
            near_s,
            partial(self.timer.skips, self._until(until)),
            self.alone_s if self.alone_s < self.glanced_s else math.inf,
        )
        self.alone_s = min([self.alone_s, *(each.cost.time_s for each in self.honed)])
        self.elsewhere.tell(self.known_s)

    def solve(self, until: float) -> None:
        """Solve the meshes whose bound is below the best known step, the fastest glance first; what cannot be begun by
        `until` is left out."""
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
                self.honed += [
                    here,
                    *_honed(
                        self.planner,
                        [here],
                        self.known_s,
                        partial(self.timer.skips, until),
                        min((each.cost.time_s for each in self.honed), default=math.inf),
                    ),
                ]

    def fill(self, until: float) -> None:
        """Let the fastest solutions run fewer blocks again, as far as memory allows."""
        known_s = self.alone_s
        for number, each in enumerate(sorted((*self.fit, *self.honed), key=lambda c: c.cost.time_s)[:MOST_HONED]):
            if number and self.timer.skips(self._until(until)):
                break
            made = filled(self.planner, each, known_s, self.timer.grace())
            if made.cost.time_s < known_s:
                self.honed.append(made)
                known_s = made.cost.time_s

    def _know(self, found: Candidate) -> None:
        """Remember the step time of a solution that fits; one whose memory was not walked (no `peak_bytes`) may not."""
        if found.peak_bytes is not None:
            self.alone_s = min(self.alone_s, found.cost.time_s)

    def _promises(self, first: Candidate) -> bool:
        """Whether the mesh of `first` may have a plan that is faster than the best known one by more than
        PRICE_TOLERANCE."""
        return first.solution.bound_s < self.known_s * (1 - PRICE_TOLERANCE)

    def _solved(self, first: Candidate, until: float) -> Candidate:
        """The solution by integer programming, in the time until `until`; where that does not fit, the glance with the
        tighter bound."""
        request = self.planner.request
        solution = ilp.search(
            first.model.problem,
            time_limit_s=until - time.monotonic(),
            seed=request.seed,
            start=first.solution.choice,
            cutoff_s=self.known_s,
            gap=PRICE_TOLERANCE,
        )
        here = self.planner.counted(first.refined(solution))
        # the Problem does not count temporaries, for which the glance happened to leave room
        if here.peak > request.limit_bytes:
            return replace(first, solution=replace(first.solution, bound_s=here.solution.bound_s))
        return here


def _nearest(among: Sequence[Candidate], known_s: float) -> list[Candidate]:
    """The candidates that may become the fastest by honing, the fastest first."""
    return sorted((c for c in among if c.cost.time_s < known_s * HONED), key=lambda c: c.cost.time_s)[:MOST_HONED]


def _cramped(planner: Planner, fit: Sequence[Candidate], known_s: float) -> list[Candidate]:
    """Where none is near: the fastest candidate whose Problem got less memory than the device has, if descent, which
    has all of it, promises to get below `known_s`. With a little less room its choices may be far slower ones."""
    short = min((c for c in fit if c.short), key=lambda c: c.cost.time_s, default=None)
    return [short] if short is not None and planner.promises(short, known_s) else []


def _unfolded(seen: Sequence[Candidate], known_s: float, meshes: Sequence[Mesh]) -> list[Mesh]:
    """The unfolded meshes of the candidates that may become the fastest, without those in `meshes`."""
    return [
        sizes
        for sizes in dict.fromkeys(unfolded(c.mesh) for c in _nearest(seen, known_s))
        if sizes is not None and sizes not in meshes
    ]


def _honed(
    planner: Planner, fit: Sequence[Candidate], known_s: float, skips: Callable[[], bool], least_s: float = math.inf
) -> list[Candidate]:
    """The candidates that may become the fastest, honed: the Problem's linear prices do not see which collectives hide
    in which pass.

    Once some honed solution takes `least_s`, the others are honed only if one tangent step promises to get below that;
    where their bound is below `least_s`, to come close (PRICE_TOLERANCE) is enough.
    """
    honed: list[Candidate] = []
    for each in _nearest(fit, known_s) or _cramped(planner, fit, known_s):
        if least_s < math.inf and not planner.promises(
            each, least_s * (1 + PRICE_TOLERANCE * (each.solution.bound_s < least_s))
        ):
            continue
        if skips():
            break
        planner.request.say(f"honing {times(each.mesh.sizes)}")
        honed.append(planner.honed(each, skips))
        least_s = min(least_s, honed[-1].cost.time_s)
    return honed
