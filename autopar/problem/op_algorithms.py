"""The runtime algorithms that split one Op, with what their prices and counts depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.cluster import Mesh
from autopar.cost.comm import collective_s, sent_once
from autopar.cost.memory import itemsize, rests_in
from autopar.problem.graph import Op
from autopar.problem.settings import Settings
from autopar.rules.algorithms import ALGORITHMS, Algorithm
from autopar.rules.language import Option
from autopar.rules.site import InnerCollective, Keeping, Site


def sites(
    op: Op, options: Sequence[Option], sizes: tuple[int, ...], precision: str = "", *, first: bool = False
) -> list[tuple[Algorithm, Site]]:
    """One entry per axis on which an algorithm splits `op`; `options` and `sizes` have one per axis. `precision` is
    that of training, "" where gradients are summed in the dtype of the weight. `first`: in the first block of a run."""
    if op.role != "op" or not any(option.run for option in options):
        return []
    wider = itemsize(rests_in(op.dtype, precision)) / itemsize(op.dtype) if op.dtype else 1.0
    operands = op.first_ins if first else op.call.ins
    return [
        (ALGORITHMS[option.run], Site(operands, options, sizes, axis, op.call, wider))
        for axis, option in enumerate(options)
        if option.run
    ]


def keeping(op: Op, options: Sequence[Option], sizes: tuple[int, ...]) -> Keeping | None:
    """What an algorithm of `op` keeps for the backward; None where that is what the plain operator keeps."""
    if not op.graded:
        return None
    return next(
        (algorithm.keeps(site) for algorithm, site in sites(op, options, sizes) if algorithm.keeps is not None), None
    )


@dataclass(frozen=True, slots=True)
class Wait:
    """A collective inside an operator that does not overlap the operator's own work: it runs before the work, or after
    it (`last`), `times` times in a row on mesh axis `axis`, `seconds` in all. It shares links with, and queues behind,
    all other collectives of the axis."""

    kind: str
    axis: int
    nbytes: float
    times: int
    seconds: float
    last: bool


def waits(used: Sequence[tuple[Site, Sequence[InnerCollective]]], mesh: Mesh, settings: Settings) -> tuple[Wait, ...]:
    """The collectives of some algorithms, in one direction, that their operator waits for."""
    found: list[Wait] = []
    for at, inner in used:
        site = replace(at, in_a_row=settings.in_a_row)
        for each in inner:
            times = 0 if each.hidden or (each.reorders and settings.dealt) else each.times(site)
            if times:
                beside = each.parts(site) if settings.tokens_in_parts else {}
                nbytes = each.nbytes(site) * (each.apart(site) if settings.rows_to == "experts" else 1.0)
                sent = [(each.kind, site.axis, nbytes / math.prod(site.sizes[axis] for axis in beside))]
                sent += [
                    ("reduce_scatter" if each.last else "all_gather", axis, nbytes) for axis, nbytes in beside.items()
                ]
                for kind, axis, nbytes in sent:
                    link = (
                        sent_once(mesh.axes[axis], partial(each.reached, site))
                        if settings.rows_to == "nodes" and axis == site.axis
                        else mesh.axes[axis]
                    )
                    found.append(Wait(kind, axis, nbytes, times, times * collective_s(kind, nbytes, link), each.last))
    return tuple(found)
