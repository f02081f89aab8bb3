"""How many examples tests of properties try."""

from __future__ import annotations

from hypothesis import settings

FEWER = 3
"""By this, where the same ones are tried every time."""


def examples(count: int) -> settings:
    """Of a test that tries `count` examples: of `make test` the first third of them, which are the same every time."""
    return settings(max_examples=count // FEWER if settings.default.derandomize else count)
