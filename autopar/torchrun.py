"""What torchrun tells the processes that it starts, by environment variables: plain numbers, checked."""

from __future__ import annotations

import os

from autopar.errors import RunError

MEETING = ("MASTER_ADDR", "MASTER_PORT")
"""Where the ranks meet."""


def number(name: str, least: int = 1) -> int | None:
    """The number in the environment variable `name`; None where it is not set, or empty. Raises RunError where it is
    none, or below `least`."""
    text = os.environ.get(name)
    if not text:
        return None
    if not text.strip().isdecimal() or int(text) < least:
        raise RunError(
            f"the environment variable {name} is {text!r}; wanted a whole number of at least {least}. torchrun sets "
            "it: unset it where torchrun is not at work"
        )
    return int(text)


def ranks() -> int | None:
    """The ranks of all machines; None where torchrun has not started this process."""
    return number("WORLD_SIZE")


def local_ranks() -> int | None:
    """The ranks of this machine; None where nobody has said."""
    return number("LOCAL_WORLD_SIZE")


def check() -> None:
    """Raise RunError where the environment does not say who this rank is and where the ranks meet: torch waits for half
    an hour, or its error names one variable of four."""
    world, rank = ranks(), number("RANK", 0)
    missing = [name for name in ("WORLD_SIZE", "RANK", *MEETING) if not os.environ.get(name)]
    if world is None or rank is None or missing:
        raise RunError(
            f"the environment has no {' and no '.join(missing)}, by which ranks find each other: start them with "
            "torchrun, or set WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT for each. Without WORLD_SIZE, `autopar "
            "run` and `autopar calibrate` start ranks of their own"
        )
    number("MASTER_PORT", 0)
    if rank >= world:
        raise RunError(
            f"the environment variable RANK is {rank}, and WORLD_SIZE is {world}: ranks are 0 to {world - 1}"
        )
