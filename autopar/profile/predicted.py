"""What a simulation says of each operator and collective of one rank, by the keys of `profile.attribute`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autopar.plan import Plan
from autopar.profile.attribute import Key
from autopar.simulate.pieces import COMPUTE, INSIDE
from autopar.simulate.rank import Mark, Ran
from autopar.simulate.stages import Stages


def predicted(gm: fx.GraphModule, plan: Plan, place: int = 0) -> dict[Key, float]:
    """Seconds of a step by key, on a rank of `place`."""
    stages = Stages.of(gm, plan)
    found: dict[Key, float] = {}
    for ran, times in _ran(stages, place):
        for key, seconds in _keyed(ran.marks):
            found[key] = found.get(key, 0.0) + times * seconds
    return found


def starts(gm: fx.GraphModule, plan: Plan, place: int = 0) -> dict[Key, float]:
    """Of these seconds, those that starting operators takes; none for a cluster of parts, from which nothing is
    refitted."""
    if "parts" in plan.cluster:
        return {}
    at_once = replace(plan, cluster={**plan.cluster, "device": {**plan.cluster["device"], "launch_s": 0.0}})
    rest = predicted(gm, at_once, place)
    return {key: seconds - rest.get(key, 0.0) for key, seconds in predicted(gm, plan, place).items()}


def _ran(stages: Stages, place: int) -> list[tuple[Ran, int]]:
    """What a rank does in a step, and how often."""
    plan = stages.plan
    if not plan.pipelined:
        return [(stages.whole(), 1)]
    often, here = plan.microbatches, plan.stages_on(place)
    if not stages.training:
        return [(stages.ran(index, "forward"), often) for index in here]
    parts = (("ahead", 1), ("first", 1), ("forward", often - 1), ("backward", often))
    found = [(stages.ran(index, part), times) for index in here for part, times in parts]
    last = stages.rank(place)
    last.local(stages.optimizer(place), "optimizer")
    sums = [(stages.sums(index).alone, 1) for index in here]
    return [*found, *sums, (last.run(), 1)]


def _keyed(marks: Sequence[Mark]) -> list[tuple[Key, float]]:
    """The key and the seconds of each piece; copies around a collective belong to it, as they do where it runs."""
    return [(_of(mark), mark.piece.seconds) for mark in marks]


def _of(mark: Mark) -> Key:
    if mark.during == "optimizer":
        return ("optimizer",)
    piece = mark.piece
    if piece.within or piece.kind in ("compute", "inside"):
        return "op", piece.name
    kind, axis = piece.around or (piece.kind, piece.axis)
    if axis in (COMPUTE, INSIDE):
        return ("local",)
    return ("sync", kind, axis) if mark.during == "sync" else (kind, axis, round(piece.nbytes))
