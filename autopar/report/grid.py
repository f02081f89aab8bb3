"""The one style of tables."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

LONG = 24
"""Characters of a word (a name of a node or weight) from which on it may be broken to make a table fit."""


class Grid(Table):
    """A table whose rows become blocks of lines, `column  cell`, where the console is too narrow for it: columns that
    break words are hard to read, and rich leaves out those that find no room at all."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.show_header and self.width_without_breaks(console, options) > options.max_width:
            yield from self._blocks()
        else:
            yield from super().__rich_console__(console, options)

    def width_without_breaks(self, console: Console, options: ConsoleOptions) -> int:
        """The least width, in characters, in which no column breaks a word of less than LONG characters."""
        unlimited = options.update_width(10_000)
        gap = self.padding[1]
        words = [
            max(Measurement.get(console, unlimited, cell).minimum for cell in (column.header, *column.cells))
            for column in self.columns
        ]
        return sum(min(width, LONG) + gap for width in words)

    def _blocks(self) -> RenderResult:
        """The title, then a block for each row, which leaves out empty cells."""
        headers = [str(column.header) for column in self.columns]
        yield Text(str(self.title or ""), style="bold")
        for number, cells in enumerate(zip(*(column.cells for column in self.columns), strict=True)):
            block = grid("", "", "", show_header=False)
            for header, cell in zip(headers, cells, strict=True):
                if str(cell):
                    block.add_row(header, cell)
            yield from ("", block) if number else (block,)


def grid(title: str, *columns: str, show_header: bool = True) -> Grid:
    """A table in the one style of all reports."""
    table = Grid(
        title=title or None,
        title_justify="left",
        title_style="bold",
        show_header=show_header,
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="underline",
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
