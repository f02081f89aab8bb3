"""`autopar simulate`: one step of a plan, rank by rank, without running it."""

from __future__ import annotations

import time
from pathlib import Path

from autopar.cli.console import progress, show, writable, write_json
from autopar.cli.rebuild import rebuild
from autopar.report.simulation import simulation as report
from autopar.simulate import simulate
from autopar.simulate.trace import write_trace


def simulate_command(where: Path, trace: Path | None, json: str | None) -> None:
    """Simulate, print, and write what was asked for. Raises PlanError where the trace cannot be written."""
    writable("--trace", trace, "the trace", folders=False, stdout=False)
    with progress(f"simulating {where}") as tell:
        rebuilt = rebuild(where, tell)
        began = time.perf_counter()
        found = simulate(rebuilt.captured.gm, rebuilt.plan, tell)
        took_s = time.perf_counter() - began
        if trace is not None:
            tell("writing the trace")
            write_trace(found, trace)
    if not write_json(json, {**found.to_dict(), "took_s": took_s}):
        written = f", trace written to {trace}: open it at https://ui.perfetto.dev" if trace is not None else ""
        show(report(found), "", f"simulated in {took_s:.2f} s{written}")
