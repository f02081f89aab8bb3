"""Which weights share a bucket."""

from __future__ import annotations

import pytest

from autopar.buckets import gradient_buckets, leaf_buckets


def _leaves(text: str) -> list[str]:
    """Leaves written as reader, kind and bytes (`1a4`), reader `-` outside of blocks, in buckets of 10 bytes."""
    found = leaf_buckets(
        text.split(),
        alike=lambda leaf: leaf[1],
        reader=lambda leaf: None if leaf[0] == "-" else leaf[0],
        nbytes=lambda leaf: int(leaf[2:]),
        limit_bytes=10,
    )
    return [" ".join(members) for members in found]


def test_full_gradient_buckets_come_first_and_kinds_do_not_mix() -> None:
    found = gradient_buckets(
        ["b3", "a4", "a4", "b3", "a4", "a1"], alike=lambda one: one[0], nbytes=lambda one: int(one[1:]), limit_bytes=10
    )
    assert found == [["a4", "a4", "a4"], ["b3", "b3"], ["a1"]]


@pytest.mark.parametrize(
    ("leaves", "buckets"),
    [
        ("1a4 1a4 1a4 1a4", ["1a4 1a4 1a4", "1a4"]),  # full
        ("1a4 1b4 1a4", ["1a4", "1b4", "1a4"]),  # other collectives
        ("1a4 2a4 2a4", ["1a4 2a4 2a4"]),  # less than half full, so that the next block joins
        ("1a5 2a4 2a4", ["1a5", "2a4 2a4"]),  # half full
        ("-a1 -a1 1a1 2a1", ["-a1 -a1", "1a1 2a1"]),  # waited for before the first block
    ],
)
def test_a_block_begins_a_bucket_where_it_would_wait_for_much_else(leaves: str, buckets: list[str]) -> None:
    assert _leaves(leaves) == buckets
