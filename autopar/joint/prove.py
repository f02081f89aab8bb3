"""What no plan is faster than: every shape bounded under every timetable, whatever is cut, laid and run again there.

    floor     the least work there is, cut over all devices, nothing sent; and, with what goes to the host, the least update there
    length    a pipeline takes no less than its schedule makes of the passes of all pieces together, however these are cut (pipeline.least)
    passes    the choices of layouts: what their passes take at least, at prices that cutting planes find (joint.relaxed, joint.cutting)
    places    may be laid out each in its own way: a block, and each operator outside, is bounded by itself, and what goes between takes nothing
    memory    no plan has more bytes than there are, by the count of the search: on one place its own, on several the mean over places. At a
              price of bytes what blocks gain by keeping something is weighed against running them again. What is there for a moment only is not
              counted on several places

Plans with something on the host have the passes of all others, another update, and no less memory on the device than what is not of weights: of them is proven what
holds with that and no update at all, and the least update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import InfeasibleError
from autopar.joint import offloading
from autopar.joint.bounded import Alone, Timed
from autopar.joint.cutting import ROUNDS
from autopar.joint.inner import Inner
from autopar.joint.pricing import Pricing
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH
from autopar.problem.settings import OFFLOADED
from autopar.recipes.free import spaces

FIRST_ROUNDS = 2  # of cutting planes, for a first look at all shapes


def proven_s(inner: Inner, known_s: float) -> float:
    """Seconds that no plan beats, `known_s`, the step of one that there is, at most. On clusters of several parts that is only the least work."""
    prover = Prover(inner)
    rough: dict[Shape, float] = {}
    for shape in prover.shapes():
        if (floor_s := prover.floor_s(shape)) < known_s:
            inner.request.say(f"proving: {shape}")
            rough[shape] = max(floor_s, prover.bound_s(shape, known_s, rounds=FIRST_ROUNDS))
    least_s = known_s
    for shape in sorted(rough, key=rough.__getitem__):
        if rough[shape] < least_s:
            inner.request.say(f"proving more of {shape}")
            least_s = min(least_s, max(rough[shape], prover.bound_s(shape, least_s)))
    return least_s


@dataclass(eq=False)
class Prover:
    """Bounds of all shapes of one graph."""

    inner: Inner

    @cached_property
    def pricing(self) -> Pricing:
        """What knows the Problems and timetables of shapes."""
        return Pricing(self.inner, SEARCH)

    def shapes(self) -> list[Shape]:
        """One place and one microbatch on every mesh, and all that the search may choose beside that."""
        request = self.inner.request
        flat = [request.mesh] if request.mesh is not None else spaces(request.cluster, self.inner.whole.cuts_samples)
        return [*(Shape(1, mesh, 1) for mesh in flat), *(SEARCH.shapes(self.inner) if request.settings.training else ())]

    def floor_s(self, shape: Shape) -> float:
        """Its share of the least work there is."""
        return self.inner.work(shape.places).step_s(self.inner.request.cluster.devices, shape.places, shape.microbatches)

    def bound_s(self, shape: Shape, cutoff_s: float = math.inf, rounds: int = ROUNDS) -> float:
        """Seconds that no plan on `shape` beats, not exact above `cutoff_s`; infinite where nothing is possible there."""
        if self.inner.request.cluster.parts:
            return 0.0
        try:
            here = Alone(self.inner, shape) if shape.microbatches == 1 else Timed(self.inner, self.pricing, shape)
        except InfeasibleError:
            return math.inf
        least_s = here.bound_s(cutoff_s, rounds)
        late_s = min((there.late_s for there in self._hosted), default=math.inf)
        if self.floor_s(shape) + late_s >= min(least_s, cutoff_s):
            return least_s
        return min(least_s, late_s + here.bound_s(min(least_s, cutoff_s) - late_s, rounds, hosted=True))

    @cached_property
    def _hosted(self) -> list[Inner]:
        """What the search may put on the host."""
        return [self.inner.hosted(held) for held in OFFLOADED[1:]] if offloading.may(self.inner.request) else []
