"""Failures of a step, told to the other ranks through the store of torch.distributed.

A rank whose step fails alone never comes to the collective in which the others wait, and they do not know why. So it
leaves a note in the store, and a rank that has waited for LOOK_S looks for one. Steps without a failure do not use the
store.

A note counts until its rank begins another step. One of a step that failed on the reading rank, too, does not count:
that step is over for all.

The step after one that failed begins once all ranks have failed in that one, at the same place: after as many
collectives. It never begins where a rank gave up waiting, or was interrupted: what it waited in is still under way
there, and would take what the other ranks send from now on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

from autopar._torch import default_store
from autopar.errors import RunError

LOOK_S = 5.0
"""How long a rank waits in a collective before it looks for notes, and between two looks."""
NOTES = "autopar/failures"
"""The key of how many notes there are; note i is at NOTES/i."""
LATEST = 16  # notes that are looked at
LONGEST = 600  # characters of an error that are told
FAILED = "autopar/failed"
"""FAILED/n is the key of how many ranks have failed in step n, FAILED/n/m after they had begun m collectives in it."""
TORN = "autopar/torn"
"""The key that is there once a rank has given up waiting for others."""
MEND = "Let such an error end its process, so that torchrun ends the others"


@dataclass
class _Steps:
    """Steps of this rank since `world`, the group of all ranks, was made: how many have begun, the number of the last
    one that failed, with how many collectives had begun in it (`talked`), and the key of this rank's note of it in the
    store (empty: there is none). `talks`: how many collectives have begun since the last step did; `torn`: whether this
    rank has given up waiting."""

    world: object = None
    begun: int = 0
    failed: int = 0
    talked: int = 0
    note: str = ""
    talks: int = 0
    torn: bool = False


_here = _Steps()


@contextmanager
def step() -> Iterator[None]:
    """The context of a step that all ranks run: an error in it is noted for the others, and says which rank failed
    before this one. Raises RunError where ranks are still in a step that failed."""
    if not dist.is_initialized():  # there is nobody to tell; the step says so
        yield
        return
    here = _steps()
    here.begun += 1
    try:
        _begin(here)
        yield
    except BaseException as error:  # KeyboardInterrupt, too: the others wait all the same
        said = of_others()
        if said and said not in str(error):
            error.add_note(said)
        here.failed, here.talked = here.begun, here.talks
        if not isinstance(error, Exception):  # an interrupt comes anywhere
            gave_up()
        with suppress(dist.DistError):
            default_store().add(f"{FAILED}/{here.failed}/{here.talked}", 1)
            default_store().add(f"{FAILED}/{here.failed}", 1)
        if not said and not here.note:  # the first one is the reason of what follows
            _note(error)
        raise


def talks() -> None:
    """To be called with each collective that begins."""
    _here.talks += 1


def gave_up() -> None:
    """To be called where this rank stops to wait for others, and leaves what it waited in."""
    _steps().torn = True
    with suppress(dist.DistError):
        default_store().set(TORN, "")


def torn() -> bool:
    """Whether this rank has given up waiting for others, so that no further step begins."""
    return _steps().torn


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


def _steps() -> _Steps:
    """The steps of this rank in the present group of all ranks."""
    global _here
    if _here.world is not dist.group.WORLD:
        _here = _Steps(dist.group.WORLD)
    return _here


def _begin(here: _Steps) -> None:
    """Wait until all ranks have left the last step, where it failed; then it is forgotten. Raises RunError where one
    gave up waiting, or does not leave it."""
    if here.torn or (here.failed and here.failed == here.begun - 1 and not _over(here)):
        gave_up()
        raise RunError(
            "a step failed before this one, and not on all ranks alike: some gave up waiting for others, failed at "
            f"another place, or are in it still, and would take what is sent now for what they wait for. {MEND}"
        )
    if here.note:
        with suppress(dist.DistError):
            default_store().set(here.note, "")  # to read a key that is deleted meanwhile would block
        here.note = ""
    here.talks = 0


def _over(here: _Steps) -> bool:
    """Whether the step that failed is over for all ranks, after waiting for those that are in it. Where this rank has
    sent nothing in it the others, who wait for that, learn the number of its step from the next one."""
    with suppress(dist.DistError):
        store = default_store()
        last = time.monotonic() + store.timeout.total_seconds()  # type: ignore[attr-defined, unused-ignore]
        while not store.check([TORN]) and time.monotonic() < last:
            if not here.talked:
                return True
            if store.add(f"{FAILED}/{here.failed}", 0) >= dist.get_world_size():
                return store.add(f"{FAILED}/{here.failed}/{here.talked}", 0) >= dist.get_world_size()
            time.sleep(LOOK_S / 50)
    return False


def _note(error: BaseException) -> None:
    """Tell other ranks of an `error` of this one."""
    text = f"{type(error).__name__}: {error}"
    with suppress(dist.DistError):
        store = default_store()
        key = f"{NOTES}/{store.add(NOTES, 1)}"  # each rank has its own: two that fail at once erase nothing
        store.set(key, json.dumps([dist.get_rank(), _here.begun, text[:LONGEST]]))
        _here.note = key
