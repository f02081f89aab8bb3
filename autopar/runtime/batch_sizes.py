"""The sizes of a batch, and which parameters train, which ranks tell each other in every step.

A rank knows the sizes of the whole batch from those of its own part, so that where one has a smaller part than the others (the last batch of its loader) all compute something else than
the model: another mean, another gradient, in silence. Where ranks have frozen different parameters (drawn by each for itself), they sum gradients of different ones, and wait for ever or
get what is none; nor does a place of a pipeline know whether another one has any that are not frozen. One small gather begins with the step and is looked at when the forward has ended: by then all ranks have begun.
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
    """What the ranks of `mesh` tell of their parts of `inputs`. Call `first` with the first batch, then `tell` and `look` in turns, on all ranks alike. `trains`: whether some rank had, when
    it was last looked at, a parameter that trains."""

    def __init__(self, inputs: Mapping[str, str], mesh: Mesh) -> None:
        self.inputs, self.mesh = inputs, mesh
        self._dims: list[int] | None = None
        self._mine: list[int] = []
        self._right: list[list[int]] = []  # of all ranks, as they were last found right
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
        """Begin to tell the sizes of this rank's part, and which of `held` train; whether sizes are others than the last ones."""
        sizes = [size for value, dims in zip(values, self._dims or (), strict=True) for size in (value.shape if isinstance(value, Tensor) and value.dim() == dims else (-1,) * dims)]
        self._held, training = held, bytes(one.tensor.requires_grad for one in held.values())
        self.trains = any(training)
        if self.mesh.ranks > 1:
            with self._beside():
                self._coming = start_all_gather_from_all(torch.tensor([zlib.crc32(training) + 1 if self.trains else 0, *sizes], dtype=torch.int64, device=self.mesh.device), self.mesh)
        changed, self._mine = sizes != self._mine, sizes
        return changed

    def look(self) -> None:
        """Raise RunError, on every rank, where the parts that were told of do not fit together, or, where gradients are on, ranks of one place have frozen different parameters."""
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
        """Raise RunError, on every rank, unless ranks of one place train the same parameters, of which all have told a number."""
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
        """On devices that run behind the host: beside what they compute, which the host need not wait for."""
        return nullcontext() if self._stream is None else self._stream
