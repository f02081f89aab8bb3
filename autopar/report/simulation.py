"""A simulation for a person: the step and its parts, then place by place."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.report.grid import grid
from autopar.simulate.result import Place, Simulation
from autopar.text import gibibytes, seconds, three

PLACES_SHOWN = 16
BARS = " ▁▂▃▄▅▆▇█"
COLUMNS = 32  # of memory over time


def simulation(found: Simulation) -> Group:
    """The whole report."""
    parts: list[RenderableType] = [_summary(found), "", _places(found)]
    if len(found.places) > PLACES_SHOWN:
        parts.append(f"{len(found.places) - PLACES_SHOWN} more places: --json FILE has all")
    return Group(*parts)


def _summary(found: Simulation) -> Table:
    table = grid(f"{found.model} on {found.cluster}, one step simulated", show_header=False)
    for key, value in _facts(found).items():
        table.add_row(key, Text(value))
    return table


def _facts(found: Simulation) -> dict[str, str]:
    apart = (
        f", {100 * (found.step_s / found.predicted_s - 1):+.1f} % to the plan's {seconds(found.predicted_s)}"
        if found.predicted_s > 0
        else ""
    )
    pipeline = (
        {"pipeline": f"{found.schedule}, {found.microbatches} microbatches, {len(found.places)} places"}
        if found.microbatches > 1 or len(found.places) > 1
        else {}
    )
    return {
        **pipeline,
        "step": f"{seconds(found.step_s)}{apart}",
        "MFU": f"{100 * found.mfu:.1f} %",
        found.tokens: f"{three(found.tokens_s)} per second and device ({found.ranks} device{'s' * (found.ranks != 1)})",
        "bubble": _share(found.bubble),
        "exposed communication": _share(found.exposed),
        "starting operators": f"{seconds(found.launch_s)} of the busiest place",
        **({"memory": f"{gibibytes(found.peak_bytes)} at the peak of the fullest place"} if found.peak_bytes else {}),
    }


def _share(value: float) -> str:
    return f"{100 * value:.1f} % of the step"


def _places(found: Simulation) -> Table:
    remembered = any(place.memory for place in found.places)
    table = grid(
        "one rank of each place" if len(found.places) > 1 else "one rank",
        "place",
        "stages",
        "compute",
        "exposed communication",
        "hidden",
        "waiting",
        "optimizer",
        *(("peak memory", "memory over time") if remembered else ()),
    )
    for place in found.places[:PLACES_SHOWN]:
        memory = (gibibytes(place.peak_bytes), Text(over_time(place.memory, found.step_s))) if remembered else ()
        table.add_row(
            str(place.place),
            _stages(place),
            seconds(place.compute_s),
            seconds(place.exposed_s),
            seconds(place.hidden_s),
            seconds(max(0.0, place.idle_s)),
            seconds(place.optimizer_s),
            *memory,
        )
    return table


def _stages(place: Place) -> str:
    return ", ".join(map(str, place.stages))


def over_time(memory: Sequence[tuple[float, float]], step_s: float, columns: int = COLUMNS) -> str:
    """The most bytes in each of `columns` equal parts of the step, as bars; the highest is the peak."""
    if not memory or step_s <= 0:
        return ""
    most, now, index = [0.0] * columns, 0.0, 0
    for column in range(columns):
        until = step_s * (column + 1) / columns
        most[column] = now
        while index < len(memory) and (memory[index][0] < until or column == columns - 1):
            now = memory[index][1]
            most[column] = max(most[column], now)
            index += 1
    top = max(most) or 1.0
    return "".join(BARS[round(value / top * (len(BARS) - 1))] for value in most)
