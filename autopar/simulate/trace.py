"""A simulation as a trace in Chrome's JSON object format, which Perfetto and chrome://tracing open.

One process per place, one thread per stream of its representative rank; complete events ("X") with times in
microseconds; memory as a counter ("C"). The format is described in "Trace Event Format"
(docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.plan import write_atomic
from autopar.simulate.result import Place, Simulation


def write_trace(simulation: Simulation, path: str | Path) -> None:
    """Write the trace, whole or not at all. Raises PlanError where `path` cannot be written."""
    write_atomic(Path(path), json.dumps(trace(simulation), separators=(",", ":")) + "\n")


def trace(simulation: Simulation) -> dict[str, Any]:
    """The trace as JSON types."""
    events = [event for place in simulation.places for event in _events(place)]
    about = {
        "model": simulation.model,
        "cluster": simulation.cluster,
        "step_s": simulation.step_s,
        "schedule": simulation.schedule,
        "microbatches": simulation.microbatches,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _events(place: Place) -> Iterator[dict[str, Any]]:
    pid = place.place
    stages = f", stages {', '.join(map(str, place.stages))}" if place.stages else ""
    yield _about(pid, 0, "process_name", f"place {pid}{stages}")
    spans = place.spans
    streams = {name: tid for tid, name in enumerate(dict.fromkeys(span.stream for span in spans), 1)}
    for name, tid in streams.items():
        yield _about(pid, tid, "thread_name", name)
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    for span in spans:
        arguments = {"args": {"bytes": span.nbytes}} if span.nbytes else {}
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "pid": pid,
            "tid": streams[span.stream],
            "ts": 1e6 * span.begin_s,
            "dur": 1e6 * (span.end_s - span.begin_s),
            **arguments,
        }
    for at_s, nbytes in place.memory:
        yield {"ph": "C", "name": "memory", "pid": pid, "tid": 0, "ts": 1e6 * at_s, "args": {"bytes": nbytes}}


def _about(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
