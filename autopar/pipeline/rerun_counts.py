"""How many blocks of each stage run again, for stages that are cut: as few as the memory of each place allows at every
moment of the schedule.

`balance` assumes that all stages of a place keep equally many bytes per microbatch, which tells at which moment a place
is fullest. A stage that runs fewer of its blocks again keeps more, so that the place may be fullest at another moment
(pipeline.in_flight). Where the place exceeds its memory then, another block runs again, of the stage where that frees
most at that moment. Where there is room, one block less runs again, of the stage where that takes least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.pipeline.filling import Cuts, piece_ranges
from autopar.pipeline.in_flight import InFlight
from autopar.pipeline.stretches import Pieces, Table


def fitted(
    pieces: Sequence[Pieces], cuts: Cuts, at: Sequence[int], flying: Sequence[InFlight], limits: Sequence[float]
) -> Cuts:
    """`cuts` with as few pieces run again as the places have room for; all that can be, where a place has too little
    for any number.

        pieces    per stage: the cost of all pieces where the stage runs
        at        per stage: its place
        flying    per place: its microbatches in flight
        limits    per place: its bytes per device
    """
    ranges, again = piece_ranges(cuts.bounds, len(pieces[0].costs)), list(cuts.again)
    for place, (own, limit) in enumerate(zip(flying, limits, strict=True)):
        mine = [stage for stage, other in enumerate(at) if other == place]
        here = _Place([pieces[stage].table for stage in mine], [ranges[stage] for stage in mine], own)
        for stage, count in zip(mine, here.fitted([again[stage] for stage in mine], limit), strict=True):
            again[stage] = count
    return Cuts(cuts.bounds, again)


@dataclass(frozen=True, eq=False)
class _Place:
    """The stages of one place: the tables of their pieces, which pieces `[first, stop)` each has, and their
    microbatches in flight."""

    tables: Sequence[Table]
    ends: Sequence[tuple[int, int]]
    flying: InFlight

    def fitted(self, again: Sequence[int], limit_bytes: float) -> Sequence[int]:
        """`again` changed as `rerun_counts.fitted` says."""
        while self.bytes(again) > limit_bytes and (more := self._more(again)) is not None:
            again = more
        while (less := self._less(again, limit_bytes)) is not None:
            again = less
        return again

    def bytes(self, again: Sequence[int]) -> float:
        """Bytes per device, if so many of the first pieces of each stage run again."""
        live = max(
            table.live(first, stop, n) for table, (first, stop), n in zip(self.tables, self.ends, again, strict=True)
        )
        return self._rest + live + float(self.flying.peak_bytes(self._kept(again), self._halfway))

    def _kept(self, again: Sequence[int]) -> np.ndarray:
        """[stages] bytes that each keeps of a microbatch in flight."""
        return np.array(
            [
                table.kept(first, stop) - float(table.freed[first + n] - table.freed[first])
                for table, (first, stop), n in zip(self.tables, self.ends, again, strict=True)
            ]
        )

    @cached_property
    def _rest(self) -> float:
        return sum(table.rest(*ends) for table, ends in zip(self.tables, self.ends, strict=True))

    @cached_property
    def _halfway(self) -> np.ndarray:
        return np.array([table.halfway(*ends) for table, ends in zip(self.tables, self.ends, strict=True)])

    def _more(self, again: Sequence[int]) -> list[int] | None:
        """`again` with one block more run again, of the stage where that frees most when the place is fullest; None
        where nothing frees anything."""
        freed, fullest = list[float](), self.flying.fullest(self._kept(again), self._halfway)
        ways = [self._next(stage, again[stage]) for stage in range(len(again))]
        for (first, _), table, n, way, flying in zip(self.ends, self.tables, again, ways, fullest, strict=True):
            freed.append(flying.kept * float(table.freed[first + way] - table.freed[first + n]))
        best = int(np.argmax(freed))
        return _with(again, best, ways[best]) if freed[best] > 0.0 else None

    def _less(self, again: Sequence[int], limit_bytes: float) -> list[int] | None:
        """`again` with one block less run again, of the stage where that takes least memory; None where no block runs
        again, or there is no room."""
        ways = [_with(again, stage, self._before(stage, n)) for stage, n in enumerate(again) if n]
        fit = [(nbytes, -max(self._seconds(way)), way) for way in ways if (nbytes := self.bytes(way)) <= limit_bytes]
        return min(fit)[-1] if fit else None

    def _seconds(self, again: Sequence[int]) -> list[float]:
        """Seconds of a microbatch in each stage."""
        return [
            table.time_s(first, stop, n) for table, (first, stop), n in zip(self.tables, self.ends, again, strict=True)
        ]

    def _next(self, stage: int, again: int) -> int:
        """The next number of pieces that frees more than `again` do; `again` where there is none."""
        (first, stop), freed = self.ends[stage], self.tables[stage].freed
        return next((n for n in range(again + 1, stop - first + 1) if freed[first + n] > freed[first + again]), again)

    def _before(self, stage: int, again: int) -> int:
        """The last number of pieces that frees less than `again` do; 0 where there is none."""
        first, freed = self.ends[stage][0], self.tables[stage].freed
        return next((n for n in range(again - 1, 0, -1) if freed[first + n] < freed[first + again]), 0)


def _with(again: Sequence[int], stage: int, count: int) -> list[int]:
    """`again` with another number for one stage."""
    return [*again[:stage], count, *again[stage + 1 :]]
