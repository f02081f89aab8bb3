"""Names that emitted code uses itself, and where its comments start."""

from __future__ import annotations

from autopar.codegen.algorithms import IMPORTED

COMMENT_COLUMN = 88
"""A statement that ends before this column has its comment on the same line, from this column on."""
REPLAYED = {"kept": "keep", "skipped": "skip"}
"""Reshard.replay -> the function that the call is written in."""
USED_IN_SCOPES = (
    "self",
    "F",
    "torch",
    "MESH",
    "reshard",
    "gather",
    "remat",
    "keep",
    "skip",
    "enough",
    "block",
    "changed",
    "i",
    *IMPORTED,
)
"""Names that no variable of an emitted forward may have."""


def atom(text: str) -> str:
    """`text`, in parentheses unless it is a name or a number."""
    return text if text.isidentifier() or text.isdigit() else f"({text})"
