"""The Problems of one shape (`Models`), and a solution of them with its costs per piece (`Chosen`). Made by
shape_models, solved by search_context, laid out by staging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.joint.place_kinds import Weights
from autopar.pipeline.costs import costs
from autopar.pipeline.once_per_step import Update, shared_updates
from autopar.pipeline.stretches import Cost, Pieces
from autopar.planner import Planner
from autopar.problem.build import Model
from autopar.problem.cadence import scattering_each
from autopar.problem.remat import Levels, levels, rematerialised
from autopar.problem.separable import separable
from autopar.problem.step_shares import ForwardPrices
from autopar.problem.types import Solution


@dataclass(eq=False)
class Models:
    """Two Problems with the same choices, `micro` for what happens in each microbatch and `once` for what happens once
    per step, and prices of a forward alone."""

    micro: Model
    once: Model
    forward: ForwardPrices
    _again: dict[str, Model] = field(default_factory=dict)
    # not copied with the Problems: with state on the host the same choices have another `once`
    _plain: dict[tuple[tuple[int, ...], bool], list[Cost]] = field(init=False, default_factory=dict)

    def plain_costs(self, choice: tuple[int, ...], *, apart: bool) -> list[Cost]:
        """The costs of all pieces under a solution in which nothing runs again; made once, whatever else is kept of
        blocks that do. `apart` as in pipeline.costs."""
        key = choice, apart
        if key not in self._plain:
            self._plain[key] = self.costs(self.micro, choice, apart=apart)
        return self._plain[key]

    def costs(self, micro: Model, choice: Sequence[int], *, apart: bool) -> list[Cost]:
        """As `plain_costs`, where the Problem of a microbatch is `micro`."""
        return costs(micro.links[0].program, micro, self.once, choice, self.forward, apart=apart)

    @property
    def kinds(self) -> Sequence[Models]:
        """The Problems of each kind of place."""
        return (self,)

    @cached_property
    def sums(self) -> bool:
        """Whether any choice sums gradients once per step, beside other work."""
        return any(net.group >= 0 for net in self.once.problem.nets)

    @cached_property
    def separable(self) -> Models:
        """The same, of choices under which zero-bubble schedules can take the backward of every stage apart."""
        return Models(separable(self.micro), self.once, self.forward)

    @cached_property
    def scattering_each(self) -> Mapping[int, np.ndarray]:
        """bool [choices] by cluster: which ones scatter gradients after every microbatch where another choice differs
        only in doing so once per step."""
        return scattering_each(self.micro)

    def at(self, level: str) -> Model:
        """`micro` with all blocks run again in the backward, at one of problem.remat.LEVELS."""
        if level not in self._again:
            self._again[level] = rematerialised(self.micro, self.forward, levels(self.micro.links[0].program, level))
        return self._again[level]


@dataclass(eq=False)
class Mixed(Models):
    """The Problems of places on several kinds of devices (`each`). `micro`, `once` and `at` are their weighted means,
    by which layouts are chosen."""

    each: Sequence[Models] = field(kw_only=True)
    weights: Weights = field(kw_only=True)

    @staticmethod
    def of(each: Sequence[Models], weights: Weights) -> Mixed:
        """The means of `each` by `weights`."""
        return Mixed(
            weights.meant([m.micro for m in each]),
            weights.meant([m.once for m in each]),
            each[0].forward,
            each=each,
            weights=weights,
        )

    @property
    def kinds(self) -> Sequence[Models]:
        """The Problems of each kind of place."""
        return self.each

    @cached_property
    def separable(self) -> Models:
        """As Models.separable, of all kinds together."""
        return Mixed.of([models.separable for models in self.each], self.weights)

    def at(self, level: str) -> Model:
        """The weighted mean of `Models.at` of each kind."""
        if level not in self._again:
            self._again[level] = self.weights.meant([models.at(level) for models in self.each])
        return self._again[level]


@dataclass(eq=False)
class Chosen:
    """The layouts of all places: `solution` of `model`, which is `models` combined for one timetable, with all blocks
    run again at `level`.

        apart        pieces are in different stages (pipeline.costs)
        all_again    the user asked for the level, so that all blocks run again; otherwise only as many as memory
                     requires
        bound_s      no plan of the shape is faster
        kept         which results blocks keep that run again, where that is not what `level` says (joint.kept_results)
    """

    models: Models
    model: Model
    solution: Solution
    level: str
    apart: bool
    all_again: bool
    bound_s: float
    kept: Levels | None = field(default=None, kw_only=True)

    @cached_property
    def pieces(self) -> list[Pieces]:
        """The costs of all pieces on each kind of place, plain and run again. With `all_again` the plain costs are
        those of running again."""
        return [self._pieces(models) for models in self.models.kinds]

    @property
    def key(self) -> tuple[object, ...]:
        """What the layouts are and what blocks keep, to tell equal choices."""
        kept = None if self.kept is None else tuple((scope, tuple(names)) for scope, names in self.kept.items())
        return self.solution.choice, self.level, self.all_again, kept

    @property
    def counted_bytes(self) -> float:
        """The bytes of a place that the Problem counts for the solution."""
        return self.model.problem.price(self.solution.choice).memory_bytes

    @cached_property
    def separable(self) -> bool:
        """Whether it is one of the choices of `Models.separable`."""
        return self.models.separable.micro.problem.price(self.solution.choice).feasible

    @cached_property
    def _updates(self) -> list[list[Update]]:
        """`updates`, by kind of place."""
        return [shared_updates(models.once, self.solution.choice) for models in self.models.kinds]

    def updates(self, place: int, kind: int) -> list[Update]:
        """The optimizer's steps of weights that several pieces read, on place number `place`, which is of kind number
        `kind`."""
        return self._updates[kind]

    def on(self, place: int, kind: int) -> Pieces:
        """The costs of all pieces on place number `place`, which is of kind number `kind`."""
        return self.pieces[kind]

    def levels(self, planner: Planner) -> Levels:
        """By scope, the results that blocks keep which are run again."""
        return planner.levels(self.level) if self.kept is None else self.kept

    def rerun(self, models: Models) -> Model:
        """The Problem of a microbatch with all blocks run again, for one kind of place."""
        return models.at(self.level) if self.kept is None else rematerialised(models.micro, models.forward, self.kept)

    def _pieces(self, models: Models) -> Pieces:
        """The costs of all pieces on one kind of place, plain and run again."""
        choice, rerun = self.solution.choice, self.rerun(models)
        if rerun is models.micro:
            plain = models.plain_costs(choice, apart=self.apart)
            return Pieces(plain, plain)
        again = models.costs(rerun, choice, apart=self.apart)
        return Pieces(again if self.all_again else models.plain_costs(choice, apart=self.apart), again)


@dataclass(eq=False)
class Apart(Chosen):
    """Places with layouts of their own: `each` has those of every place. What several places read has the layout of
    `solution` on all of them."""

    each: tuple[Chosen, ...] = field(kw_only=True)

    def on(self, place: int, kind: int) -> Pieces:
        """As Chosen.on, with the place's own layouts."""
        return self.each[place].pieces[kind]

    def updates(self, place: int, kind: int) -> list[Update]:
        """As Chosen.updates, with the place's own layouts."""
        return self.each[place]._updates[kind]
