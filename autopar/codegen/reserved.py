"""Names that emitted code uses itself, and where its comments start."""

from __future__ import annotations

from autopar.codegen.algorithms import IMPORTED

COMMENT_COLUMN = 88
REPLAYED = {"kept": "keep", "skipped": "skip"}
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


def atom(text: str) -> str:
    """`text`, in parentheses unless it is a name or a number."""
    return text if text.isidentifier() or text.isdigit() else f"({text})"
