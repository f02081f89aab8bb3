"""Every file of the known formats in a folder, as rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.costmodel import mist, published, vtrain
from benchmarks.costmodel.rows import Loaded

FORMATS: tuple[tuple[str, Callable[[Path], Loaded]], ...] = (
    ("vtrain/*.csv", vtrain.load),
    ("published_runs*.csv", published.load),
    ("mist/*/*.yaml", mist.load),
)
"""Where files of a format are in the folder, and what reads one."""


def load(folder: Path) -> Loaded:
    """All rows of `folder`. Raises FileNotFoundError where no file of any format is there."""
    found = Loaded()
    files = [(path, read) for pattern, read in FORMATS for path in sorted(folder.glob(pattern))]
    if not files:
        raise FileNotFoundError(f"{folder} has no file of the formats {', '.join(pattern for pattern, _ in FORMATS)}")
    for path, read in files:
        loaded = read(path)
        found.rows += loaded.rows
        found.refused += loaded.refused
    return found
