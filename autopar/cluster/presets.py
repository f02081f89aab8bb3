"""The cluster files that come with autopar."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "clusters"


def presets() -> tuple[str, ...]:
    """The names of the presets, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def preset_path(name: str) -> Path | None:
    """The file of preset `name`, or None where there is none."""
    return FOLDER / f"{name}.toml" if name in presets() else None
