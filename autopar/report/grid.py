"""The one style of tables."""

from __future__ import annotations

from rich.table import Table


def grid(title: str, *columns: str, show_header: bool = True) -> Table:
    """A table in the one style of all reports."""
    table = Table(
        title=title,
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
