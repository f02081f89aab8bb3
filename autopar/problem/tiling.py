"""Which weights may be gathered in tiles (`rules.tiles`): those that are large for a device, so that all others add no
choices to the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.problem.graph import Op
from autopar.problem.options import Tiles
from autopar.rules import tiles


def large(memory_bytes: float, planned: Mapping[str, Sequence[str]]) -> Tiles:
    """A function (op, ranks of an axis) -> the numbers of tiles that are offered for the op's weight on devices of
    `memory_bytes`. The numbers that a plan has (`planned`: op -> its runtime algorithms) are always among them."""

    def offered(op: Op, ways: int) -> Sequence[int]:
        if not tileable(op):
            return ()
        known = [tiles.tiles(run) for run in planned.get(op.name, ())]
        return tuple(sorted({*tiles.counts(op.call, ways, memory_bytes), *(n for n in known if n > 1)}))

    return offered


def tileable(op: Op) -> bool:
    """Whether the weight of an operator can be gathered in tiles. False where its backward in the first block of a run
    saves other tensors than in other blocks: tiles would not be gathered again there."""
    if op.role != "op" or not tiles.can(op.call) or op.saves != op.first_saves:
        return False
    return [i for i in (0, 1) if op.weight[i]] == [tiles.NAMES[tiles.OPERATORS[op.target]]]


def tiled(runs: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The operators that gather their weight in tiles, with the number of tiles; `runs`: op -> its runtime
    algorithms."""
    counts = {name: max(map(tiles.tiles, node), default=1) for name, node in runs.items()}
    return {name: count for name, count in counts.items() if count > 1}
