"""`autopar emit`: the sharded module of a plan, as a folder."""

from __future__ import annotations

from pathlib import Path

from autopar.bundle import Bundle, check_free
from autopar.cli.console import progress, show
from autopar.cli.rebuild import Rebuilt, rebuild
from autopar.codegen.module import emit
from autopar.codegen.tables import Names


def emit_command(where: Path, folder: Path) -> None:
    """Capture the plan's model again and write the folder; refuses another graph."""
    check_free(folder)
    with progress(f"emitting {where}") as tell:
        made = bundle(rebuild(where, tell)).save(folder)
    show(f"written to {made}: plan.json, sharded.py, constants.pt, README.md")


def bundle(rebuilt: Rebuilt) -> Bundle:
    """The plan with its emitted source and constants."""
    captured = rebuilt.captured
    return Bundle(rebuilt.plan, emit(captured.gm, rebuilt.plan, Names.of(captured)), captured.constants)
