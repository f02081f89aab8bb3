"""Executing the steps of a layout change on local tensors. No autograd here; see reshard.py.

The steps come from `layout.steps`, the same function that the cost model prices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autopar._torch import profiling
from autopar.layout import Layout, Step, crosses, dim_of, is_placed, legs, local_shape, most_elements, placed_on, steps
from autopar.runtime.collectives import (
    Later,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_broadcast,
    start_reduce_scatter,
)
from autopar.runtime.count import counting, record
from autopar.runtime.cuts import check_shape, join, joining, pad, parting, take
from autopar.runtime.mesh import Mesh
from autopar.runtime.profiler_ranges import mark

Shape = tuple[int, ...]


def relayout(x: Tensor, src: Layout, dst: Layout, shape: Shape, mesh: Mesh, name: str = "") -> Tensor:
    """`x`, this rank's part under `src` of a tensor of global `shape`, as it lies under `dst`.

    May return `x` itself or a view of it. Raises RunError where `x` has another shape than `src` says, LayoutError
    where no steps lead from `src` to `dst`.
    """
    return Chain(x, src, dst, shape, mesh, name).finish()


def settled(x: Tensor) -> Tensor:
    """`x` with its lazy conjugation and negation bits resolved into memory: collectives and DTensor ignore these
    bits."""
    return x.resolve_conj().resolve_neg()


class Chain:
    """`relayout` whose collectives run in the background, one after the other (`layout.legs`): `go_on` waits for the
    running one and starts the next, `finish` does all that is left. `x` must not change until the first collective is
    over. `behind`: use the second process groups of the axes (Mesh.behind)."""

    def __init__(
        self, x: Tensor, src: Layout, dst: Layout, shape: Shape, mesh: Mesh, name: str = "", *, behind: bool = False
    ) -> None:
        x = settled(x)
        check_shape(x, src, shape, mesh.sizes, mesh.coord, f"reshard {name}".rstrip())
        self.shape, self.mesh, self.name, self.behind = shape, mesh, name, behind
        self.nbytes = most_elements(shape, src, mesh.sizes) * x.element_size()
        """Bytes of the input of the running collective (before the first: of `x`), on the rank whose part is largest,
        so that all ranks have the same number."""
        *self._legs, self._rest = legs(steps(src, dst, mesh.sizes), lambda step: crosses(step, mesh.sizes))
        self._legs.reverse()
        self._come: Later = lambda: x  # gives the present tensor, waiting for the running collective

    @property
    def more(self) -> bool:
        """Whether a collective is yet to begin."""
        return bool(self._legs)

    def go_on(self) -> None:
        """Wait for the running collective and start the next one, which there must be (`more`)."""
        *local, last = self._legs.pop()
        x = self._do(self._come(), local)
        self.nbytes = most_elements(self.shape, last.before, self.mesh.sizes) * x.element_size()
        _note(x, last, self.shape, self.mesh, self.name)
        marked = _marked(x, last, self.shape, self.mesh)
        with mark(*marked):
            done = START[last.kind](x, last, self.shape, self.mesh, behind=self.behind)

        def come() -> Tensor:
            with mark(*marked):
                return done()

        self._come = come  # a closure without x: the input of a collective is freed when it is over

    def wait(self) -> None:
        """Wait for the running collective and drop its result."""
        self._come()

    def finish(self) -> Tensor:
        """The result; runs the steps that are left."""
        while self._legs:
            self.go_on()
        return self._do(self._come(), self._rest)

    def _do(self, x: Tensor, local: Sequence[Step]) -> Tensor:
        for step in local:
            _note(x, step, self.shape, self.mesh, self.name)
            if self.mesh.sizes[step.axis] > 1:
                with mark(*_marked(x, step, self.shape, self.mesh)):
                    x = _LOCAL[step.kind](x, step, self.shape, self.mesh)
        return x


def _marked(x: Tensor, step: Step, shape: Shape, mesh: Mesh) -> tuple[object, ...]:
    """The words by which a profile names a step (runtime.profiler_ranges); empty outside of a profile."""
    return (step.kind, step.axis, step_bytes(step, shape, x.element_size(), mesh)) if profiling() else ()


def _note(x: Tensor, step: Step, shape: Shape, mesh: Mesh, name: str) -> None:
    if counting():
        record(step.kind, step.axis, step_bytes(step, shape, x.element_size(), mesh), name)


def step_bytes(step: Step, shape: Shape, itemsize: int, mesh: Mesh) -> int:
    """Bytes of the tensor as one rank would hold it without the cut on the step's axis (see count.Counted); for a value
    placed on one coordinate the rank there, so that all ranks count alike."""
    layout = tuple("R" if axis == step.axis or is_placed(entry) else entry for axis, entry in enumerate(step.before))
    return torch.Size(local_shape(shape, layout, mesh.sizes, mesh.coord)).numel() * itemsize


def _gather(x: Tensor, step: Step, shape: Shape, mesh: Mesh, *, behind: bool, out: Tensor | None = None) -> Later:
    dim = dim_of(step.before[step.axis])
    how = joining(step, shape, mesh)
    plain = how.even and dim == 0
    if plain:
        finish = start_all_gather(x, step.axis, mesh, out, behind=behind)
        return lambda: finish().flatten(0, 1)
    finish = start_all_gather(pad(x, dim, max(how.lengths)), step.axis, mesh, behind=behind)
    return lambda: join(finish().unbind(0), dim, how, out)


def _reduce(x: Tensor, step: Step, shape: Shape, mesh: Mesh, *, behind: bool) -> Later:
    return start_all_reduce(x, step.axis, mesh, step.before[step.axis], behind=behind)


def _scatter(x: Tensor, step: Step, shape: Shape, mesh: Mesh, *, behind: bool) -> Later:
    parts, dim, length = scatter_parts(x, step, shape, mesh)
    finish = start_reduce_scatter(parts, step.axis, mesh, behind=behind)
    return lambda: finish().narrow(dim, 0, length)


def scatter_parts(x: Tensor, step: Step, shape: Shape, mesh: Mesh) -> tuple[Tensor, int, int]:
    """What each rank of the axis is to get, `[n, ...]` padded to equal lengths; the dim that is cut, and the own
    length."""
    dim = dim_of(step.after[step.axis])
    how = parting(step, shape, mesh)
    own_length = how.lengths[mesh.coord[step.axis]]
    if how.even and dim == 0:
        return x.unflatten(0, (mesh.sizes[step.axis], -1)), dim, own_length
    if dim == 0 and len(set(how.lengths)) == 1:  # sections: one copy puts those of each rank together
        ordered = take(x, 0, [part for ranges in how.ranges for part in ranges])
        return ordered.unflatten(0, (mesh.sizes[step.axis], -1)), dim, own_length
    longest = max(how.lengths)
    return torch.stack([pad(take(x, dim, ranges), dim, longest) for ranges in how.ranges]), dim, own_length


def _exchange(x: Tensor, step: Step, shape: Shape, mesh: Mesh, *, behind: bool) -> Later:
    old, new = dim_of(step.before[step.axis]), dim_of(step.after[step.axis])
    send, receive = parting(step, shape, mesh), joining(step, shape, mesh)
    mine = send.lengths[mesh.coord[step.axis]]
    shapes = []
    for length in receive.lengths:
        got = list(x.shape)
        got[old], got[new] = length, mine
        shapes.append(tuple(got))
    finish = start_all_to_all([take(x, new, ranges) for ranges in send.ranges], shapes, step.axis, mesh, behind=behind)
    return lambda: join(finish(), old, receive)


def _broadcast(x: Tensor, step: Step, shape: Shape, mesh: Mesh, *, behind: bool) -> Later:
    source = placed_on(step.before[step.axis])
    return start_broadcast(
        x if mesh.coord[step.axis] == source else _blank(x, step, shape, mesh), source, step.axis, mesh, behind=behind
    )


def _blank(x: Tensor, step: Step, shape: Shape, mesh: Mesh) -> Tensor:
    """Zeros of the shape that this rank has after the step."""
    return x.new_zeros(local_shape(shape, step.after, mesh.sizes, mesh.coord))


def _slice(x: Tensor, step: Step, shape: Shape, mesh: Mesh) -> Tensor:
    if is_placed(step.after[step.axis]):
        here = mesh.coord[step.axis] == placed_on(step.after[step.axis])
        return x if here else x.new_empty(local_shape(shape, step.after, mesh.sizes, mesh.coord))
    dim = dim_of(step.after[step.axis])
    how = parting(step, shape, mesh)
    ranges = how.ranges[mesh.coord[step.axis]]
    mine = take(x, dim, ranges)
    # a view would keep all of x in memory
    return mine if len(ranges) > 1 else mine.clone(memory_format=torch.contiguous_format)


def _mask(x: Tensor, step: Step, shape: Shape, mesh: Mesh) -> Tensor:
    before = step.before[step.axis]
    here = mesh.coord[step.axis] == (placed_on(before) if is_placed(before) else 0)
    return x if here else _blank(x, step, shape, mesh)


_LOCAL: dict[str, Callable[[Tensor, Step, Shape, Mesh], Tensor]] = {"mask": _mask, "slice": _slice}
START: dict[str, Callable[..., Later]] = {
    "all_gather": _gather,
    "all_reduce": _reduce,
    "all_to_all": _exchange,
    "broadcast": _broadcast,
    "reduce_scatter": _scatter,
}
"""What starts the collective of a step on one tensor: (tensor, step, global shape, mesh, behind) -> what waits for the
result. An all-gather may have it put into a tensor `out`."""
