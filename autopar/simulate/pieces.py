"""What operators and changes of layout do on one rank, with the prices of the search: local work, and collectives on mesh axes.

    operator   the collectives inside it that its work waits for, its local work, what that does not hide of those beside it, and the collectives that
               wait for it
    reshard    the collective of each step (`cost.comm`), and the copies that put chunks in order around it

The seconds of all pieces of a step add up to what a Problem charges for it with nothing hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster import Mesh
from autopar.cluster.types import Device
from autopar.codegen.edges import options
from autopar.cost.comm import collective_s, group_bytes, step_s
from autopar.layout import LOCAL, Step
from autopar.plan import NodePlan
from autopar.problem.graph import Op
from autopar.problem.op_algorithms import Wait
from autopar.problem.prices import Prices
from autopar.problem.settings import Settings
from autopar.rules.site import InnerCollective, Site

COMPUTE = -1
"""The axis of what a rank does on its own."""
INSIDE = -2
"""The axis of what shows of collectives inside operators that run beside their work: the compute stream."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`seconds` of one thing in a row: `kind` is "compute", "copy" or that of a collective on mesh axis `axis`, with `nbytes` in a group; `within`
    says that the collective is one inside an operator."""

    name: str
    kind: str
    axis: int
    seconds: float
    nbytes: float = 0.0
    within: bool = False


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
        chosen = options(node)
        (whole_s, forward_s), (work_s, forward_work_s) = (
            [kind.op_s(op, chosen) / op.count for kind in kinds] for kinds in (self._all[Prices], self._all[_Work]))
        ahead, back = self.prices.waits(op, chosen)
        return (_pieces(op, forward_work_s, forward_s - forward_work_s, ahead),
                _pieces(op, work_s - forward_work_s, whole_s - work_s - (forward_s - forward_work_s), back))

    def steps(self, steps: Sequence[Step], full_bytes: float, name: str) -> tuple[Piece, ...]:
        """The pieces of a way between layouts, for a tensor of `full_bytes` in all."""
        return tuple(piece for step in steps for piece in self._step(step, full_bytes, name))

    def _step(self, step: Step, full_bytes: float, name: str) -> list[Piece]:
        nbytes = group_bytes(step, full_bytes, self.mesh.sizes)
        alone, whole = collective_s(step.kind, nbytes, self.mesh.axes[step.axis]), step_s(step, full_bytes, self.mesh)
        if step.kind in LOCAL:
            return [Piece(name, "copy", COMPUTE, whole, nbytes)] if whole > 0 else []
        found = [Piece(name, step.kind, step.axis, alone, nbytes)] if alone > 0 else []
        if whole > alone:
            copy = Piece(name, "copy", COMPUTE, whole - alone, nbytes)
            found = [*found, copy] if step.kind == "all_gather" else [copy, *found]
        return found


def _pieces(op: Op, work_s: float, inside_s: float, waited: Sequence[Wait]) -> tuple[Piece, ...]:
    """`inside_s` are the seconds of all collectives inside that show, those that are `waited` for among them."""
    name, beside_s = op.name, inside_s - sum(wait.seconds for wait in waited)
    first, last = ([Piece(name, wait.kind, wait.axis, wait.seconds / wait.times, wait.nbytes, within=True)
                    for wait in waited if wait.last == behind for _ in range(wait.times)] for behind in (False, True))
    work = [Piece(name, "compute", COMPUTE, work_s)] if work_s > 0 else []
    beside = [Piece(name, "inside", INSIDE, beside_s)] if beside_s > 1e-15 else []
    return *first, *work, *beside, *last
