"""A check in every step that all ranks have consistent parts of the batch, train the same parameters and are in the
same state of the step.

A rank infers the global batch size from its own part. If one rank has a smaller part than the others (the last batch of
its loader), every rank computes another mean and other gradients than the model, without an error. If ranks have frozen
different parameters, they reduce gradients of different tensors: they deadlock or get wrong sums. In a pipeline, a
place also needs to know whether any other place still trains parameters. If one rank weights its loss otherwise,
evaluates, or draws other numbers (`SAME`), gradients of different losses are summed. If one steps its optimizers
otherwise, or loads weights alone (changes.py), what ranks have of one model does not fit together.

So each rank sends its sizes and dtypes, checksums of which parameters train and of what changed them, and the state
of the step: one small all-gather, which is started with the forward and read after it, when every rank has started.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from autopar.errors import RunError
from autopar.runtime import batch, failures
from autopar.runtime.changes import Changes
from autopar.runtime.collectives import objects_of_all, start_all_gather_from_all
from autopar.runtime.mesh import Mesh
from autopar.runtime.params import Held
from autopar.runtime.rng import Rng

SAME: Mapping[str, str] = {
    "steps begun": "one of them caught an error that the other did not have, and left out the step in which that one "
    "is. Let such an error end its process, or catch it on every rank",
    "model.training": "call train() or eval() on every rank",
    "torch.is_grad_enabled()": "call train_step on every rank, or the model in no_grad on every rank",
    "rng_state()['seed']": "replicas would draw other numbers: give set_rng_state() the same state on every rank",
    "rng_state()['step']": "replicas would draw other numbers: give set_rng_state() the same state on every rank",
    "loss_weight": "it is the weight of the loss of the whole batch: give train_step the same one on every rank",
}
"""What all ranks of a step have alike, and what to do where they do not; what differs first is named."""

DTYPES = tuple(sorted({str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}))
"""All dtypes by name: ranks send the number of one."""


def step_state(rng: Rng | None, *, training: bool, loss_weight: float) -> dict[str, float]:
    """The values of SAME on this rank; without those of `rng` where ranks may run forwards by themselves, which count
    as steps."""
    drawn = {} if rng is None else {f"rng_state()[{key!r}]": number for key, number in rng.state().items()}
    return {
        "model.training": training,
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        **drawn,
        "loss_weight": float(loss_weight),
    }


class BatchSizes:
    """Compares the ranks' parts of `inputs` on `mesh`. Call `first` with the first batch, then in every step `tell`
    before the forward and `look` after it, on all ranks alike. `trains`: whether any rank had a parameter that trains,
    as of the last `look`."""

    def __init__(self, inputs: Mapping[str, str], mesh: Mesh) -> None:
        self.inputs, self.mesh = inputs, mesh
        self._dims: list[int] | None = None
        self._mine: list[int] = []
        self._dtypes: list[int] = []
        self._right: list[list[int]] = []  # the sizes of all ranks when they were last checked and found consistent
        self.trains = True
        self._held: Mapping[str, Held] = {}
        self._state: Mapping[str, float] = {}
        self._changes = Changes()
        self._coming: Callable[[], Tensor] | None = None
        self._begun = 0
        self._stream = None if mesh.device_type == "cpu" or mesh.ranks == 1 else torch.Stream(mesh.device)

    @property
    def begun(self) -> bool:
        """Whether `first` was called."""
        return self._dims is not None

    @contextmanager
    def step(self) -> Iterator[None]:
        """The context of a step of all ranks, also of one that fails before `tell`."""
        self._begun += 1
        with failures.step():
            yield

    def first(self, values: Sequence[Any]) -> None:
        """Compare the first batch, what is in it too; see `batch.check_agreement`."""
        batch.check_agreement(self.inputs, values, self.mesh)
        self._dims = [value.dim() if isinstance(value, Tensor) else 0 for value in values]

    def tell(
        self, values: Sequence[Any], held: Mapping[str, Held], state: Mapping[str, float], changes: Changes
    ) -> bool:
        """Start to send the sizes and dtypes of this rank's part, which of `held` train, the `step_state`, and the
        `changes` of weights. Returns whether the sizes differ from those of the last step. Where dtypes do, it looks at
        once: backends end a process that is to sum tensors of different dtypes."""
        sizes = [
            size
            for value, dims in zip(values, self._dims or (), strict=True)
            for size in (value.shape if isinstance(value, Tensor) and value.dim() == dims else (-1,) * dims)
        ]
        state = {"steps begun": self._begun, **state}
        self._held, self._state, self._changes = held, state, changes.told()
        training = bytes(one.tensor.requires_grad for one in held.values())
        self.trains = any(training)
        dtypes = [DTYPES.index(str(value.dtype)) if isinstance(value, Tensor) else -1 for value in values]
        cast, self._dtypes = dtypes != self._dtypes, dtypes
        if self.mesh.ranks > 1:
            with self._beside():
                self._coming = start_all_gather_from_all(
                    torch.tensor(
                        [
                            zlib.crc32(training) + 1 if self.trains else 0,
                            self._changes.checksum,
                            *map(_bits, state.values()),
                            *dtypes,
                            *sizes,
                        ],
                        dtype=torch.int64,
                        device=self.mesh.device,
                    ),
                    self.mesh,
                )
        changed, self._mine = sizes != self._mine, sizes
        if cast:
            self.look()
        return changed

    def look(self) -> None:
        """Read what the ranks sent. Raises RunError, on every rank, where their parts are not parts of one batch or of
        other dtypes, the step has another state on some ranks, ranks of one place changed weights unlike, or,
        where gradients are recorded, these have frozen different parameters."""
        if self._coming is None:
            return
        with self._beside():
            told, self._coming = self._coming().tolist(), None
        count = 2 + len(self._state)
        shapes = count + len(self._dtypes)
        training, changes, states, dtypes, everyone = (
            [each[0] for each in told],
            [each[1] for each in told],
            [each[2:count] for each in told],
            [each[count:shapes] for each in told],
            [each[shapes:] for each in told],
        )
        self.trains = any(training)
        self._same(states)
        self._changed_alike(changes)
        if torch.is_grad_enabled():
            self._alike(training)
        batch.check_dtypes(self.inputs, [[DTYPES[n] if n >= 0 else "no tensor" for n in each] for each in dtypes])
        if everyone != self._right:
            batch.check_shapes(self.inputs, [self._shapes(sizes) for sizes in everyone], self.mesh)
            self._right = everyone

    def _same(self, states: Sequence[Sequence[int]]) -> None:
        """Raise RunError, on every rank, unless all have the same `states`."""
        for index, (name, own) in enumerate(self._state.items()):
            for rank, each in enumerate(states):
                if each[index] != states[0][index]:
                    here, first = (_number(state[index], own) for state in (each, states[0]))
                    raise RunError(
                        f"{name} is {here} on rank {rank} and {first} on rank 0, which are in one step together: "
                        f"{SAME[name]}"
                    )

    def _alike(self, training: Sequence[int]) -> None:
        """Raise RunError, on every rank, unless the ranks of each place train the same parameters; `training` has each
        rank's checksum of these."""
        if all(number == training[self._first(rank)] for rank, number in enumerate(training)):
            return
        everyone = objects_of_all({name: one.tensor.requires_grad for name, one in self._held.items()}, self.mesh)
        for rank, mine in enumerate(everyone):
            first = self._first(rank)
            if torn := [name for name, trains in mine.items() if trains != everyone[first][name]]:
                here, there = ("trains", "is frozen") if mine[torn[0]] else ("is frozen", "trains")
                raise RunError(
                    f"parameter {torn[0]} {here} on rank {rank} and {there} on rank {first} ({len(torn)} differ so), "
                    "though ranks sum gradients together: call requires_grad_ alike on all ranks, with random choices "
                    "from a generator of the same seed"
                )

    def _changed_alike(self, checksums: Sequence[int]) -> None:
        """Raise RunError, on every rank, unless the ranks of each place changed weights alike; `checksums` has each
        rank's of that."""
        if all(number == checksums[self._first(rank)] for rank, number in enumerate(checksums)):
            return
        everyone = objects_of_all(self._changes, self.mesh)
        for rank, mine in enumerate(everyone):
            first = self._first(rank)
            if mine.checksum != everyone[first].checksum:
                here, there = mine.unlike(everyone[first])
                raise RunError(
                    f"rank {rank} and rank {first} changed their parts of the model unlike, so that these do not fit "
                    f"together: {here} on rank {rank}, {there} on rank {first}. Load the same on all ranks, step on "
                    "all or none, and give schedules of the learning rate what is the same on all (the loss of the "
                    "model is)"
                )

    def _first(self, rank: int) -> int:
        """The first rank of the place that `rank` is on."""
        return rank - rank % (self.mesh.ranks // self.mesh.places)

    def _shapes(self, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        left: Iterator[int] = iter(sizes)
        return [tuple(islice(left, dims)) for dims in self._dims or ()]

    def _beside(self) -> AbstractContextManager[Any]:
        """On accelerators, a stream of its own: reading the result then does not wait for the forward that is queued on
        the main stream."""
        return nullcontext() if self._stream is None else self._stream


def _bits(value: float) -> int:
    """A number as an int64: of a float its bits, so that ranks compare it exactly."""
    return struct.unpack("q", struct.pack("d", value))[0] if isinstance(value, float) else int(value)


def _number(bits: int, like: float) -> float:
    """The inverse, of the type of `like`."""
    return struct.unpack("d", struct.pack("q", bits))[0] if isinstance(like, float) else type(like)(bits)
