"""Rows that leave a rank, against all ways to choose experts."""

from __future__ import annotations

import itertools
import math
from statistics import mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.routing import parts_of_run, parts_of_token, rows_sent


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_mean_over_all_choices(parts: int, each: int, data: st.DataObject) -> None:
    experts = parts * each
    copies = data.draw(st.integers(1, experts))
    wanted = mean(
        len({expert // each for expert in chosen}) for chosen in itertools.combinations(range(experts), copies)
    )
    assert parts_of_token(experts, copies, parts) == pytest.approx(wanted)


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_mean_over_all_tokens_that_a_gate_of_benchmarks_deals(parts: int, each: int, data: st.DataObject) -> None:
    experts = parts * each
    copies = data.draw(st.integers(1, experts))
    dealt = torch.arange(experts * copies).view(-1, copies) % experts
    assert parts_of_run(experts, copies, parts) == pytest.approx(
        mean(len(set(chosen)) for chosen in (dealt // each).tolist())
    )


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.data())
def test_rows_along_two_axes(own: int, major: int, minor: int, each: int, data: st.DataObject) -> None:
    """This rank sends to part 0 of `own`: of each choice the coordinates with experts, then all ranks with experts."""
    experts = own * major * minor * each
    copies = data.draw(st.integers(1, min(3, experts)))
    ours = [
        [expert for expert in chosen if expert < experts // own]
        for chosen in itertools.combinations(range(experts), copies)
    ]
    wanted = [mean(len({expert // per for expert in chosen}) for chosen in ours) for per in (minor * each, each)]
    assert rows_sent(1, experts, copies, [major, minor], own) == pytest.approx(wanted)


@given(st.integers(1, 300), st.integers(1, 16), st.integers(1, 600))
def test_never_more_than_the_experts_of_a_token_nor_than_parts(experts: int, copies: int, parts: int) -> None:
    found = parts_of_token(experts, copies, parts)
    assert min(1, copies) <= found + 1e-9 <= min(copies, parts) + 2e-9
    assert parts > 1 or math.isclose(found, 1)
