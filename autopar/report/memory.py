"""Memory as tables: what each strategy needs, and what the peak of one plan is made of."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from autopar.memory import Entry, Place, Prediction
from autopar.report.grid import grid
from autopar.text import gibibytes


def breakdown(prediction: Prediction, shown: int) -> Group:
    """The `shown` largest tensors of the peak of each place, with their source lines; places that are alike are shown
    once."""
    parts: list[RenderableType] = []
    for place in prediction.places:
        title = f"place {place.number}: " if len(prediction.places) > 1 else ""
        parts += [
            summary(place, f"{title}{gibibytes(place.peak_bytes)} at the peak, {place.when}"),
            "",
            _entries(place.entries, shown),
            "",
        ]
    return Group(*parts[:-1])


def summary(place: Place, title: str) -> Table:
    """What rests on a place, and the peaks of its step."""
    table = grid(title, "", "bytes", "", show_header=False)
    for kind, nbytes in place.rest.items():
        table.add_row(kind, gibibytes(nbytes), "at rest" if kind != "whole gradients" else "until they are scattered")
    for stage, kept, flying in zip(place.stages, place.kept_bytes, place.in_flight, strict=True):
        table.add_row(
            "activations",
            gibibytes(kept * flying),
            f"{flying} x {gibibytes(kept)} kept for the backward"
            + (f" in stage {stage}" if len(place.kept_bytes) > 1 else ""),
        )
    for phase, nbytes in place.phases.items():
        table.add_row(phase, gibibytes(nbytes), "its peak")
    if place.host_bytes:
        table.add_row("host", gibibytes(place.host_bytes), "in the memory of the host")
    return table


def _entries(entries: Sequence[Entry], shown: int) -> Table:
    table = grid("alive at the peak", "for", "tensor", "where", "bytes", "tensors", "from", "to")
    for entry in entries[:shown]:
        table.add_row(
            entry.kind, entry.node, entry.where, gibibytes(entry.nbytes), str(entry.count), entry.since, entry.until
        )
    if len(entries) > shown:
        table.add_row(
            "all others",
            "",
            "",
            gibibytes(sum(e.nbytes for e in entries[shown:])),
            str(sum(e.count for e in entries[shown:])),
            "",
            "",
        )
    return table


def fit_row(place: Place, limit_bytes: float, *, fits: bool) -> list[str]:
    """The cells of one strategy: weights, gradients, optimizer and activations in full, what else is there at the peak,
    the peak, share, what is on the host, fits. Gradients come while activations go, so a peak is less than the sum."""
    rest, peak, there = place.rest, place.peak_bytes, place.by_kind()
    optimizer, whole = rest.get("optimizer", 0.0) + rest.get("master", 0.0), rest.get("whole gradients", 0.0)
    other = peak - sum(there.get(kind, 0.0) for kind in ("weights", "gradients", "optimizer", "master", "activations"))
    other -= min(whole, there.get("whole gradients", 0.0))
    return [
        gibibytes(rest.get("weights", 0.0)),
        gibibytes(rest.get("gradients", 0.0) + whole),
        gibibytes(optimizer),
        gibibytes(place.activations_bytes),
        gibibytes(other),
        gibibytes(peak),
        f"{100 * peak / limit_bytes:.0f} %",
        gibibytes(place.host_bytes) if place.host_bytes else "-",
        "yes" if fits else "no",
    ]


def fit_table(title: str, symbols: Sequence[str]) -> Table:
    """The empty table of strategies; `symbols` are those whose largest sizes are shown."""
    table = grid(
        title,
        "strategy",
        "mesh",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "transient",
        "peak",
        "of usable",
        "on host",
        "fits",
        *(f"largest {s}" for s in symbols),
    )
    for column in table.columns[: len(table.columns) - len(symbols)]:
        column.no_wrap = True  # names are looked for by people and by grep, and "8192 (all positions)" has spaces
    return table
