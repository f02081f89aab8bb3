"""Which weights the search may gather in tiles (`rules.tiles`): those that take a large share of a device, so that
others cost it no choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.problem.graph import Op
from autopar.problem.options import Tiles
from autopar.rules import tiles


def large(memory_bytes: float, planned: Mapping[str, Sequence[str]]) -> Tiles:
    """The numbers of tiles that are offered on devices of `memory_bytes`, and those that are `planned` (the runtime
    algorithms of nodes)."""

    def offered(op: Op, ways: int) -> Sequence[int]:
        if not tileable(op):
            return ()
        known = [tiles.tiles(run) for run in planned.get(op.name, ())]
        return tuple(sorted({*tiles.counts(op.call, ways, memory_bytes), *(n for n in known if n > 1)}))

    return offered


def tileable(op: Op) -> bool:
    """Whether there are tiles of the weight of an operator, whose backward does the same in all blocks: in a first
    block whose input has no gradient it would gather no tiles again."""
    if op.role != "op" or not tiles.can(op.call) or op.saves != op.first_saves:
        return False
    return [i for i in (0, 1) if op.weight[i]] == [tiles.NAMES[tiles.OPERATORS[op.target]]]


def tiled(runs: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The operators that gather their weight in tiles, and how many, of the runtime algorithms of nodes."""
    counts = {name: max(map(tiles.tiles, node), default=1) for name, node in runs.items()}
    return {name: count for name, count in counts.items() if count > 1}
