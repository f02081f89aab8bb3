"""Which rows of one dim of its input a window operator (convolution, pool) reads, by the rank that holds them: plain
ints. Used by rules.halo and runtime.algorithms.halo.

Output o reads `reach` input rows from `o * stride - padding` on; rows below 0 and from `size` on are padding. Input and
output are cut as torch.chunk cuts, each by its own size, so a rank's outputs may read rows of other ranks: its
*borders*.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.layout import chunk

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Window:
    """One dim of a window operator.

    size        rows of the whole input
    outs        rows of the whole output
    reach       rows from the first to the last that one output reads (dilation x (kernel - 1) + 1)
    stride      rows between the first rows that neighbouring outputs read
    padding     rows of padding before the input
    """

    size: int
    outs: int
    reach: int
    stride: int = 1
    padding: int = 0

    @property
    def end(self) -> int:
        """The row behind the last one that any output reads, padding behind the input included (then it is more than
        `size`)."""
        return (self.outs - 1) * self.stride - self.padding + self.reach

    def length(self, outs: int) -> int:
        """How many rows, padding included, `outs` neighbouring outputs read."""
        return (outs - 1) * self.stride + self.reach if outs else 0

    def reads(self, ways: int, rank: int) -> Range:
        """`[start, stop)` that the outputs of `rank` of `ways` read, padding included."""
        first, last = chunk(self.outs, ways, rank)
        start = first * self.stride - self.padding
        return start, start + self.length(last - first)

    def needs(self, ways: int, rank: int) -> Range:
        """The same without padding."""
        start, stop = (min(max(row, 0), self.size) for row in self.reads(ways, rank))
        return start, stop

    def pads(self, ways: int, rank: int) -> tuple[int, int]:
        """Rows of padding before and behind what `rank` needs."""
        start, stop = self.reads(ways, rank)
        return max(0, min(0, stop) - start), max(0, stop - max(self.size, start))

    def shared(self, ways: int, holder: int, reader: int) -> Range:
        """The rows that `holder` has and `reader` needs; empty where stop <= start."""
        (first, last), (start, stop) = chunk(self.size, ways, holder), self.needs(ways, reader)
        return max(first, start), min(last, stop)

    def most_sent(self, ways: int) -> int:
        """Rows that the rank that sends most sends to others."""
        return max(sum(self._rows(ways, rank, peer) for peer in range(ways)) for rank in range(ways))

    def most_received(self, ways: int) -> int:
        """Rows that the rank that receives most gets from others."""
        return max(sum(self._rows(ways, peer, rank) for peer in range(ways)) for rank in range(ways))

    def _rows(self, ways: int, holder: int, reader: int) -> int:
        """How many rows `holder` sends to `reader`; 0 for itself."""
        start, stop = self.shared(ways, holder, reader)
        return 0 if holder == reader else max(0, stop - start)

    def plain(self, ways: int) -> bool:
        """Whether every rank needs rows of its own only, and no padding."""
        return not self.most_sent(ways) and not any(any(self.pads(ways, rank)) for rank in range(ways))

    def borders_only(self, ways: int) -> bool:
        """Whether no rank needs rows from beyond the two ranks beside it."""
        return not any(
            self._rows(ways, holder, reader)
            for holder in range(ways)
            for reader in range(ways)
            if abs(holder - reader) > 1
        )
