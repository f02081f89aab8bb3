"""Layers of experts on ranks that each have some of the experts: tokens go to their experts, and results come back.

Along an axis of *owners* all ranks have the same tokens, and each computes those of its own experts: its result is a
part of a sum. Along an axis of *dispatch* each rank has tokens of its own:

    all to all   how many tokens go where
    all to all   the tokens, each with the numbers of its experts and their gates
    compute      what the experts there make of them, summed up by token
    all to all   the sums, back to where the tokens are

and in the backward the last two go the other way (GShard, https://arxiv.org/abs/2006.16668). Along each axis a token
goes once to a coordinate, however many of its experts are there, and one result comes back: with nodes on the first
axis, once to each node, and from there to its ranks (as DeepEP does, https://github.com/deepseek-ai/DeepEP). Who goes
where is data, so sizes differ from rank to rank and from step to step; no token is dropped and none is padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.routing import rows_sent
from autopar.runtime.collectives import all_to_all
from autopar.runtime.count import record
from autopar.runtime.mesh import Mesh

NAME = "experts_on_ranks"
Compute = Callable[[Tensor, Tensor], Tensor]


def experts_on_ranks(
    compute: Compute,
    hidden: Tensor,
    chosen: Tensor,
    gates: Tensor,
    *,
    experts: int,
    axes: Sequence[int],
    dispatch: Sequence[int],
    mesh: Mesh,
) -> Tensor:
    """`hidden [..., d]`, `chosen [..., k]` in `range(experts)`, `gates [..., k]` -> `[..., o]`, of the dtype that
    tokens and gates promote to.

    `axes` cut the experts, major first; those of them in `dispatch` cut the tokens too, on the others the tokens are
    whole and the result is a partial sum. `compute(rows [n, d], ends [e_local]) -> [n, o]` is this rank's experts on
    rows sorted by expert; those of expert i end before `ends[i]`. Any number of rows, none included, may come to a
    rank. Sums are of float32 at least; they travel in the dtype of the tokens.
    """
    flat, numbers, weights = (tensor.flatten(0, -2) for tensor in (hidden, chosen, gates))
    layer = _Layer(compute, experts, mesh, mesh.span(experts, axes), _places(experts, axes, mesh, chosen.device))
    owners = [axis for axis in axes if axis not in dispatch]
    for axis in owners:
        numbers = layer.here(numbers, axis)
    nominal = rows_sent(
        len(flat),
        experts,
        chosen.shape[-1],
        [mesh.sizes[a] for a in dispatch],
        math.prod(mesh.sizes[a] for a in owners),
    )
    out = layer.reach(flat, numbers, weights, list(zip(dispatch, nominal, strict=True)))
    return out.to(torch.promote_types(hidden.dtype, gates.dtype)).view(*chosen.shape[:-1], out.shape[1])


def _places(experts: int, axes: Sequence[int], mesh: Mesh, device: torch.device) -> dict[int, Tensor]:
    """For each axis a tensor [experts + 1]: the coordinate that has each expert, and -1 for the number `experts`, which
    stands for no expert."""
    found: dict[int, list[int]] = {axis: [] for axis in axes}
    for expert in range(experts):
        at, size = expert, experts
        for axis in axes:
            step = -(-size // mesh.sizes[axis])
            found[axis].append(at // step)
            size = min(size - at // step * step, step)
            at %= step
    return {axis: torch.tensor([*places, -1], device=device) for axis, places in found.items()}


@dataclass(frozen=True)
class _Layer:
    """The experts of this rank, numbers `span[0]` to `span[1]` of `experts`, and the `places` of all. Numbers from
    `experts` on stand for no expert."""

    compute: Compute
    experts: int
    mesh: Mesh
    span: tuple[int, int]
    places: dict[int, Tensor]

    def here(self, numbers: Tensor, axis: int) -> Tensor:
        """`numbers` with those of experts on other coordinates of the axis replaced by `experts` (no expert)."""
        return numbers.masked_fill(self._at(numbers, axis) != self.mesh.coord[axis], self.experts)

    def _at(self, numbers: Tensor, axis: int) -> Tensor:
        return self.places[axis][numbers.clamp(max=self.experts)]

    def reach(self, hidden: Tensor, numbers: Tensor, gates: Tensor, trips: Sequence[tuple[int, float]]) -> Tensor:
        """The sum over the experts of each token. `trips`: the axes that are left to send rows along, each with the
        number of rows that a rank sends there under balanced routing."""
        if not trips:
            return self._computed(hidden, numbers, gates)
        (axis, nominal), *further = trips
        place, token = self._wanted(numbers, axis).nonzero(as_tuple=True)
        token = token.clone()  # both are views of one tensor, which the backward would keep
        trip = _Trip.plan(torch.bincount(place, minlength=self.mesh.sizes[axis]), axis, self.mesh, nominal)
        hidden_there, gates_there, numbers_there = _Travel.apply(trip, hidden[token], gates[token], numbers[token])
        out = self.reach(hidden_there, self.here(numbers_there, axis), gates_there, further)
        (back,) = _Travel.apply(trip.back, out.to(hidden.dtype))
        return _summed(back, token, len(hidden))

    def _wanted(self, numbers: Tensor, axis: int) -> Tensor:
        """Whether some expert of each token is at each coordinate: `[ways, tokens]`."""
        found = numbers.new_zeros(self.mesh.sizes[axis] + 1, len(numbers), dtype=torch.bool)
        # -1: behind the last coordinate
        return found.scatter_(0, self._at(numbers, axis).remainder(len(found)).t(), True)[:-1]

    def _computed(self, hidden: Tensor, numbers: Tensor, gates: Tensor) -> Tensor:
        """The results of this rank's experts for its (token, expert) pairs, which are sorted by expert, added up by
        token."""
        own = numbers.flatten()
        picks = (own < self.experts).nonzero().squeeze(-1)
        sorted_numbers, order = own[picks].sort(stable=True)
        picks, start, stop = picks[order], *self.span
        token = picks // numbers.shape[1]
        out = self.compute(hidden[token], torch.bincount(sorted_numbers - start, minlength=stop - start).cumsum(0))
        return _summed(out * gates.flatten()[picks].unsqueeze(-1), token, len(hidden))


def _summed(rows: Tensor, token: Tensor, tokens: int) -> Tensor:
    """The sum of the rows of each token, in float32 at least."""
    result: Tensor = _Sum.apply(rows, token, tokens)
    return result


class _Sum(torch.autograd.Function):
    """Keeps the numbers of tokens; `index_add` would keep the rows too, in the dtype of the sum."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(token)
        ctx.dtype = rows.dtype
        dtype = torch.promote_types(rows.dtype, torch.float32)
        return rows.new_zeros(tokens, rows.shape[1], dtype=dtype).index_add_(0, token, rows.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (token,) = ctx.saved_tensors
        return grads[0].index_select(0, token).to(ctx.dtype), None, None


@dataclass(frozen=True)
class _Trip:
    """`leave[i]` rows go to coordinate i of the axis, `arrive[i]` come from it. Counted with the rows of balanced
    routing, as it is priced."""

    leave: list[int]
    arrive: list[int]
    axis: int
    mesh: Mesh
    nominal: float

    @classmethod
    def plan(cls, leave: Tensor, axis: int, mesh: Mesh, nominal: float) -> _Trip:
        """All ranks tell each other how many rows they send."""
        ways = mesh.sizes[axis]
        record("all_to_all", axis, ways * leave.numel() * leave.element_size(), NAME)
        arrive = torch.cat(all_to_all(list(leave.split(1)), [(1,)] * ways, axis, mesh))
        leaving, arriving = torch.stack([leave, arrive]).tolist()
        return cls(leaving, arriving, axis, mesh, nominal)

    @property
    def back(self) -> _Trip:
        """The way back."""
        return replace(self, leave=self.arrive, arrive=self.leave)

    def go(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The rows that come where these leave: side by side as bytes, in one exchange. Copied out of it, because a
        view of another dtype needs a place of its own even where there are no rows."""
        rows = torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors], 1)
        record("all_to_all", self.axis, round(self.mesh.sizes[self.axis] * self.nominal * rows.shape[1]), NAME)
        came = torch.cat(
            all_to_all(list(rows.split(self.leave)), [(n, rows.shape[1]) for n in self.arrive], self.axis, self.mesh)
        )
        parts = came.split([tensor.shape[1] * tensor.element_size() for tensor in tensors], 1)
        return tuple(
            part.clone(memory_format=torch.contiguous_format).view(tensor.dtype)
            for part, tensor in zip(parts, tensors, strict=True)
        )


class _Travel(torch.autograd.Function):
    """Tensors of as many rows go along `trip`; the gradients of those that have one come back."""

    @staticmethod
    def forward(ctx: Any, trip: _Trip, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.trip = trip
        return trip.go(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        came = iter(ctx.trip.back.go(*(grad for grad, want in zip(grads, wanted, strict=True) if want)))
        return None, *(next(came) if want else None for want in wanted)
