"""A check in every step that all ranks have consistent parts of the batch and train the same parameters.

A rank infers the global batch size from its own part. If one rank has a smaller part than the others (the last batch of its loader), every rank computes another mean and
other gradients than the model, without an error. If ranks have frozen different parameters, they reduce gradients of different tensors: they deadlock or get wrong sums. In a
pipeline, a place also needs to know whether any other place still trains parameters.

So each rank sends its sizes and a checksum of which parameters train: one small all-gather, which is started with the forward and read after it, when every rank has started.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import RunError
from autopar.runtime import batch
from autopar.runtime.collectives import start_all_gather_from_all
from autopar.runtime.mesh import Mesh
from autopar.runtime.params import Held


class BatchSizes:
    """Compares the ranks' parts of `inputs` on `mesh`. Call `first` with the first batch, then in every step `tell` before the forward and `look` after it, on all ranks alike.
    `trains`: whether any rank had a parameter that trains, as of the last `look`."""

    def __init__(self, inputs: Mapping[str, str], mesh: Mesh) -> None:
        self.inputs, self.mesh = inputs, mesh
        self._dims: list[int] | None = None
        self._mine: list[int] = []
        self._right: list[list[int]] = []  # the sizes of all ranks when they were last checked and found consistent
        self.trains = True
        self._held: Mapping[str, Held] = {}
        self._coming: Callable[[], Tensor] | None = None
        self._stream = None if mesh.device_type == "cpu" or mesh.ranks == 1 else torch.Stream(mesh.device)

    @property
    def begun(self) -> bool:
        """Whether `first` was called."""
        return self._dims is not None

    def first(self, values: Sequence[Any]) -> None:
        """Compare the first batch, what is in it too; see `batch.check_agreement`."""
        batch.check_agreement(self.inputs, values, self.mesh)
        self._dims = [value.dim() if isinstance(value, Tensor) else 0 for value in values]

    def tell(self, values: Sequence[Any], held: Mapping[str, Held]) -> bool:
        """Start to send the sizes of this rank's part, and which of `held` train. Returns whether the sizes differ from those of the last step."""
        sizes = [size for value, dims in zip(values, self._dims or (), strict=True) for size in (value.shape if isinstance(value, Tensor) and value.dim() == dims else (-1,) * dims)]
        self._held, training = held, bytes(one.tensor.requires_grad for one in held.values())
        self.trains = any(training)
        if self.mesh.ranks > 1:
            with self._beside():
                self._coming = start_all_gather_from_all(torch.tensor([zlib.crc32(training) + 1 if self.trains else 0, *sizes], dtype=torch.int64, device=self.mesh.device), self.mesh)
        changed, self._mine = sizes != self._mine, sizes
        return changed

    def look(self) -> None:
        """Read what the ranks sent. Raises RunError, on every rank, where their parts are not parts of one batch, or, where gradients are recorded, ranks of one place have frozen
        different parameters."""
        if self._coming is None:
            return
        with self._beside():
            told, self._coming = self._coming().tolist(), None
        training, everyone = [number for number, *_ in told], [sizes for _, *sizes in told]
        self.trains = any(training)
        if torch.is_grad_enabled():
            self._alike(training)
        if everyone != self._right:
            batch.check_shapes(self.inputs, [self._shapes(sizes) for sizes in everyone], self.mesh)
            self._right = everyone

    def _alike(self, training: Sequence[int]) -> None:
        """Raise RunError, on every rank, unless the ranks of each place train the same parameters; `training` has each rank's checksum of these."""
        inner = len(training) // self.mesh.places
        if all(number == training[rank - rank % inner] for rank, number in enumerate(training)):
            return
        everyone: list[Any] = [None] * len(training)
        dist.all_gather_object(everyone, {name: one.tensor.requires_grad for name, one in self._held.items()})
        for rank, mine in enumerate(everyone):
            first = rank - rank % inner
            if torn := [name for name, trains in mine.items() if trains != everyone[first][name]]:
                here, there = ("trains", "is frozen") if mine[torn[0]] else ("is frozen", "trains")
                raise RunError(f"parameter {torn[0]} {here} on rank {rank} and {there} on rank {first} ({len(torn)} differ so), though ranks sum gradients together: "
                               "call requires_grad_ alike on all ranks, with random choices from a generator of the same seed")

    def _shapes(self, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        left: Iterator[int] = iter(sizes)
        return [tuple(islice(left, dims)) for dims in self._dims or ()]

    def _beside(self) -> AbstractContextManager[Any]:
        """On accelerators, a stream of its own: reading the result then does not wait for the forward that is queued on the main stream."""
        return nullcontext() if self._stream is None else self._stream
