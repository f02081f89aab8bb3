"""Failures of a step, told to the other ranks through the store of torch.distributed.

A rank whose step fails alone never comes to the collective in which the others wait, and they do not know why. So it
leaves a note in the store, and a rank that has waited for LOOK_S looks for one. Steps without a failure do not use the
store.

A note counts until its rank begins another step. One of a step that failed on the reading rank, too, does not count:
that step is over for all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

from autopar._torch import default_store

LOOK_S = 5.0
"""How long a rank waits in a collective before it looks for notes, and between two looks."""
NOTES = "autopar/failures"
"""The key of how many notes there are; note i is at NOTES/i."""
LATEST = 16  # notes that are looked at
LONGEST = 600  # characters of an error that are told


@dataclass
class _Steps:
    """Steps of this rank since `world`, the group of all ranks, was made: how many have begun, the number of the last
    one that failed, and the key of this rank's note of it in the store (empty: there is none)."""

    world: object = None
    begun: int = 0
    failed: int = 0
    note: str = ""


_here = _Steps()


@contextmanager
def step() -> Iterator[None]:
    """The context of a step that all ranks run: an error in it is noted for the others, and says which rank failed
    before this one."""
    global _here
    if _here.world is not dist.group.WORLD:
        _here = _Steps(dist.group.WORLD)
    _here.begun += 1
    if _here.note:
        with suppress(dist.DistError):
            default_store().set(_here.note, "")  # to read a key that is deleted meanwhile would block
        _here.note = ""
    try:
        yield
    except BaseException as error:  # KeyboardInterrupt, too: the others wait all the same
        said = of_others()
        if said and said not in str(error):
            error.add_note(said)
        _here.failed = _here.begun
        if not said:
            _note(error)
        raise


def of_others() -> str:
    """Which other rank failed, and of what, in a step that has not failed here; empty where none did, and where the
    store is gone with the process that held it."""
    if not dist.is_initialized():
        return ""
    with suppress(dist.DistError):
        store = default_store()
        last = store.add(NOTES, 0)
        for key in (f"{NOTES}/{number}" for number in range(last, max(0, last - LATEST), -1)):
            if not store.check([key]) or not (note := store.get(key)):
                continue
            rank, number, text = json.loads(note)
            if rank != dist.get_rank() and (dist.group.WORLD is not _here.world or number > _here.failed):
                return f"rank {rank} failed: {text}"
    return ""


def _note(error: BaseException) -> None:
    """Tell other ranks of an `error` of this one."""
    if not dist.is_initialized():  # there are none: this is what the error says
        return
    text = f"{type(error).__name__}: {error}"
    with suppress(dist.DistError):
        store = default_store()
        key = f"{NOTES}/{store.add(NOTES, 1)}"  # each rank has its own: two that fail at once erase nothing
        store.set(key, json.dumps([dist.get_rank(), _here.begun, text[:LONGEST]]))
        _here.note = key
