"""Runs a tuple of passes: checks the graph after each, measures, and can write each result as text.

The runner knows no pass. The tuple is the order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from torch import fx

from passes import facts
from passes.lint import check_structure

Pass = Callable[[fx.GraphModule], fx.GraphModule]


def run(
    gm: fx.GraphModule,
    passes: Sequence[Pass],
    *,
    dump: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> fx.GraphModule:
    """Applies the passes in order. `dump` is a folder that gets `03_name.txt` per pass, `progress` is told each name.

    Seconds per pass are in `gm.meta["pass_s"]`. An error keeps its type and gets a note: the pass and the node.
    """
    for index, one in enumerate(passes):
        name = pass_name(one)
        if progress is not None:
            progress(name)
        start = time.perf_counter()
        with _Noted(name):
            gm = one(gm)
            check_structure(gm)
        seconds = gm.meta.setdefault("pass_s", {})
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / f"{index:02d}_{name}.txt").write_text(as_text(gm), encoding="utf-8")
    return gm


def pass_name(one: Pass) -> str:
    """Name of a pass, also of one whose options are bound by functools.partial."""
    return str(getattr(getattr(one, "func", one), "__name__", one))


def as_text(gm: fx.GraphModule) -> str:
    """The graph as one line per node: name, target, arguments, sizes, dtype, module, source; then the folded bodies."""
    lines = _lines(gm)
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            lines += ["", f"{name}:", as_text(child).rstrip("\n")]
    return "\n".join(lines) + "\n"


def _lines(gm: fx.GraphModule) -> list[str]:
    """One line for each node of one graph."""
    lines = []
    for node in gm.graph.nodes:
        target = "" if node.op in ("placeholder", "output") else f" {node.target}"
        held = " ".join(
            f"[{', '.join(str(facts.as_size(size, gm)) for size in tensor.shape)}] {tensor.dtype}".replace("torch.", "")
            for tensor in (facts.tensors(node) if "val" in node.meta else ())
        )
        annotations = " ".join(f"{key}={node.meta[key]}" for key in ANNOTATIONS if key in node.meta)
        parts = [f"{node.name} = {node.op}{target}{node.args}{node.kwargs or ''}", held, annotations]
        lines.append("  ".join(part for part in parts if part) + f"  # {facts.where(node)}")
    return lines


ANNOTATIONS = ("role", "fqn", "flops", "backward_flops", "read_bytes", "written_bytes", "saved")
"""Keys of `meta` that `as_text` shows."""


class _Noted:
    """Adds to an error that passes through: the pass, and the node that it was working on."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            node = _node_at_fault(trace)
            error.add_note(f"in pass {self.name}" + (f", node {node.name} ({facts.where(node)})" if node else ""))


def _node_at_fault(trace: TracebackType | None) -> fx.Node | None:
    """The innermost `node` that code of the passes was working on when the error came."""
    found = None
    while trace is not None:
        local = trace.tb_frame.f_locals.get("node")
        if isinstance(local, fx.Node) and trace.tb_frame.f_globals.get("__name__", "").startswith("passes."):
            found = local
        trace = trace.tb_next
    return found
