"""Operators and reshards as pieces of work on one rank, priced as in the search: local work, and collectives on mesh
axes.

    operator   in order: its inner collectives that its work waits for; the work; the exposed part of inner collectives
               that run beside the work; the inner collectives that wait for the work
    reshard    the collective of each step (`cost.comm`), and the copies around it that reorder chunks

The seconds of all pieces of a step add up to what a Problem charges for it with nothing hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster import Mesh
from autopar.cluster.types import Device
from autopar.codegen.edges import options
from autopar.cost.comm import bucket_copies_s, collective_s, copies_s, group_bytes, step_s
from autopar.layout import LOCAL, Step
from autopar.plan import NodePlan
from autopar.problem.graph import Op
from autopar.problem.op_algorithms import Wait
from autopar.problem.prices import Prices
from autopar.problem.settings import Settings
from autopar.rules import rule_for
from autopar.rules.site import InnerCollective, Site

COMPUTE = -1
"""The axis of local work."""
INSIDE = -2
"""The axis of the exposed part of inner collectives that run beside the work of their operator: it takes the compute
stream."""
COUNTS_S = 1e-15
"""A difference of seconds that is less is a rounding error."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of work of `seconds`. `kind` is "compute", "copy", "inside", or the kind of a collective on mesh axis
    `axis`, with `nbytes` in a group. `within`: it is an inner collective of an operator. `around`: of a copy, the kind
    and axis of the collective that it is made for."""

    name: str
    kind: str
    axis: int
    seconds: float
    nbytes: float = 0.0
    within: bool = False
    around: tuple[str, int] | None = None


class _Work(Prices):
    """Prices without the collectives inside operators."""

    def _inner_s(self, used: Sequence[tuple[Site, Sequence[InnerCollective]]], work_s: float) -> tuple[float, float]:
        return 0.0, 0.0


class Pieces:
    """Makes the pieces of one plan."""

    def __init__(self, mesh: Mesh, device: Device, settings: Settings) -> None:
        self.mesh = mesh
        self.prices = Prices(mesh, device, settings)
        forward = Settings("inference", settings.optimizer, settings.precision)
        self._all = {kind: (kind(mesh, device, settings), kind(mesh, device, forward)) for kind in (Prices, _Work)}

    def operator(self, op: Op, node: NodePlan) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """One run of an operator: forward, and backward (nothing where there is no gradient)."""
        chosen, rule = options(node), rule_for(op.call.target)
        if rule is not None:  # plans do not say which share of the work is cut
            chosen = tuple(rule.cutting(op.call, chosen))
        (whole_s, forward_s), (work_s, forward_work_s) = (
            [kind.op_s(op, chosen) / op.count for kind in kinds] for kinds in (self._all[Prices], self._all[_Work])
        )
        ahead, back = self.prices.waits(op, chosen)
        return (
            _pieces(op, forward_work_s, forward_s - forward_work_s, ahead),
            _pieces(op, work_s - forward_work_s, whole_s - work_s - (forward_s - forward_work_s), back),
        )

    def steps(self, steps: Sequence[Step], full_bytes: float, name: str) -> tuple[Piece, ...]:
        """The pieces of a way between layouts, for a tensor of `full_bytes` in all."""
        return tuple(piece for step in steps for piece in together([step], [full_bytes], None, self.mesh, name))


def together(
    steps: Sequence[Step], full_bytes: Sequence[float], packed: Sequence[int] | None, mesh: Mesh, name: str
) -> list[Piece]:
    """The pieces of one step of each of some tensors, of `full_bytes` in all: the copies around the collectives behind
    gathers, or in front of anything else, and as one piece a collective for those with the numbers `packed` in one flat
    buffer and one for each of the others (runtime.coalesced; None: they are in no bucket). `steps` are of one kind on
    one axis."""
    kind, axis, each = steps[0].kind, steps[0].axis, list(zip(steps, full_bytes, strict=True))
    sizes = [group_bytes(step, size, mesh.sizes) for step, size in each]
    if kind in LOCAL:
        whole_s = sum(step_s(step, size, mesh) for step, size in each)
        return [Piece(name, "copy", COMPUTE, whole_s, sum(sizes))] if whole_s > 0 else []
    buffer_bytes = sum(sizes[number] for number in packed or ())
    copied_s = 0.0
    for number, (step, size) in enumerate(each):
        if packed is None:
            copied_s += copies_s(step, size, mesh)
            continue
        share = sizes[number] / buffer_bytes if buffer_bytes else 1.0
        copied_s += bucket_copies_s(step, size, mesh, share if number in packed else None)
    sent = [nbytes for number, nbytes in enumerate(sizes) if number not in (packed or ())]
    moved_s = sum(
        collective_s(kind, nbytes, mesh.axes[axis]) for nbytes in (*([buffer_bytes] if packed else ()), *sent)
    )
    moved = [Piece(name, kind, axis, moved_s, sum(sizes))] if moved_s > 0 else []
    copies = [Piece(name, "copy", COMPUTE, copied_s, sum(sizes), around=(kind, axis))] if copied_s > COUNTS_S else []
    return [*moved, *copies] if kind == "all_gather" else [*copies, *moved]


def _pieces(op: Op, work_s: float, inside_s: float, waited: Sequence[Wait]) -> tuple[Piece, ...]:
    """The pieces of one run of an operator. `inside_s`: exposed seconds of all its inner collectives, of which those in
    `waited` are not beside its work."""
    name, beside_s = op.name, inside_s - sum(wait.seconds for wait in waited)
    first, last = list[Piece](), list[Piece]()
    for wait in waited:
        each = Piece(name, wait.kind, wait.axis, wait.seconds / wait.times, wait.nbytes, within=True)
        (last if wait.last else first).extend([each] * wait.times)
    work = [Piece(name, "compute", COMPUTE, work_s)] if work_s > 0 else []
    beside = [Piece(name, "inside", INSIDE, beside_s)] if beside_s > COUNTS_S else []
    return *first, *work, *beside, *last
