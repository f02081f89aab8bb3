"""`autopar diff`: what two plans say differently."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten

from rich.table import Table
from rich.text import Text

from autopar.cli.console import show, write_json
from autopar.plan import Plan
from autopar.report.difference import Change, Fact, Value, diff
from autopar.report.grid import grid
from autopar.text import gibibytes, seconds

NAMED = 3
"""Nodes of a row that are named; the others are counted."""
WIDTH = 60
"""Characters of a text in a table; JSON has all of it."""


def diff_command(old: Path, new: Path, rows: int, json: str | None) -> int:
    """Print what differs from the plan `old` to `new`, at most so many `rows` of nodes; 1 where something does, else
    0."""
    found = diff(Plan.load(old), Plan.load(new))
    if not write_json(json, found.to_dict()):
        show(
            *([f"the model is another one: {found.graph}", ""] if found.graph else []),
            *([_facts(found.facts, old, new)] if found.facts else []),
            *([_changes(found.changes[:rows])] if found.changes else []),
        )
        if left := sum(len(change.nodes) for change in found.changes[rows:]):
            show(f"and {left} more nodes: --rows {len(found.changes)}")
        if found.same:
            show(f"{old} and {new} are the same plan")
    return 0 if found.same else 1


def _facts(facts: tuple[Fact, ...], old: Path, new: Path) -> Table:
    table = grid("what differs", "", str(old), str(new), "change")
    for fact in facts:
        table.add_row(
            Text(_name(fact.name)), Text(_text(fact.name, fact.old)), Text(_text(fact.name, fact.new)), _change(fact)
        )
    return table


def _changes(changes: tuple[Change, ...]) -> Table:
    table = grid("nodes in another way", "nodes", "", "before", "after")
    for change in changes:
        more = f", and {len(change.nodes) - NAMED} more" if len(change.nodes) > NAMED else ""
        table.add_row(
            str(len(change.nodes)),
            Text(", ".join(change.nodes[:NAMED]) + more),
            Text(change.old or "-"),
            Text(change.new or "-"),
        )
    return table


def _name(name: str) -> str:
    return shorten(name.removesuffix("_s").removesuffix("_bytes"), WIDTH)


def _text(name: str, value: Value) -> str:
    """A value as people read it, by the unit in its name."""
    if isinstance(value, (int, float)):
        return (
            seconds(value) if name.endswith("_s") else gibibytes(value) if name.endswith("_bytes") else f"{value:.6g}"
        )
    return "-" if value is None or not value else shorten(value, WIDTH)


def _change(fact: Fact) -> str:
    """By how much a step is longer, or memory more."""
    if (
        not fact.name.endswith(("_s", "_bytes"))
        or isinstance(fact.old, str)
        or isinstance(fact.new, str)
        or not fact.old
        or fact.new is None
    ):
        return ""
    change = 100 * (fact.new / fact.old - 1)
    return f"{change:+.1f} %" if abs(change) >= 0.05 else "less than 0.1 %"
