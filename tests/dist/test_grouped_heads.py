"""Grouped query heads cut where there are too few key heads: beside every other way to cut an attention, on real
ranks."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.problem.graph import Op
from autopar.rules import options_for
from autopar.rules.algorithms import agree
from tests.helpers.verify import Sizes, Subject, by_chance, planned, planner_of, subject

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
Cut = tuple[Sizes, tuple[str, ...]]
BESIDE: list[Cut] = [
    ((2, 2), ("g", "g")),
    ((2, 2), ("h", "g")),
    ((2, 2), ("b", "g")),
    ((2, 2), ("g", "v")),
    ((2, 2), ("g", "q+k")),
    ((4,), ("g",)),
]
TURNED: list[Cut] = [
    ((2, 2, 2), ("h", "q+k", "g")),
    ((2, 2), ("g", "b")),
    ((2, 2), ("q+k", "g")),
    ((2, 2, 2), ("g", "g", "g")),
    ((2, 2, 2), ("h", "g", "g")),
]
"""The same in another order and on more axes."""
INSIDE: list[Cut] = [
    ((2, 2), ("g", "g")),
    ((2, 2), ("h", "g")),
    ((2, 2), ("g", "q+k")),
    ((4,), ("g",)),
    ((2, 2), ("g", "q")),
]
INSIDE_SLOW: list[Cut] = [
    ((2, 2), ("b", "g")),
    ((2, 2), ("g", "b")),
    ((2, 2), ("q+k", "g")),
    ((2, 2, 2), ("h", "q+k", "g")),
    ((2, 2), ("q", "g")),
    ((2, 2, 2), ("g", "q", "g")),
]
"""Those that 12 heads of 4 features allow, and those of rows of causal attention (q)."""
WIDTH = 48


class Grouped(nn.Module):
    """Query heads of 4 features, as many in each group."""

    def __init__(self, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, width, of_keys = heads, groups, 4 * heads, 4 * groups
        self.q, self.k, self.v, self.o = (nn.Linear(width, n) for n in (width, of_keys, of_keys, width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b, s, width = x.shape
        each = self.heads // self.groups
        q, k, v = (part(x).view(b, s, -1, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = (t[:, :, None].expand(-1, -1, each, -1, -1).reshape(b, self.heads, s, 4) for t in (k, v))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (self.o(found.transpose(1, 2).reshape(b, s, width)) - y).square().mean()


class _Grouped(Subject):
    def batch(self, batch: int = 8, seq: int = 8) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        return {name: torch.randn(batch, seq, WIDTH, generator=generator) for name in self.captured.input_names}


@cache
def grouped(heads: int = 12, groups: int = 6) -> _Grouped:
    """12 query heads of 6 groups: on 4 ranks the chunks of queries end inside groups."""
    torch.manual_seed(0)
    model, x = Grouped(heads, groups), torch.zeros(8, 8, 4 * heads)
    return _Grouped("grouped", "train", capture(model, (x, x)), model.state_dict())


@pytest.mark.parametrize(
    ("sizes", "factors"), [*BESIDE, *(pytest.param(*cut, marks=pytest.mark.slow) for cut in TURNED)], ids=str
)
def test_own_heads_beside_every_other_cut(sizes: Sizes, factors: tuple[str, ...]) -> None:
    """Everything else of the plan is random."""
    check(subject("hf-llama-2kv"), sizes, factors)


@pytest.mark.parametrize(
    ("sizes", "factors"), [*INSIDE, *(pytest.param(*cut, marks=pytest.mark.slow) for cut in INSIDE_SLOW)], ids=str
)
def test_own_heads_where_chunks_end_inside_groups(sizes: Sizes, factors: tuple[str, ...]) -> None:
    """There each query head gets its own copy of a key head; `causal_rows` wants keys apart from queries, as without
    rotary embeddings."""
    check(grouped(), sizes, factors)


def check(who: Subject, sizes: Sizes, factors: tuple[str, ...]) -> None:
    made = by_chance(who, sizes, 3, {ATTENTION: factors})
    assert "own_heads" in str([node.runs for node in made.nodes.values()])
    report = who.verified(made, 8, 8)
    assert report.ok, (report.first, report.worst)


def attention() -> Op:
    """The attention of a model of 8 query heads and 2 key heads."""
    program = planner_of(grouped(8, 2), (2,)).program
    return next(op for op in program.ops.values() if op.target is ATTENTION)


def test_key_heads_are_not_cut_inside_a_cut_by_query_heads() -> None:
    """Ranks would lack the key head of their queries; the other way round they have it."""
    call = attention().call
    options = {option.factor: option for option in options_for(call, 2)}
    assert (
        agree((options["h"], options["g"]))
        and agree((options["g"], options["g"]))
        and agree((options["g"], options["b"]))
    )
    assert not agree((options["g"], options["h"])) and not agree((options["g"], options["b"], options["h"]))


@pytest.mark.parametrize("recipe", ["tp", "tp_sp", "megatron"])
def test_tensor_parallelism_cuts_query_heads_where_key_heads_are_too_few(recipe: str) -> None:
    """2 key heads on 4 ranks: every rank has the projections of keys and values, or gathers what they give."""
    made = planned(grouped(8, 2), (4,), recipe)
    node = made.nodes["scaled_dot_product_attention"]
    assert node.runs == ("own_heads",) and node.ins == ("S1|S1", "R|P", "R|P") and node.outs == ("S1|S1",)
    rests = {part: made.nodes[f"p_{part}_weight"].outs[0] for part in "qkvo"}
    assert rests["q"] == "S0|S0" and rests["o"] == "S1|S1"
    assert rests["k"] == rests["v"] and rests["k"] in ("R|R", "S0|S0", "S1|S1")
