"""How many examples tests of properties try."""

from __future__ import annotations

from hypothesis import settings

USUAL = 100
"""Of a test that says nothing, by hypothesis; a third of them in `make test` (conftest.py)."""


def examples(count: int) -> settings:
    """Settings of a test that tries `count` examples, where others try as many as is usual, and else that share."""
    return settings(max_examples=count * settings.default.max_examples // USUAL)
