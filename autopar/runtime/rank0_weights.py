"""Consistent weights and seeds: those of rank 0 are broadcast to all ranks, as DistributedDataParallel does.

Each rank builds the user's model for itself. Without a common seed the ranks have different random weights, and shards
of different models would train together. Weights that are set later, on each rank, are compared before the first step
(`check_replicas`).
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import RunError
from autopar.runtime.collectives import all_reduce_in_place
from autopar.runtime.shared_results import together

if TYPE_CHECKING:
    from autopar.runtime.mesh import Mesh
    from autopar.runtime.params import Held

SAMPLES = 64
"""Elements of each tensor that are compared: random numbers differ in the first few."""


@torch.no_grad()
def from_first(tensors: Mapping[str, Tensor], seed: int, device: torch.device) -> tuple[Mapping[str, Tensor], int]:
    """`tensors` unchanged where all ranks have the same (by fingerprint), else copies of those of rank 0, with a
    warning; and the `seed` of rank 0, an integer below 2**53. A collective operation; collectives run on `device`."""
    if not together():
        return tensors, seed
    mine = torch.stack(
        [torch.tensor(seed, dtype=torch.float64, device="cpu"), *(fingerprint(tensor) for tensor in tensors.values())]
    ).to(device)
    first = mine.clone()
    dist.broadcast(first, src=0)
    seed, other = int(first[0]), (mine != first)[1:].to(torch.int32)
    if not tensors:
        return tensors, seed
    all_reduce_in_place(other, dist.ReduceOp.MAX)
    if not other.any():
        return tensors, seed
    names = [name for name, differs in zip(tensors, other.tolist(), strict=True) if differs]
    if dist.get_rank() == 0:
        warnings.warn(
            f"the ranks made {len(names)} tensors of the model each in their own way "
            f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): those of rank 0 are taken. "
            "Seed all ranks alike before the model is made, or load weights, to save the broadcast",
            stacklevel=2,
        )
    return {name: _broadcast(tensor, device) for name, tensor in tensors.items()}, seed


def check_program(source: str, plan: str, device: torch.device) -> None:
    """Compare the emitted `source` over all ranks; a collective operation, on `device`. Raises RunError, on every rank,
    where they have different ones, with what each rank says of its `plan`: they would wait for each other in different
    collectives."""
    if not together():
        return
    mine = zlib.crc32(source.encode())
    told = torch.tensor([mine, -mine], device=device)
    all_reduce_in_place(told, dist.ReduceOp.MAX)
    most, least = told.tolist()
    if most == -least:
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, plan))
    other = next(rank for rank, (number, _) in enumerate(everyone) if number != everyone[0][0])
    raise RunError(
        f"ranks have different programs: rank 0 {everyone[0][1]}, rank {other} {everyone[other][1]}. Give "
        "autopar.load() the same saved plan on every rank, or call autopar.compile() on all of them, of one version"
    )


@torch.no_grad()
def check_replicas(
    held: Iterable[Held], seed: int, mesh: Mesh, shared: Iterable[tuple[Sequence[Held], dist.ProcessGroup]]
) -> None:
    """Compare replicated parameters and buffers over the axes on which they are whole, copies on several places of a
    pipeline (`shared`, each with its process group), and the seed; a collective operation of all ranks. Raises
    RunError, on every rank, where replicas differ, since they get the same gradients and would stay different; and
    where seeds differ, since replicas would draw different random numbers."""
    if mesh.device_mesh is None or mesh.ranks == 1:
        return
    known, wrong = list(held), list[str]()
    for axis, size in enumerate(mesh.sizes):
        if size > 1:
            wrong += _differing([one for one in known if one.info.entries[axis] == "R"], mesh.group(axis), mesh.device)
    for copies, group in shared:
        wrong += _differing(copies, group, mesh.device)
    told = torch.tensor([len(wrong), seed, -seed], device=mesh.device)
    all_reduce_in_place(told, dist.ReduceOp.MAX)
    anywhere, most_seed, least_seed = told.tolist()
    if most_seed != -least_seed:
        raise RunError(
            f"ranks draw random numbers from seeds of their own, {-least_seed} to {most_seed} (this one {seed}): "
            "replicas would have other masks of dropout. Give set_rng_state() the same state on every rank"
        )
    if anywhere:
        names = (
            f"{', '.join(dict.fromkeys(wrong[:3]))}{', ...' if len(wrong) > 3 else ''}"
            if wrong
            else "parameters of other ranks"
        )
        raise RunError(
            f"copies of one tensor are not the same on all ranks that have one: {names}. Where weights are set after "
            "compile, set them alike: from one file, from load_full(state_dict), or with random numbers of one seed "
            "(torch's DTensor draws others on each CPU rank)"
        )


def _differing(copies: Sequence[Held], group: dist.ProcessGroup | None, device: torch.device) -> list[str]:
    """The names of the `copies` whose fingerprints differ over the ranks of `group`, which all pass the same list."""
    if not copies:
        return []
    least = torch.stack([fingerprint(one.local) for one in copies]).to(device)
    most = least.clone()
    all_reduce_in_place(least, dist.ReduceOp.MIN, group)
    all_reduce_in_place(most, dist.ReduceOp.MAX, group)
    return [one.name for one, differs in zip(copies, (least != most).tolist(), strict=True) if differs]


def fingerprint(tensor: Tensor) -> Tensor:
    """A float64 scalar that depends on up to SAMPLES evenly spaced elements: sum of (i + 1) * element i. Tensors that
    differ elsewhere only have the same."""
    flat = (torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()).flatten()
    some = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].cpu().double()
    return (some * torch.arange(1, len(some) + 1, dtype=torch.float64, device=some.device)).nan_to_num().sum()


def _broadcast(tensor: Tensor, device: torch.device) -> Tensor:
    sent = tensor.detach().to(device).contiguous().clone()
    dist.broadcast(sent.reshape(-1).view(torch.uint8), src=0)  # bytes: not all backends know all dtypes
    return sent.to(tensor.device)
