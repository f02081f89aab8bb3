"""What one rank does for all: its result, or what ended it, is everybody's, so that no rank waits for one that has left."""

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
    """`make()` of that rank, which must be picklable, on all ranks; whatever error ends it there is raised on all of them. A collective operation."""
    box: list[Any] = [None]
    if dist.get_rank() != rank:
        dist.broadcast_object_list(box, src=rank)
        if isinstance(box[0], _Ended):
            raise box[0].error(rank)
        return pickle.loads(box[0])
    try:
        value = make()
        box = [pickle.dumps(value)]
    except BaseException as error:  # Ctrl-C too: the others wait
        dist.broadcast_object_list([_Ended.by(error)], src=rank)
        raise
    dist.broadcast_object_list(box, src=rank)
    return value


@dataclass(frozen=True)
class _Ended:
    """How it ended: the error, empty where it cannot be sent, and what it says."""

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
