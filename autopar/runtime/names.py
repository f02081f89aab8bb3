"""Original names of what the instances of a block hold: see `Naming`."""

from __future__ import annotations

from collections.abc import Mapping

Naming = str | Mapping[str, str]
"""An instance: its module path (`layers.3` for `layers.3.up.weight`), or from the first part of a name in the block to
what stands for it (`{"0": "layers.6", "1": "layers.7"}` for `0.up.weight` and `1.up.weight`)."""


def full_name(naming: Naming, short: str) -> str:
    """The original name of what an instance calls `short`."""
    if isinstance(naming, str):
        return f"{naming}.{short}" if naming else short
    head, dot, rest = short.partition(".")
    return f"{naming[head]}{dot}{rest}"


def path_of(naming: Naming, short: str) -> str:
    """The part of that name which `naming` gives: the path under which names in ORDER are grouped."""
    return naming if isinstance(naming, str) else naming[short.partition(".")[0]]


def paths_of(naming: Naming) -> list[str]:
    """All such paths of an instance."""
    return [naming] if isinstance(naming, str) else list(naming.values())
