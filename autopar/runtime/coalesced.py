"""Buckets: many tensors that take the same chain of collectives in the background. Small ones are packed into one flat
buffer for each collective; a large one has a collective of its own, since packing it would take longer than to start
that.

Exact for uneven shards: they are padded to equal lengths, as in `moves`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.buckets import BUCKET_BYTES, travels_alone
from autopar.layout import Step, dim_of, most_elements
from autopar.runtime.collectives import start_all_gather, start_reduce_scatter, then
from autopar.runtime.count import counting, record
from autopar.runtime.cuts import join, joining, pad
from autopar.runtime.mesh import Mesh
from autopar.runtime.moves import START, Shape, scatter_parts, settled, step_bytes
from autopar.runtime.profiler_ranges import mark

Finish = Callable[[], list[Tensor]]


class Together:
    """The collectives of one bucket, in the background.

    `tensors[i]` is this rank's part of a tensor of global `shapes[i]` and takes the steps `ways[i]`. All ways have the
    same kinds of steps on the same axes (of two or more ranks), and all tensors one dtype. The constructor starts the
    first collective. `go_on` waits for the running one and starts the next; after the last one it frees that one's
    input.

    Tensors of `limit_bytes` or more on a rank, before they are scattered or once they are gathered, are not packed;
    they must not change until the first collective is over. `names` are for runtime.count. `into`: contiguous tensors
    that the last all-gathers put their results into, from their start on.
    """

    def __init__(
        self,
        ways: Sequence[Sequence[Step]],
        tensors: Sequence[Tensor],
        shapes: Sequence[Shape],
        mesh: Mesh,
        names: Sequence[str],
        into: Sequence[Tensor] = (),
        limit_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.shapes, self.mesh, self.names, self.into = shapes, mesh, names, into
        large = [
            travels_alone(
                max(most_elements(shape, layout, mesh.sizes) for layout in (way[0].before, way[-1].after))
                * x.element_size(),
                limit_bytes,
            )
            for way, x, shape in zip(ways, tensors, shapes, strict=True)
        ]
        self._alone = [index for index, own in enumerate(large) if own]
        self._packed = [index for index, own in enumerate(large) if not own]
        self._left = list(zip(*ways, strict=True))[::-1]
        self._running = self._start(tensors)

    @property
    def more(self) -> bool:
        """Whether a collective is yet to begin."""
        return bool(self._left)

    @property
    def later(self) -> bool:
        """Whether `go_on` is to be called again: a collective is yet to start, or the running one has an input that is
        larger than its result (reduce-scatter) and is to be freed."""
        return self.more or self._scatters

    def go_on(self) -> bool:
        """Wait for the running collective, and start the next one if there is one. Returns `later`."""
        came = self._running()
        self._running = self._start(came) if self._left else self._keep(came)
        return self.later

    def wait(self) -> None:
        """Wait for the running collective and drop its result."""
        self._running()

    def finish(self) -> list[Tensor]:
        """Run the collectives that are left. Returns the resulting tensors."""
        while self._left:
            self.go_on()
        return self._running()

    def _keep(self, came: list[Tensor]) -> Finish:
        """Keep only the results `came`: the collective's input buffer is freed."""
        self._scatters = False
        return lambda: came

    def _start(self, tensors: Sequence[Tensor]) -> Finish:
        """Start the next collective of all tensors. Returns the function that waits for it and gives the results."""
        steps = self._left.pop()
        self.nbytes = sum(
            most_elements(shape, step.before, self.mesh.sizes) * x.element_size()
            for step, x, shape in zip(steps, tensors, self.shapes, strict=True)
        )
        self._count(steps, tensors)
        self._scatters = steps[0].kind == "reduce_scatter"
        marked = ("sync", steps[0].kind, steps[0].axis)
        with mark(*marked):
            done = self._begin(steps, tensors)

        def finish() -> list[Tensor]:
            with mark(*marked):
                return done()

        return finish

    def _begin(self, steps: Sequence[Step], tensors: Sequence[Tensor]) -> Finish:
        """Start one collective for all tensors that are packed, and one for each of the others."""
        kind, packed, alone = steps[0].kind, self._packed, self._alone
        into = self.into if not self._left else ()
        together: Finish = list
        if packed:
            together = _PACKED[kind](
                [steps[i] for i in packed],
                [tensors[i] for i in packed],
                [self.shapes[i] for i in packed],
                self.mesh,
                [into[i] for i in packed] if into else (),
            )
        own = [
            START[kind](
                settled(tensors[i]),
                steps[i],
                self.shapes[i],
                self.mesh,
                behind=True,
                **({"out": into[i]} if into else {}),
            )
            for i in alone
        ]

        def finish() -> list[Tensor]:
            results = dict(zip((*packed, *alone), (*together(), *(done() for done in own)), strict=True))
            return [results[index] for index in range(len(results))]

        return finish

    def _count(self, steps: Sequence[Step], tensors: Sequence[Tensor]) -> None:
        if counting():
            for step, x, shape, name in zip(steps, tensors, self.shapes, self.names, strict=True):
                record(step.kind, step.axis, step_bytes(step, shape, x.element_size(), self.mesh), name)


def _reduce(
    steps: Sequence[Step], tensors: Sequence[Tensor], shapes: Sequence[Shape], mesh: Mesh, into: Sequence[Tensor]
) -> Finish:
    """Start one all-reduce of all tensors."""
    flat = torch.cat([x.reshape(-1) for x in tensors])
    work = dist.all_reduce(flat, group=mesh.group(steps[0].axis, behind=True), async_op=True)
    sizes = [tuple(x.shape) for x in tensors]
    return then(work, flat, lambda: [piece.view(size) for piece, size in zip(_split(flat, sizes), sizes, strict=True)])


def _scatter(
    steps: Sequence[Step], tensors: Sequence[Tensor], shapes: Sequence[Shape], mesh: Mesh, into: Sequence[Tensor]
) -> Finish:
    """Start one reduce-scatter of all tensors."""
    cuts = [scatter_parts(x, step, shape, mesh) for x, step, shape in zip(tensors, steps, shapes, strict=True)]
    sizes, lengths = [tuple(piece.shape[1:]) for piece, _, _ in cuts], [(dim, length) for _, dim, length in cuts]
    done = start_reduce_scatter(
        torch.cat([piece.flatten(1) for piece, _, _ in cuts], 1), steps[0].axis, mesh, behind=True
    )
    del cuts

    def finish() -> list[Tensor]:
        pieces = zip(_split(done(), sizes), sizes, lengths, strict=True)
        return [piece.view(size).narrow(dim, 0, length) for piece, size, (dim, length) in pieces]

    return finish


def _gather(
    steps: Sequence[Step], tensors: Sequence[Tensor], shapes: Sequence[Shape], mesh: Mesh, into: Sequence[Tensor]
) -> Finish:
    """Start one all-gather of all tensors; `into`: where the results go, if it is not empty."""
    dims = [dim_of(step.before[step.axis]) for step in steps]
    cuts = [joining(step, shape, mesh) for step, shape in zip(steps, shapes, strict=True)]
    padded = [pad(x, dim, max(how.lengths)) for x, dim, how in zip(tensors, dims, cuts, strict=True)]
    sizes = [tuple(x.shape) for x in padded]
    done = start_all_gather(torch.cat([x.reshape(-1) for x in padded]), steps[0].axis, mesh, behind=True)

    def finish() -> list[Tensor]:
        outs: Sequence[Tensor | None] = into or [None] * len(sizes)
        pieces = zip(_split(done(), sizes), sizes, dims, cuts, outs, strict=True)
        return [
            join([part.view(size) for part in piece.unbind(0)], dim, how, out) for piece, size, dim, how, out in pieces
        ]

    return finish


def _split(flat: Tensor, sizes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """`flat` split along its last dim into pieces with as many elements as tensors of `sizes`."""
    return flat.split([torch.Size(size).numel() for size in sizes], -1)


_PACKED: dict[str, Callable[[Sequence[Step], Sequence[Tensor], Sequence[Shape], Mesh, Sequence[Tensor]], Finish]] = {
    "all_gather": _gather,
    "all_reduce": _reduce,
    "reduce_scatter": _scatter,
}
