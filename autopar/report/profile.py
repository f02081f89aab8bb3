"""A profile for a person: predicted against measured, worst first."""

from __future__ import annotations

from rich.console import Group

from autopar.profile import Profile
from autopar.report.grid import grid
from autopar.text import seconds


def profile(found: Profile, shown: int) -> Group:
    """The step, and the `shown` rows that are furthest off."""
    facts = grid(f"{found.model} on {found.cluster}, one step", show_header=False)
    facts.add_row("measured", f"{seconds(found.step_s)}; under the profiler {seconds(found.profiled_s)}")
    facts.add_row("predicted", f"{seconds(found.predicted_s)}, {100 * (found.predicted_s / found.step_s - 1):+.1f} %")
    facts.add_row(
        "beside the rows",
        f"{seconds(max(0.0, found.rest_s))} of a profiled step: Python, hooks, waiting for other places",
    )
    places = len({row.place for row in found.rows}) > 1
    table = grid(
        "seconds of a step on one rank, forward and backward, worst first",
        *(("place",) if places else ()),
        "what",
        "name",
        "measured",
        "predicted",
        "measured / predicted",
        "off by",
    )
    for row in found.rows[:shown]:
        ratio = f"{row.measured_s / row.predicted_s:.2f}" if row.predicted_s > 0 else "-"
        table.add_row(
            *((str(row.place),) if places else ()),
            row.what,
            row.name,
            seconds(max(0.0, row.measured_s)),
            seconds(row.predicted_s),
            ratio,
            ("-" if row.off_s < 0 else "+") + seconds(abs(row.off_s)),
        )
    more = [f"{len(found.rows) - shown} more rows: --rows N, or --json FILE has all"] if len(found.rows) > shown else []
    return Group(facts, "", table, *more)
