"""Weights that several places of a pipeline hold: each has a copy, and their gradients are summed over the places at
the end of a step (runtime.places)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.buckets import shared_by_places
from autopar.cluster import Places
from autopar.cost.comm import collective_s
from autopar.cost.memory import itemsize, rests_in
from autopar.layout import most_elements, parse
from autopar.pipeline.stage_views import View
from autopar.plan import Plan
from autopar.problem.graph import Op, Program


@dataclass(frozen=True, slots=True)
class Shared:
    """Weights `names` that `places` hold: seconds of the sums of their gradients, one after the other, and the bytes of
    all on a rank."""

    names: tuple[str, ...]
    places: tuple[int, ...]
    seconds: float
    nbytes: float


def shared_weights(program: Program, plan: Plan, views: Sequence[View], at: Places) -> list[Shared]:
    """The trained weights that several places hold, by these places; `at` says where they are."""
    holders: dict[str, list[int]] = {}
    for view, stage in zip(views, plan.stages, strict=True):
        for name in view.held:
            if program.ops[name].role == "param" and program.ops[name].call.outs[0].grad:
                holders.setdefault(name, []).append(stage.place)
    return [_shared(program, plan, names, where, at) for where, names in shared_by_places(holders).items()]


def _shared(program: Program, plan: Plan, names: Sequence[str], places: tuple[int, ...], at: Places) -> Shared:
    """Gradients that rest on the host are brought to the device, summed there, and taken back."""
    sizes, axis = [_rest_bytes(program.ops[name], plan) for name in names], at.axis(places)
    host_s = (
        2 * sum(sizes) / min(at.device(place).host_link_bytes_s for place in places)
        if plan.offload == "parameters"
        else 0.0
    )
    return Shared(
        tuple(names), places, sum(collective_s("all_reduce", nbytes, axis) for nbytes in sizes) + host_s, sum(sizes)
    )


def _rest_bytes(op: Op, plan: Plan) -> float:
    """Bytes of a parameter's gradient on the rank that holds most of it: it lies as the parameter rests, in the dtype
    that it rests in."""
    value, _, gradient = plan.nodes[op.name].outs[0].partition("|")
    layout = parse(gradient if gradient and "-" not in gradient else value)
    return float(
        most_elements(op.call.outs[0].sizes, layout, plan.mesh)
        * itemsize(rests_in(str(op.out_dtypes[0]), plan.precision))
    )
