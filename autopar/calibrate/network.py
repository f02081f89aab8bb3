"""What ranks do together: each collective on groups of each size of each level, as emitted programs run it. Runs on
ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.calibrate.clock import Clock
from autopar.calibrate.cold_operands import Cold
from autopar.calibrate.samples import Sample
from autopar.runtime.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from autopar.runtime.mesh import Mesh

SIZES = {
    "cpu": tuple(1 << power for power in (10, 14, 16, 18, 20, 21, 22, 23, 24)),
    "cuda": tuple(1 << power for power in range(10, 31, 2)),
}
"""Bytes of a collective: what one group holds together (`cost.comm.collective_s`)."""

LONG = 4
"""No larger size is measured once one run takes so many windows."""

BETWEEN = 320
"""Rows, columns and depth of a matmul between two collectives."""

FEWEST = 4
"""So many sizes are measured however long they take."""


@dataclass(frozen=True, slots=True)
class Group:
    """Groups of `members` parts of one level side by side, among `ranks` in all; each part has `inside` ranks."""

    ranks: int
    members: int
    inside: int = 1

    @property
    def mesh(self) -> Mesh:
        """A mesh whose axis 1 is such a group."""
        return Mesh(
            (self.ranks // (self.members * self.inside), self.members, self.inside),
            ("outer", "group", "inner"),
            _kind(),
        )


def collectives(clock: Clock, kind: str, group: Group) -> list[Sample]:
    """Seconds of `kind` at growing sizes; all groups side by side do the same."""
    mesh, cold, found = group.mesh, Cold(clock.kind), list[Sample]()
    for nbytes in SIZES[clock.kind]:
        run, runs = _RUNS[kind](nbytes // 4, mesh, cold)
        seconds = clock.together_s(run) if clock.kind == "cuda" else clock.between_s(run, _use())
        found.append(Sample(kind, (nbytes,), seconds / runs, group.members))
        if found[-1].seconds * runs > LONG * clock.window_s and len(found) >= FEWEST:
            break
    return found


def groups(sizes: Sequence[int]) -> dict[int, list[Group]]:
    """The groups to measure by level, of levels with `sizes` parts, outermost first: of as many members as a mesh axis
    can have."""
    ranks = math.prod(sizes)
    return {
        level: [Group(ranks, n, math.prod(sizes[level + 1 :])) for n in range(2, size + 1) if size % n == 0]
        for level, size in enumerate(sizes)
    }


def _kind() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


Run = Callable[[], Tensor]


def _use() -> Callable[[Tensor], object]:
    """What a rank does with a result: it reads it, and multiplies for about a millisecond. Ranks that outnumber cores
    take turns meanwhile, so that threads have to be woken and caches filled again; a GPU goes on with its own
    stream."""
    x = torch.randn(BETWEEN, BETWEEN)
    return lambda result: (result.sum(), x @ x)


def _reduce(elements: int, mesh: Mesh, cold: Cold) -> tuple[Run, int]:
    return lambda: cold.keep(all_reduce(cold.next(elements), 1, mesh)), 1


def _gather(elements: int, mesh: Mesh, cold: Cold) -> tuple[Run, int]:
    return lambda: cold.keep(all_gather(cold.next(elements // mesh.sizes[1]), 1, mesh)), 1


def _scatter(elements: int, mesh: Mesh, cold: Cold) -> tuple[Run, int]:
    members = mesh.sizes[1]
    return lambda: cold.keep(reduce_scatter(cold.next(members, elements // members), 1, mesh)), 1


def _exchange(elements: int, mesh: Mesh, cold: Cold) -> tuple[Run, int]:
    members = mesh.sizes[1]
    each = max(1, elements // members**2)
    return lambda: cold.keep(all_to_all([cold.next(each) for _ in range(members)], [(each,)] * members, 1, mesh)[0]), 1


def _broadcast(elements: int, mesh: Mesh, cold: Cold) -> tuple[Run, int]:
    return lambda: broadcast(cold.next(elements), 0, 1, mesh), 1


def _send(elements: int, mesh: Mesh, cold: Cold) -> tuple[Run, int]:
    """There and back between neighbours: two sends in a row."""
    x, group, coord = cold.next(elements), mesh.group(1), mesh.coord[1]
    peer = coord ^ 1
    if peer >= mesh.sizes[1]:  # the last one of an odd number has nobody
        return lambda: x, 2

    def run() -> Tensor:
        for turn in (0, 1):
            _pass(x, coord % 2 == turn, peer, group)
        return x

    return run, 2


def _pass(x: Tensor, sends: bool, peer: int, group: dist.ProcessGroup | None) -> None:
    # as torch's pipelines
    work = dist.batch_isend_irecv([dist.P2POp(dist.isend if sends else dist.irecv, x, group=group, group_peer=peer)])
    for each in work:
        each.wait()


_RUNS: dict[str, Callable[[int, Mesh, Cold], tuple[Run, int]]] = {
    "all_reduce": _reduce,
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
    "broadcast": _broadcast,
    "send": _send,
}
KINDS = tuple(_RUNS)
