"""Text for people: seconds, bytes, sizes and names as reports and messages write them, and the first line of an
error."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence

SHOWN = 60  # characters of a value that an error shows


def shown(value: object) -> str:
    """The beginning of a value, as Python writes it."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def seconds(value: float | None) -> str:
    """`0.0123` -> `12.3 ms`; `-` for None and 0, and for what is left of 0 after rounding: less than a picosecond."""
    if value is None or abs(value) < 1e-12:
        return "-"
    if value < 0:
        return f"-{seconds(-value)}"
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= unit * 0.9995:
            return f"{three(value / unit)} {name}"
    return f"{three(value * 1e9)} ns"


def gibibytes(value: float | None) -> str:
    """Bytes -> `61.2 GiB`, `12.3 MiB`, `1.5 KiB`; `-` for None."""
    if value is None:
        return "-"
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return f"{three(value / unit)} {name}"
    return f"{value:.0f} B"


def megabytes(value: float) -> str:
    """Bytes that travel, as links are rated: `33.6 MB`, `3.07 kB`, `4 B`."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit * 0.9995:
            return f"{three(value / unit)} {name}"
    return f"{value:.0f} B"


def quoted(name: str) -> str:
    """A name as a string literal of Python, in double quotes, whatever is in it (JSON's escapes are valid in
    Python)."""
    return json.dumps(name, ensure_ascii=False)


def inside(name: str) -> str:
    """A name as text within a docstring: in one line, and without anything that would end the docstring."""
    return quoted(" ".join(name.split()))[1:-1]


def numbered(what: str, numbers: Sequence[int]) -> str:
    """`("stage", [3])` -> `stage 3`; `("stage", [0, 2, 3, 4])` -> `stages 0, 2 to 4`. `numbers` rise."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"{what}{'s' * (len(numbers) > 1)} {shown}"


def times(sizes: Sequence[int]) -> str:
    """`(2, 4)` -> `2x4`; `1` for no axis."""
    return "x".join(map(str, sizes)) or "1"


def sizes(text: str) -> tuple[int, ...] | None:
    """`2x4` -> `(2, 4)`, the inverse of `times`; None for any other text."""
    parts = text.split("x")
    good = all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) > 0 for part in parts)
    return tuple(map(int, parts)) if good else None


def three(value: float) -> str:
    """Three significant digits, never as a power of ten."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def near(name: str, known: Iterable[str]) -> str:
    """The end of a message about a wrong name: the known names that look like it, in capitals or not; empty if there
    are none."""
    names = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), list(names), n=3)
    return f" (near: {', '.join(names[one] for one in found)})" if found else ""
