"""Layers of experts on ranks that each have some of the experts: the rows go to their experts, and results come back.

A row is one (token, expert) pair. Along an axis of *owners* all ranks have the same tokens, and each takes the rows of its own
experts: its result is a part of a sum. Along an axis of *dispatch* each rank has tokens of its own:

    all to all   how many rows go where, per expert
    all to all   the rows, sorted by expert
    compute      the rows of the own experts
    all to all   the results, back to where the tokens are

and in the backward the last two go the other way (GShard, https://arxiv.org/abs/2006.16668). Which rows go where is data, so
sizes differ from rank to rank and from step to step; no row is dropped and none is padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.collectives import all_to_all
from autopar.runtime.count import record
from autopar.runtime.mesh import Mesh

NAME = "experts_on_ranks"
Back = Callable[[Tensor], Tensor]


def experts_on_ranks(compute: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, chosen: Tensor, gates: Tensor, *, experts: int,
                     axes: Sequence[int], dispatch: Sequence[int], mesh: Mesh) -> Tensor:
    """`hidden [..., d]`, `chosen [..., k]` in `range(experts)`, `gates [..., k]` -> `[..., o]`.

    `axes` cut the experts, major first; those of them in `dispatch` cut the tokens too, on the others the tokens are whole and the
    result is a partial sum. `compute(rows [n, d], ends [e_local]) -> [n, o]` is this rank's experts on rows sorted by
    expert; those of expert i end before `ends[i]`. Any number of rows, none included, may come to a rank.
    """
    k, places = chosen.shape[-1], _places(experts, axes, mesh, chosen.device)
    picks, numbers = _own(chosen.flatten(), [places[a] == mesh.coord[a] for a in axes if a not in dispatch], experts)
    rows = hidden.flatten(0, -2)[picks // k]
    nominal = chosen.numel() / math.prod(mesh.sizes[a] for a in axes if a not in dispatch)
    trips: list[Back] = []
    for axis in dispatch:
        rows, numbers, back = _go(rows, numbers, places[axis], axis, mesh, nominal)
        trips.append(back)
    start, stop = mesh.span(experts, axes)
    out = compute(rows, torch.bincount(numbers - start, minlength=stop - start).cumsum(0))
    for back in reversed(trips):
        out = back(out)
    weighted = out * gates.flatten()[picks].unsqueeze(-1)
    every = weighted.new_zeros(chosen.numel(), out.shape[1]).index_copy(0, picks, weighted)
    return every.view(*chosen.shape, out.shape[1]).sum(-2)


def _places(experts: int, axes: Sequence[int], mesh: Mesh, device: torch.device) -> dict[int, Tensor]:
    """For each axis the coordinate that has each expert."""
    found: dict[int, list[int]] = {axis: [] for axis in axes}
    for expert in range(experts):
        at, size = expert, experts
        for axis in axes:
            step = -(-size // mesh.sizes[axis])
            found[axis].append(at // step)
            size = min(size - at // step * step, step)
            at %= step
    return {axis: torch.tensor(places, device=device) for axis, places in found.items()}


def _own(numbers: Tensor, masks: Sequence[Tensor], experts: int) -> tuple[Tensor, Tensor]:
    """The pairs whose expert all `masks` let through, sorted by expert: their places, and the expert of each."""
    taken = numbers < experts
    for mask in masks:
        taken = taken & mask[numbers.clamp(max=experts - 1)]
    picks = taken.nonzero().squeeze(-1)
    sorted_numbers, order = numbers[picks].sort(stable=True)
    return picks[order], sorted_numbers


def _go(rows: Tensor, numbers: Tensor, places: Tensor, axis: int, mesh: Mesh, nominal: float) -> tuple[Tensor, Tensor, Back]:
    """Rows sorted by expert to the coordinates of `axis` that `places` names: the rows that came, sorted by expert, the expert of
    each, and the way back. `nominal` is the number of rows that a rank sends where routing is balanced."""
    ways, experts = mesh.sizes[axis], len(places)
    sent = torch.bincount(numbers, minlength=experts) * (places == torch.arange(ways, device=places.device).unsqueeze(1))
    record("all_to_all", axis, ways * sent.numel() * sent.element_size(), NAME)
    came = torch.stack(all_to_all(list(sent.unbind(0)), [(experts,)] * ways, axis, mesh))
    leave, arrive = (counts.sum(1).tolist() for counts in (sent, came))
    got = torch.arange(experts, device=places.device).repeat(ways).repeat_interleave(came.flatten())
    got, order = got.sort(stable=True)
    here: Tensor = _Exchange.apply(rows, leave, arrive, axis, mesh, nominal)

    def back(out: Tensor) -> Tensor:
        returned: Tensor = _Exchange.apply(out[_inverse(order)], arrive, leave, axis, mesh, nominal)
        return returned

    return here[order], got, back


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=order.device))


class _Exchange(torch.autograd.Function):
    """`leave[i]` rows to coordinate i of the axis, `arrive[i]` rows from it; gradients go the other way.

    Counted with the rows of balanced routing, as it is priced: over all ranks the sum is exact.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, leave: list[int], arrive: list[int], axis: int, mesh: Mesh, nominal: float) -> Tensor:
        ctx.about = leave, arrive, axis, mesh, nominal
        return _exchange(rows, *ctx.about)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        leave, arrive, *about = ctx.about
        return _exchange(grads[0], arrive, leave, *about), None, None, None, None, None


def _exchange(rows: Tensor, leave: list[int], arrive: list[int], axis: int, mesh: Mesh, nominal: float) -> Tensor:
    record("all_to_all", axis, round(mesh.sizes[axis] * nominal * rows.shape[1] * rows.element_size()), NAME)
    parts = all_to_all(list(rows.split(leave)), [(n, rows.shape[1]) for n in arrive], axis, mesh)
    return torch.cat(parts)
