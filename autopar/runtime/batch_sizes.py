"""The sizes of a batch, and whether anything trains, which ranks tell each other in every step.

A rank knows the sizes of the whole batch from those of its own part, so that where one has a smaller part than the others (the last batch of its loader) all compute something else than
the model: another mean, another gradient, in silence. Nor does a place of a pipeline know whether another one has parameters that are not frozen. One small gather begins with the step and is looked at when the forward has ended: by then all ranks have begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import batch
from autopar.runtime.collectives import start_all_gather_from_all
from autopar.runtime.mesh import Mesh


class BatchSizes:
    """What the ranks of `mesh` tell of their parts of `inputs`. Call `first` with the first batch, then `tell` and `look` in turns, on all ranks alike. `trains`: whether some rank said, when
    it was last looked at, that it has a parameter that trains."""

    def __init__(self, inputs: Mapping[str, str], mesh: Mesh) -> None:
        self.inputs, self.mesh = inputs, mesh
        self._dims: list[int] | None = None
        self._mine: list[int] = []
        self._right: list[list[int]] = []  # of all ranks, as they were last found right
        self.trains = True
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

    def tell(self, values: Sequence[Any], trains: bool) -> bool:
        """Begin to tell the sizes of this rank's part, and whether it has a parameter that `trains`; whether sizes are others than the last ones."""
        sizes = [size for value, dims in zip(values, self._dims or (), strict=True) for size in (value.shape if isinstance(value, Tensor) and value.dim() == dims else (-1,) * dims)]
        self.trains = trains
        if self.mesh.ranks > 1:
            with self._beside():
                self._coming = start_all_gather_from_all(torch.tensor([trains, *sizes], dtype=torch.int64, device=self.mesh.device), self.mesh)
        changed, self._mine = sizes != self._mine, sizes
        return changed

    def look(self) -> None:
        """Raise RunError, on every rank, where the parts that were told of do not fit together."""
        if self._coming is None:
            return
        with self._beside():
            told, self._coming = self._coming().tolist(), None
        self.trains, everyone = any(trains for trains, *_ in told), [sizes for _, *sizes in told]
        if everyone != self._right:
            batch.check_shapes(self.inputs, [self._shapes(sizes) for sizes in everyone], self.mesh)
            self._right = everyone

    def _shapes(self, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        left: Iterator[int] = iter(sizes)
        return [tuple(islice(left, dims)) for dims in self._dims or ()]

    def _beside(self) -> AbstractContextManager[Any]:
        """On devices that run behind the host: beside what they compute, which the host need not wait for."""
        return nullcontext() if self._stream is None else self._stream
