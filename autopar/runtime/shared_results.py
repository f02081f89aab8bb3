"""Work that one rank does for all: its result, or its error, is sent to every rank, so that none waits for a rank that
has failed."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.errors import AutoparError

T = TypeVar("T")


def together() -> bool:
    """Whether torch.distributed runs."""
    return dist.is_available() and dist.is_initialized()


def done_by(rank: int, make: Callable[[], T]) -> T:
    """The result of `make()` on `rank`, which must be picklable, on all ranks; an error of it is raised on all. A
    collective operation."""
    box: list[Any] = [None]
    if dist.get_rank() != rank:
        dist.broadcast_object_list(box, src=rank)
        if isinstance(box[0], _Ended):
            raise box[0].error(rank)
        return pickle.loads(box[0])
    try:
        value = make()
        box = [pickle.dumps(value)]
    except BaseException as error:  # KeyboardInterrupt too: the other ranks wait for the broadcast
        dist.broadcast_object_list([_Ended.by(error)], src=rank)
        raise
    dist.broadcast_object_list(box, src=rank)
    return value


@dataclass(frozen=True)
class _Ended:
    """An error as it is sent: pickled (empty where that fails), its text, and its traceback."""

    sent: bytes
    text: str
    trace: str

    @staticmethod
    def by(error: BaseException) -> _Ended:
        try:
            sent = pickle.dumps(error)
        except Exception:  # noqa: BLE001  whatever an error of others holds
            sent = b""
        return _Ended(sent, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)).rstrip())

    def error(self, rank: int) -> BaseException:
        """The error as another rank raises it."""
        try:
            found = pickle.loads(self.sent) if self.sent else None
        except Exception:  # noqa: BLE001  a class that takes other arguments than it gives its base
            found = None
        if isinstance(found, AutoparError):
            return found
        said = found if isinstance(found, BaseException) else AutoparError(f"rank {rank} ended with {self.text}")
        said.add_note(f"on rank {rank}:\n{self.trace}")
        return said
