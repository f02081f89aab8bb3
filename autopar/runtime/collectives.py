"""Raw collectives along one mesh axis, on tensors whose cut dim is the first. No autograd, no layouts.

With `behind`, a collective uses the axis's second process group, where there is one (Mesh.behind), so that it and those
of the first group do not wait for each other.

All are exact for every dtype. Those that backends do not send are sent as another one of as many bytes, and sums of
small integers, which backends lack or add up otherwise, are computed in wider ones.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import RunError
from autopar.runtime import failures
from autopar.runtime.mesh import Mesh

Later = Callable[[], Tensor]
Result = TypeVar("Result")
# torch 2.13 renamed the two and warns at every call of the old names; 2.11 has the old ones only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
CARRIED = {
    torch.bool: torch.uint8,
    torch.int16: torch.float16,
    torch.uint16: torch.float16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
"""The dtype as which the bytes of another one are moved, where gloo or NCCL do not know that."""
SUMMED = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}
"""The dtype in which another one is reduced: backends lack these, and would add up booleans. Sums of integers wrap as
those of their own dtype."""
OPS = {"P": dist.ReduceOp.SUM, "Pmax": dist.ReduceOp.MAX, "Pmin": dist.ReduceOp.MIN}


def all_reduce(x: Tensor, axis: int, mesh: Mesh, entry: str = "P") -> Tensor:
    """The sum ("P"), maximum ("Pmax") or minimum ("Pmin") over the ranks of `axis`: a new tensor of x's shape.

    A sum of booleans is their "or".
    """
    return start_all_reduce(x, axis, mesh, entry)()


def start_all_reduce(x: Tensor, axis: int, mesh: Mesh, entry: str = "P", *, behind: bool = False) -> Later:
    """`all_reduce` in the background; the result comes from calling what this returns."""
    if mesh.sizes[axis] == 1:
        return lambda: x
    if x.dtype == torch.bool:
        done = start_all_reduce(x.to(torch.uint8), axis, mesh, "Pmax" if entry == "P" else entry, behind=behind)
        return lambda: done().to(torch.bool)
    if x.dtype in SUMMED:
        total = start_all_reduce(x.to(SUMMED[x.dtype]), axis, mesh, entry, behind=behind)
        return lambda: total().to(x.dtype)
    out = x.clone(memory_format=torch.contiguous_format)
    return then(
        dist.all_reduce(out, OPS[entry], group=mesh.group(axis, behind=behind), async_op=True), out, lambda: out
    )


def broadcast(x: Tensor, source: int, axis: int, mesh: Mesh) -> Tensor:
    """What coordinate `source` of `axis` has, on all its ranks; `x` says shape and dtype elsewhere and may be
    overwritten there."""
    return start_broadcast(x, source, axis, mesh)()


def start_broadcast(x: Tensor, source: int, axis: int, mesh: Mesh, *, behind: bool = False) -> Later:
    """`broadcast` in the background; the result comes from calling what this returns."""
    out = x.contiguous()
    return then(
        dist.broadcast(_carried(out), group=mesh.group(axis, behind=behind), group_src=source, async_op=True),
        out,
        lambda: out,
    )


def all_gather(x: Tensor, axis: int, mesh: Mesh) -> Tensor:
    """`[m, ...]` on each of n ranks -> `[n, m, ...]`; m must be the same on all."""
    return start_all_gather(x, axis, mesh)()


def start_all_gather(x: Tensor, axis: int, mesh: Mesh, out: Tensor | None = None, *, behind: bool = False) -> Later:
    """`all_gather` in the background, into `out` (`[n * m, ...]`, contiguous) where that is given; the result comes
    from calling what this returns. `x` must not change until then."""
    x = x.contiguous()
    into = x.new_empty((mesh.sizes[axis] * x.shape[0], *x.shape[1:])) if out is None else out
    return then(
        _all_gather(_carried(into), _carried(x), group=mesh.group(axis, behind=behind), async_op=True),
        into,
        lambda: into.view(mesh.sizes[axis], *x.shape),
    )


def start_all_gather_from_all(x: Tensor, mesh: Mesh) -> Later:
    """`[m]` on each of the ranks of `mesh`, of all places -> `[ranks, m]` in the background."""
    out = x.new_empty(mesh.ranks * x.shape[0])
    return then(_all_gather(out, x, async_op=True), out, lambda: out.view(mesh.ranks, -1))


def reduce_scatter(x: Tensor, axis: int, mesh: Mesh) -> Tensor:
    """The sum over ranks of part [i] of `[n, m, ...]`, on rank i of the axis: `[m, ...]`."""
    return start_reduce_scatter(x, axis, mesh)()


def start_reduce_scatter(x: Tensor, axis: int, mesh: Mesh, out: Tensor | None = None, *, behind: bool = False) -> Later:
    """`reduce_scatter` in the background, into `out` where that is given; the result comes from calling what this
    returns. `x` must not change until then."""
    if x.dtype in SUMMED:
        done = start_reduce_scatter(x.to(SUMMED[x.dtype]), axis, mesh, behind=behind)
        return lambda: done().to(x.dtype)
    x = x.contiguous()
    into = x.new_empty(x.shape[1:]) if out is None else out
    return then(
        _reduce_scatter(into, x.flatten(0, 1), group=mesh.group(axis, behind=behind), async_op=True), into, lambda: into
    )


def all_to_all(parts: list[Tensor], shapes: list[tuple[int, ...]], axis: int, mesh: Mesh) -> list[Tensor]:
    """Send `parts[i]` to rank i of the axis; get the tensors of `shapes`, one from each."""
    return start_all_to_all(parts, shapes, axis, mesh)()


def start_all_to_all(
    parts: list[Tensor], shapes: list[tuple[int, ...]], axis: int, mesh: Mesh, *, behind: bool = False
) -> Callable[[], list[Tensor]]:
    """`all_to_all` in the background; the result comes from calling what this returns."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.cat([part.reshape(-1) for part in parts])
    out = flat.new_empty(sum(sizes))
    work = dist.all_to_all_single(
        _carried(out),
        _carried(flat),
        sizes,
        [part.numel() for part in parts],
        group=mesh.group(axis, behind=behind),
        async_op=True,
    )
    return then(work, out, lambda: [got.view(shape) for got, shape in zip(out.split(sizes), shapes, strict=True)])


def _carried(x: Tensor) -> Tensor:
    """The memory of `x` in a dtype that backends send."""
    return x.view(CARRIED[x.dtype]) if x.dtype in CARRIED else x


def all_reduce_in_place(x: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> None:
    """Reduce `x` over the ranks of `group` (None: all)."""
    failures.talks()
    wait(dist.all_reduce(x, op, group=group, async_op=True), x)


def objects_of_all(mine: Any, mesh: Mesh) -> list[Any]:
    """The picklable object `mine` of every rank of `mesh`, of all places, in their order."""
    sent = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8).to(mesh.device)
    lengths = start_all_gather_from_all(torch.tensor([sent.numel()], device=mesh.device), mesh)().flatten().tolist()
    padded = sent.new_zeros(max(lengths))
    padded[: sent.numel()] = sent
    rows = start_all_gather_from_all(padded, mesh)().cpu()
    return [pickle.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]


def wait(work: Any, x: Tensor) -> None:
    """Wait for `work`, a collective on `x` (None: there is nothing to wait for). Raises RunError where other ranks do
    not come: soon where one has left a note of its failure (gloo only), else when the collective fails (NCCL ends the
    process then)."""
    if work is None:
        return
    said = ""
    try:
        while not said and not _came(work, x):
            said = failures.of_others()
    except RuntimeError as error:
        failures.gave_up()
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(
            f"waiting for the other ranks in a collective failed ({first}): {failures.of_others() or _UNKNOWN}. "
            f"{failures.MEND}"
        ) from error
    if said:
        failures.gave_up()
        raise RunError(f"waiting for the other ranks in a collective: {said}. {failures.MEND}")


_UNKNOWN = (
    "one of them has raised an error of its own, has ended, or is in another step. Look for the rank that failed "
    "first: what it says is the cause"
)


def _came(work: Any, x: Tensor) -> bool:
    """Wait for `work`, on the CPU for LOOK_S at most; whether it is done. On GPUs `wait` only queues behind it, and
    would block with a limit. Raises RuntimeError where the collective has failed: then `wait` ends before the limit (a
    failed reduce-scatter of gloo never says that it is completed)."""
    if not x.is_cpu:
        work.wait()
        return True
    began_s = time.monotonic()
    try:
        work.wait(timedelta(seconds=failures.LOOK_S))
    except RuntimeError:
        if time.monotonic() - began_s < failures.LOOK_S / 2:
            raise
        return False
    return True


def then(work: Any, x: Tensor, result: Callable[[], Result]) -> Callable[[], Result]:
    """What waits for `work`, a collective on `x` that has begun, and gives its `result`."""
    failures.talks()

    def finish() -> Result:
        wait(work, x)
        return result()

    return finish
