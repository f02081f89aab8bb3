"""`profile`: runs a plan on local ranks and sets beside each other what was measured and what was predicted."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.bundle import Bundle
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.plan import Plan
from autopar.profile.attribute import Key
from autopar.profile.label import labelled
from autopar.profile.predicted import predicted, starts
from autopar.profile.record import Job, Recorded, record
from autopar.runtime.launch import launch
from autopar.text import megabytes


@dataclass(frozen=True)
class Case:
    """A plan with the graph that it was made for, whole weights, constants, and a global batch by input name."""

    gm: fx.GraphModule
    plan: Plan
    names: Names
    constants: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    batch: Mapping[str, Any]

    def bundle(self) -> Bundle:
        """The plan with its source, a profiler range around each operator."""
        return Bundle(self.plan, labelled(emit(self.gm, self.plan, self.names, probes=True)), self.constants)


@dataclass(frozen=True, slots=True)
class Row:
    """One operator (all its instances, forward and backward), one collective (all that have this kind, axis and number
    of bytes), the sums of gradients, or the optimizer: seconds of one step on a rank. Of the predicted ones starting
    operators takes `starts_s`."""

    place: int
    what: str
    name: str
    measured_s: float
    predicted_s: float
    key: Key = ()
    starts_s: float = 0.0

    @property
    def off_s(self) -> float:
        """Measured less predicted."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True, slots=True)
class Profile:
    """`rows` are those of a rank of each place (means over the ranks of the place), the worst first. `profiled_s` is a
    profiled step on a rank of the first place, also a mean, and `rest_s` what it has beside its rows: Python, hooks,
    waiting for other places."""

    model: str
    cluster: str
    step_s: float
    profiled_s: float
    predicted_s: float
    rest_s: float
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "rows"}
        return {
            **own,
            "rows": [
                {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name not in ("key", "starts_s")}
                for row in self.rows
            ],
        }


def profile(case: Case, steps: int = 3, *, trace: str = "", progress: Callable[[str], None] | None = None) -> Profile:
    """Run `steps` steps of a plan on as many local ranks as it has, and as many more under torch.profiler.

    With `trace` the first rank's events are written there as a Chrome trace. Raises RunError where a rank fails.
    """
    say = progress or (lambda _: None)
    plan = case.plan
    say(f"running on {plan.ranks} ranks")
    job = Job(case.bundle(), case.weights, case.batch, steps, trace)
    found: list[Recorded] = launch(record, plan.ranks, job, device_type=plan.device_kind)
    say("simulating")
    inner = plan.ranks // plan.places
    rows: list[Row] = []
    for place in range(plan.places):
        mine = found[place * inner : (place + 1) * inner]
        rows += _rows(plan, place, _mean(mine), predicted(case.gm, plan, place), starts(case.gm, plan, place))
    first_s = sum(row.measured_s for row in rows if row.place == 0)
    profiled_s = statistics.fmean(each.profiled_s for each in found[:inner])
    rows.sort(key=lambda row: -abs(row.off_s))
    return Profile(
        plan.model,
        str(plan.cluster["name"]),
        found[0].step_s,
        profiled_s,
        plan.predicted.step_s,
        profiled_s - first_s,
        tuple(rows),
    )


def _mean(found: list[Recorded]) -> dict[Key, float]:
    keys = dict.fromkeys(key for each in found for key in each.seconds)
    return {key: sum(each.seconds.get(key, 0.0) for each in found) / len(found) for key in keys}


def _rows(
    plan: Plan, place: int, measured: Mapping[Key, float], foreseen: Mapping[Key, float], begun: Mapping[Key, float]
) -> list[Row]:
    keys = dict.fromkeys((*measured, *foreseen))
    return [
        Row(place, *_words(plan, key), measured.get(key, 0.0), foreseen.get(key, 0.0), key, begun.get(key, 0.0))
        for key in keys
    ]


def _words(plan: Plan, key: Key) -> tuple[str, str]:
    """What a key is for a person: what, name."""
    match key:
        case ("op", name):
            return "operator", str(name)
        case ("optimizer",):
            return "optimizer", plan.optimizer
        case ("local",):
            return "copies", "slices and masks"
        case ("sync", kind, axis):
            return "gradients", f"{str(kind).replace('_', '-')} on {plan.axes[int(str(axis))]}"
        case (kind, axis, nbytes):
            return (
                "collective",
                f"{str(kind).replace('_', '-')} on {plan.axes[int(str(axis))]}, {megabytes(float(str(nbytes)))}",
            )
    raise AssertionError(f"no such key: {key}")
