"""Sizes with conditions: which ones a graph is for, and that it is right of all these."""

from __future__ import annotations

import re
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar.capture import capture
from autopar.capture.spans import LARGEST_TRIED_SIZE, Span, _around, _holding
from autopar.verify import graph_rows
from passes import facts
from tests.helpers import chunked


@given(st.sets(st.integers(2, 60), min_size=1), st.integers(2, 60))
def test_a_span_has_the_size_and_only_sizes_that_were_found(sizes, size):
    span = _around(np.array(sorted(sizes)), size)
    if span is None:
        assert size not in sizes or not {size - 1, size + 1} & sizes
        return
    assert size in span and all(one in sizes for one in range(2, 200) if one in span) and span.most > span.least
    assert span.step > 1 or not {span.least - 1, span.most + 1} & sizes


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("min(32, s) <= s", lambda s: True),
        ("(s + (8 - s % 8) % 8) // 8 == 2", lambda s: 8 < s <= 16),
        ("s > 5 and (s < 9 or not (s != 20))", lambda s: 5 < s < 9 or s == 20),
        ("b * s != 12", lambda s: 3 * s != 12),
        ("max(1, s // 4, b) == 3", lambda s: s < 16),
        ("b == 3", lambda s: True),
        ("b == 4", lambda s: False),
        ("1 // (s - s) == 0", lambda s: False),
        ("unknown(s)", lambda s: False),
        ("s", lambda s: False),
        ("s.bit_length() > 2", lambda s: False),
    ],
)
def test_conditions_are_tried_of_all_sizes(text, holds):
    sizes = np.arange(2, 40)
    assert _holding(text, "s", sizes, {"b": 3}).tolist() == [size for size in range(2, 40) if holds(size)]


@pytest.mark.parametrize(
    ("length", "span"),
    [
        (12, (9, 15, 1)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((5, (0, 7, 1)), (24, (16, LARGEST_TRIED_SIZE, 8)))),
    ],
)
def test_a_sequence_in_chunks_stays_symbolic_for_the_lengths_that_are_cut_alike(length, span):
    """One chunk, some with the last one padded, and some whole ones are three programs."""
    torch.manual_seed(0)
    model = chunked.Model()
    captured = capture(model, (), chunked.inputs(4, length))
    assert dict(captured.hints) == {"b": 4, "s": length} and facts.spans(captured.gm)["s"] == span
    allowed = [n for n in (3, 7, 9, 15, 16, 20, 40, 64) if n in Span(*span)]
    assert len(allowed) > 1
    for other in allowed:
        rows, notes = graph_rows(model, captured, (), chunked.inputs(3, other), training=True)
        assert not notes and all(row.ok for row in rows), (other, rows)


def test_a_condition_that_always_holds_leaves_nothing_to_say():
    class Best(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(chunked.VOCAB, 4)

        def forward(self, ids, labels):
            return (self.table(ids).sum(-1) * labels).topk(min(chunked.BEST, ids.shape[1]), -1).values.sum()

    captured = capture(Best(), (), chunked.inputs(4, 12))
    assert captured.notes == () and facts.spans(captured.gm)["s"] == (0, LARGEST_TRIED_SIZE, 1)


def test_what_is_beyond_is_said():
    captured = capture(chunked.Model(), (), chunked.inputs(4, 24))
    (note,) = captured.notes
    assert note.startswith(f"s may be 16 to {LARGEST_TRIED_SIZE}, multiples of 8: the model works only where ")


def test_what_fixes_a_size_is_said_and_not_what_it_need_only_be_a_multiple_of():
    """Chunks of four, and a loop over them: it is the loop that has one length."""

    class Chunks(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, 4)

        def forward(self, ids):
            x = self.embed(ids)
            x, state = x.view(x.shape[0], x.shape[1] // 4, 4, 4), 0
            for number in range(x.shape[1]):
                state = state * 0.5 + x[:, number].square()
            return state.mean()

    (note,) = capture(Chunks(), (torch.zeros(4, 8, dtype=torch.long),)).notes
    assert note.startswith("s is static: the model works only where s is 8 (a loop over parts of it); ")


def test_a_loop_over_positions_is_static():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.map = nn.Embedding(chunked.VOCAB, 4), nn.Linear(4, 4)

        def forward(self, ids, labels):
            x, state = self.table(ids), 0.0
            for position in range(ids.shape[1]):
                state = torch.tanh(self.map(x[:, position]) + state)
            return state.square().mean()

    lengths = []
    with mock.patch.object(
        nn.Embedding,
        "forward",
        lambda self, ids: (
            lengths.append(ids.shape[1].node.hint if isinstance(ids.shape[1], torch.SymInt) else ids.shape[1]),
            self.weight[ids],
        )[1],
    ):
        captured = capture(Loop(), (), chunked.inputs(4, 12))
    assert dict(captured.hints) == {"b": 4} and captured.notes[0].startswith("s is static")
    # traced at a short length, called at it; traced with the batch alone at the user's own length, which may be long,
    # once; twice for whether the second step is the first one, and once for what evaluation changes
    assert lengths[:3] == [10, 10, 12] and len(lengths) == 3 + 2 + 1


class Capped(nn.Module):
    """Keeps as many tokens of a batch as a number that is made of their number."""

    def __init__(self, count):
        super().__init__()
        self.table, self.count = nn.Embedding(chunked.VOCAB, 4), count

    def forward(self, ids):
        rows = self.table(ids).flatten(0, 1)
        count = self.count(rows.shape[0])
        return (rows.cumsum(0).clamp(max=count) * (torch.arange(rows.shape[0]) < count)[:, None]).square().mean()


@pytest.mark.parametrize(
    "count", [lambda n: (1.5 * n / 4).__int__(), lambda n: (n**0.5).__int__(), lambda n: 3 if n > 20 else n]
)
def test_conditions_of_batch_and_sequence_at_once_are_kept(count):
    """torch checks conditions of one size, and forgets those of several: a capacity of experts was that of the sizes
    that the model was traced with."""
    model, ids = Capped(count), torch.randint(chunked.VOCAB, (12, 6))
    captured = capture(model, (ids,))
    spans = facts.spans(captured.gm)
    for sizes in (
        (12, 6),
        *(
            (b, s)
            for b in (2, 11, 13)
            for s in (2, 7)
            if {"b", "s"} <= {*spans} and spans["b"][0] <= b and spans["s"][0] <= s
        ),
    ):
        rows, notes = graph_rows(model, captured, (torch.randint(chunked.VOCAB, sizes),), {}, training=True)
        assert not notes and all(row.ok for row in rows), (sizes, rows)
    assert (
        "b" in spans
        or captured.notes[0].startswith("b, s are static: the model works only where ")
        or captured.notes[-1].startswith("s is static: the model works only where ")
    )


class Causal(nn.Module):
    """A part of a mask that is as large as the sequence may be."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(chunked.VOCAB, 4), nn.Linear(4, 1)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 16, 16))

    def forward(self, ids):
        x, length = self.table(ids), ids.shape[1]
        scores = (x @ x.mT).masked_fill(self.mask[:, :length, :length] == 0, float("-inf"))
        return self.head(scores.softmax(-1) @ x).square().mean()


@pytest.mark.parametrize("length", [16, 8])
def test_how_a_part_of_a_buffer_lies_in_memory_is_no_condition(length):
    """At the best length of nanoGPT, s was static, for the model worked only where s != 16."""
    torch.manual_seed(0)
    model = Causal()
    captured = capture(model, (torch.randint(chunked.VOCAB, (4, length)),))
    assert captured.hints == {"b": 4, "s": length} and facts.spans(captured.gm)["s"] == (0, 16, 1)
    for sizes in ((3, 16), (3, 5), (4, length)):
        rows, notes = graph_rows(model, captured, (torch.randint(chunked.VOCAB, sizes),), {}, training=True)
        assert not notes and all(row.ok for row in rows), (sizes, rows)


class Nearest(nn.Module):
    """Distances of rows from each other, and from the rows of a table."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(6, 4), nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        rows = self.linear(x)
        return (
            torch.cdist(rows, self.table).min(1).values.mean()
            + torch.cdist(rows, rows.detach() + 1).mean()
            + torch.cdist(rows, self.table, p=1.0).mean()
        )


def test_how_distances_are_computed_is_no_condition():
    """`b may be 2 to 25` was said: torch computes them with a product from 26 rows on."""
    torch.manual_seed(0)
    model = Nearest()
    captured = capture(model, (torch.randn(8, 6),))
    assert captured.hints == {"b": 8} and not captured.notes
    for batch in (3, 25, 26, 60):
        rows, notes = graph_rows(model, captured, (torch.randn(batch, 6),), {}, training=True)
        assert not notes and all(row.ok for row in rows), (batch, rows)


class OneByOne(nn.Module):
    """A loop over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        total = 0.0
        for one in range(x.shape[0]):  # fixes b
            total = total + self.map(x[one]).square().mean()
        return total / x.shape[0]


class Slopes(OneByOne):
    """Gradients of a norm, of each sample."""

    def forward(self, x):
        slopes = torch.func.vmap(torch.func.grad(lambda one: self.map(self.norm(one)).sum()))(x)  # fixes b
        return slopes.square().mean()


@pytest.mark.parametrize("kind", [OneByOne, Slopes])
def test_the_line_that_makes_a_number_of_a_size_is_named(kind):
    (note,) = capture(kind(), (torch.zeros(4, 4),)).notes
    assert re.match(r"b is static: the model makes a number of b \(.*\) at test_spans.py:\d+: .*# fixes b; ", note), (
        note
    )
