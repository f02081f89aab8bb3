"""A verification as a table: the worst value of each kind, and all that are wrong."""

from __future__ import annotations

from rich.console import Group, RenderableType

from autopar.report.grid import grid
from autopar.verify import Report

SHOWN = 20


def checked(report: Report) -> Group:
    """The worst difference of each kind of value, then those beyond their tolerance and the first node that goes
    wrong."""
    table = grid(
        f"compared with one device on mesh {report.mesh}", "what", "values", "worst difference", "tolerance", "of", ""
    )
    for kind in dict.fromkeys(row.kind for row in report.rows):
        rows = [row for row in report.rows if row.kind == kind]
        worst = max(rows, key=lambda row: (not row.ok, row.error))
        table.add_row(
            kind,
            str(len(rows)),
            f"{worst.error:.2g}",
            f"{worst.tolerance:.2g}",
            worst.title,
            "ok" if worst.ok else "WRONG",
        )
    parts: list[RenderableType] = [table]
    wrong = [row for row in report.rows if not row.ok]
    if wrong:
        more = grid("beyond the tolerance", "what", "name", "difference")
        for row in wrong[:SHOWN]:
            more.add_row(row.kind, row.title, f"{row.error:.3g}")
        if len(wrong) > SHOWN:
            more.add_row("", f"{len(wrong) - SHOWN} more", "")
        parts += [
            "",
            more,
            "",
            f"first node that differs: {report.first or 'not looked for: it is the model that differs from its graph'}",
        ]
    parts += [f"note: {note}" for note in report.notes]
    parts += [
        "",
        "all values are within the tolerance" if report.ok else f"{len(wrong)} of {len(report.rows)} values are wrong",
    ]
    return Group(*parts)
