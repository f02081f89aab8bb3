"""The order of the original state dict, as a short expression in the emitted file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autopar.codegen.context import Context
from autopar.problem.graph import Op
from autopar.problem.original_names import Naming, namings

LINE_COLUMNS = 100  # columns of a line of names


def ranked(ops: Sequence[Op], order: Sequence[str]) -> list[Op]:
    """Parameters or buffers in the order of the state dict (by their first instance); those that it does not hold come
    last."""
    place = {name: i for i, name in enumerate(order)}
    return sorted(ops, key=lambda op: place.get(_first(op), len(place)))


def _first(op: Op) -> str:
    """The full name of a parameter or buffer, of its first instance in a block."""
    return str((op.node.meta.get("fqns") or [op.fqn])[0])


def order_text(context: Context) -> str:
    """A tuple of names, in which the path of a block stands for all that the block declares, parameters before buffers:
    `("wte.weight", *(f"h.{i}" for i in range(12)), "ln_f.weight")`. What stands in another order is named one by
    one."""
    blocks, scopes = _blocks(context)
    starts = {names[0]: path for path, names in blocks.items() if names}
    entries: list[tuple[str, str]] = []  # (scope of the run or "", entry)
    at = 0
    while at < len(context.order):
        path = starts.get(context.order[at])
        if path is not None and list(context.order[at : at + len(blocks[path])]) == blocks[path]:
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
        if number and column + len(text) > LINE_COLUMNS:
            yield "\n" + " " * 13
            column = 0
        yield f"{' ' if column else ''}{text}"
        column += len(text) + 1


def _blocks(context: Context) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Module path of a block -> the names that it adds to the state dict; and module path -> the scope of its run."""
    blocks: dict[str, list[str]] = {}
    scopes: dict[str, str] = {}
    for run in context.program.runs.values():
        held = [op for op in context.program.ops.values() if op.scope == run.scope]
        tables = (
            [op for op in held if op.role == "param"],
            [op for op in held if op.role == "buffer" and _first(op) not in context.fleeting],
        )
        ops = [op for table in tables for op in ranked(table, context.order)]
        for number, naming in enumerate(namings(context.program, run)):
            for op in ops:
                path = naming if isinstance(naming, str) else naming[context.short_name(op).partition(".")[0]]
                blocks.setdefault(path, []).append(str(op.node.meta["fqns"][number]))
                scopes[path] = run.scope
    return blocks, scopes


def _grouped(entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The entries as source: single names, and one expression for consecutive blocks of a run."""
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


def compact(namings: Sequence[Naming]) -> str:
    """The names of instances as source: a comprehension where their numbers form an arithmetic sequence, else a
    list."""
    columns = (
        {"": [n for n in namings if isinstance(n, str)]}
        if isinstance(namings[0], str)
        else {head: [n[head] for n in namings if isinstance(n, dict)] for head in namings[0]}
    )
    counts = {head: count for head, paths in columns.items() if (count := _count(paths)) is not None}
    if len(namings) < 3 or len(counts) < len(columns) or len({count.step for count in counts.values()}) > 1:
        return repr(list(namings))
    start, step = min((count.first, count.step) for count in counts.values())
    texts = {head: count.text(start) for head, count in counts.items()}
    one = texts[""] if "" in texts else f"{{{', '.join(f'{head!r}: {text}' for head, text in texts.items())}}}"
    return f"[{one} for i in range({start}, {start + step * len(namings)}{f', {step}' if step > 1 else ''})]"


class _Count(NamedTuple):
    """Paths whose numbers form an arithmetic sequence: `h.0`, `h.2`, `h.4`, ... have head `h.`, first 0, step 2 and an
    empty tail."""

    head: str
    first: int
    step: int
    tail: str

    def text(self, start: int) -> str:
        """The f-string of the paths in a comprehension whose `i` begins with `start`."""
        return f'f"{self.head}{{i{f" + {self.first - start}" if self.first > start else ""}}}{self.tail}"'


def _count(paths: Sequence[str]) -> _Count | None:
    numbers = [re.fullmatch(r"([^{}]*?)(\d+)([^\d{}]*)", path) for path in paths[:2]]
    if len(numbers) < 2 or numbers[0] is None or numbers[1] is None:
        return None
    first = int(numbers[0][2])
    count = _Count(numbers[0][1], first, int(numbers[1][2]) - first, numbers[0][3])
    same = all(path == f"{count.head}{first + count.step * i}{count.tail}" for i, path in enumerate(paths))
    return count if count.step > 0 and same else None
