"""The order of the state dict, so that the emitted module has the original one: as a short expression."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from autopar.codegen.context import Context
from autopar.problem.graph import Op, Run

WIDTH = 100  # columns of a line of names


def ranked(ops: Sequence[Op], order: Sequence[str]) -> list[Op]:
    """Parameters or buffers in the order of the state dict (by their first instance); those that it does not hold come last."""
    place = {name: i for i, name in enumerate(order)}
    return sorted(ops, key=lambda op: place.get(_first(op), len(place)))


def _first(op: Op) -> str:
    """The full name of a parameter or buffer, of its first instance in a block."""
    return str((op.node.meta.get("fqns") or [op.fqn])[0])


def order_text(context: Context) -> str:
    """A tuple of names, in which the path of a block stands for all that the block declares, parameters before buffers:
    `("wte.weight", *(f"h.{i}" for i in range(12)), "ln_f.weight")`. What stands in another order is named one by one."""
    blocks = {path: _declared(context, run, path) for run in context.program.runs.values() for path in context.prefixes(run) if path}
    starts = {names[0]: path for path, names in blocks.items() if names}
    entries: list[tuple[str, str]] = []  # (scope of the run or "", entry)
    scopes = {path: run.scope for run in context.program.runs.values() for path in context.prefixes(run)}
    at = 0
    while at < len(context.order):
        path = starts.get(context.order[at])
        if path is not None and list(context.order[at:at + len(blocks[path])]) == blocks[path]:
            entries.append((scopes[path], path))
            at += len(blocks[path])
        else:
            entries.append(("", context.order[at]))
            at += 1
    return "(" + "".join(_wrapped(list(_grouped(entries)))) + ")"


def _wrapped(parts: Sequence[str]) -> Iterator[str]:
    """The items of a tuple, in lines."""
    column = 0
    for number, part in enumerate(parts):
        text = f"{part}," if number < len(parts) - 1 or len(parts) == 1 else part
        if number and column + len(text) > WIDTH:
            yield "\n" + " " * 13
            column = 0
        yield f"{' ' if column else ''}{text}"
        column += len(text) + 1


def _declared(context: Context, run: Run, path: str) -> list[str]:
    """What the block at `path` puts into the state dict."""
    held = [op for op in context.program.ops.values() if op.scope == run.scope]
    tables = ([op for op in held if op.role == "param"], [op for op in held if op.role == "buffer" and _first(op) not in context.fleeting])
    return [f"{path}.{context.short_name(op)}" for table in tables for op in ranked(table, context.order)]


def _grouped(entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Each name as it is, each row of blocks of one run as one expression."""
    row: list[str] = []
    for (scope, entry), after in zip(entries, [*entries[1:], ("", "")], strict=True):
        if not scope:
            yield repr(entry)
            continue
        row.append(entry)
        if after[0] != scope:
            text = compact(row)
            yield f"*({text[1:-1]})" if text.startswith("[f") else ", ".join(map(repr, row))
            row = []


def compact(paths: Sequence[str]) -> str:
    """A list of paths as source; as a comprehension where they count up."""
    match = re.fullmatch(r"(.*?)(\d+)([^\d]*)", paths[0])
    if match and len(paths) > 2:
        head, first, tail = match.group(1), int(match.group(2)), match.group(3)
        if list(paths) == [f"{head}{first + i}{tail}" for i in range(len(paths))]:
            return f'[f"{head}{{i}}{tail}" for i in range({first}, {first + len(paths)})]'
    return repr(list(paths))
