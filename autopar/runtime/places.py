"""Communication between the places of a pipeline: results are broadcast, and gradients of parameters that several
places hold are summed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch import local_of, wrap_like
from autopar.buckets import shared_by_places
from autopar.errors import RunError
from autopar.runtime.collectives import all_reduce_in_place, wait
from autopar.runtime.count import record
from autopar.runtime.mesh import Mesh
from autopar.runtime.outputs import Spread
from autopar.runtime.params import Held, grad_at_rest

if TYPE_CHECKING:
    from autopar.runtime.scopes import Stage

PIPELINE_AXIS = -1
"""The axis under which transfers between places are counted."""


@dataclass(frozen=True)
class Shared:
    """Parameters `names` that stages on several places read, so that each of these places has a copy. `group` has the
    ranks of these places with the coordinates of this one; `mine`: whether this rank's place is one of them; `device`:
    where collectives run."""

    names: tuple[str, ...]
    group: dist.ProcessGroup
    mine: bool
    device: torch.device

    @contextmanager
    def summing(self, held: Mapping[str, Held]) -> Iterator[None]:
        """All-reduce the gradients that the step inside computes over the copies, so that the copies stay bit-equal.
        Gradients that earlier steps left in `param.grad` are already summed: they are taken out before the step and
        added after it. Frozen parameters, and those without a gradient on any place, are unchanged. Raises RunError
        where a parameter is frozen on some places only."""
        params = {name: held[name].tensor for name in self.names} if self.mine else {}
        earlier = {name: grad_at_rest(param) for name, param in params.items()}
        for param in params.values():
            param.grad = None
        try:
            yield
        except BaseException:
            for name, param in params.items():
                param.grad = earlier[name]
            raise
        given = self._given(params)
        with torch.no_grad():
            for name, param in params.items():
                if given[name] == (True, False, True):
                    self._sum(name, param, earlier[name])
                else:
                    param.grad = earlier[name]
        torn = [name for name, (trains, rests, _) in given.items() if trains and rests]
        if torn:
            raise RunError(
                f"parameter {torn[0]}, of which several places of the pipeline have a copy, is frozen on some of them "
                "and trains on others, where the copies would part: call requires_grad_ for it alike on all ranks"
            )

    def _given(self, params: Mapping[str, Tensor]) -> dict[str, tuple[bool, ...]]:
        """For each parameter: whether any place has a copy that trains, one that is frozen, and one with a gradient."""
        if not params:
            return {}
        mine = [(param.requires_grad, not param.requires_grad, param.grad is not None) for param in params.values()]
        flags = torch.tensor(mine, dtype=torch.int32, device=self.device)
        all_reduce_in_place(flags, dist.ReduceOp.MAX, self.group)
        return {name: tuple(map(bool, each)) for name, each in zip(params, flags.tolist(), strict=True)}

    def _sum(self, name: str, param: Tensor, earlier: Tensor | None) -> None:
        if param.grad is None:
            param.grad = wrap_like(torch.zeros_like(local_of(param)), param)
        grad = local_of(param.grad)
        record("all_reduce", PIPELINE_AXIS, grad.numel() * grad.element_size(), name)
        there = grad.to(self.device)  # from the host, where it rests there
        all_reduce_in_place(there, group=self.group)
        if there is not grad:
            grad.copy_(there)
        if earlier is not None:
            grad.add_(local_of(earlier))


def shared_gradients(stages: Sequence[type[Stage]], places: Sequence[int], mesh: Mesh) -> list[Shared]:
    """The trained parameters that several places hold, by the places; a collective operation where there are any."""
    holders: dict[str, list[int]] = {}
    for kind, place in zip(stages, places, strict=True):
        for name, trained in kind.names().items():
            if trained:
                holders.setdefault(name, []).append(place)
    return [
        Shared(tuple(names), mesh.places_group(where), mesh.place in where, mesh.device)
        for where, names in shared_by_places(holders).items()
    ]


class Everywhere:
    """Broadcasts a tensor of constant shape and dtype from one place to all, once per step. Shape and dtype are sent in
    the first step only: sending Python objects blocks the host and takes two more broadcasts."""

    def __init__(self, place: int, mesh: Mesh) -> None:
        self.place, self.mesh = place, mesh
        self._like: Tensor | None = None  # a meta tensor of its shape and dtype

    def __call__(self, value: Tensor | None) -> Tensor:
        """The tensor `value` of the sending place, on every place (others pass None); a collective operation."""
        group = self.mesh.pipeline_group
        if self._like is None or group is None:
            value, _ = tell(value, None, self.place, self.mesh)
            assert value is not None, "the place that made it has it"
            self._like = torch.empty_like(value, device="meta")
            return value
        held = torch.empty_like(self._like, device=self.mesh.device) if value is None else value.detach().contiguous()
        _broadcast(held, self.place, group)
        return held


def tell(value: Tensor | None, spread: Spread | None, place: int, mesh: Mesh) -> tuple[Tensor | None, Spread | None]:
    """The `value` of `place` and its `spread` (layout and global shape), on every place; None where it has none. A
    collective operation."""
    group = mesh.pipeline_group
    if group is None:
        return value, spread
    box: list[Any] = [None if value is None else (tuple(value.shape), value.dtype, spread)]
    dist.broadcast_object_list(box, group=group, group_src=place)
    if box[0] is None:
        return None, None
    shape, dtype, spread = box[0]
    held = torch.empty(shape, dtype=dtype, device=mesh.device) if value is None else value.detach().contiguous()
    _broadcast(held, place, group)
    return held, spread


def _broadcast(held: Tensor, place: int, group: dist.ProcessGroup) -> None:
    """Fill `held` with what `place` has."""
    # bytes: not all backends know all dtypes
    wait(dist.broadcast(held.reshape(-1).view(torch.uint8), group=group, group_src=place, async_op=True), held)
