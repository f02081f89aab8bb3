"""What is made of sizes: the same for every sample, or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from passes import NORMALIZE, facts, run
from passes.one_sample import DRAWN
from tests.helpers.export import B, S, assert_same, check_values, export_graph

LIKE = tuple(DRAWN.values())


def packed(x):
    """The causal mask of packed sequences, as Hugging Face writes it: read by the numbers of samples and positions."""
    count, length = x.shape[:2]
    places = torch.arange(length).unsqueeze(0).expand(count, -1)
    number = (torch.diff(places, dim=-1, prepend=places[:, :1] - 1) != 1).cumsum(-1)
    samples, rows, columns = (
        torch.arange(count)[:, None, None],
        torch.arange(length)[None, :, None],
        torch.arange(length)[None, None, :],
    )
    return (number[samples, rows] == number[samples, columns]) & (places[samples, columns] <= places[samples, rows])


SAME = {
    "packed mask": packed,
    "counted positions": lambda x: (
        (torch.ones(x.shape[:2], dtype=torch.long).cumsum(1) - 1).unsqueeze(-1).expand(-1, -1, x.shape[1])
    ),
    "sized by values": lambda x: x.new_ones(x.shape[0], x.shape[1], x.shape[1]).tril(),
    "flat and back": lambda x: (
        torch.ones(x.shape[0] * x.shape[1], dtype=torch.long).view(x.shape[0], x.shape[1], 1).expand(-1, -1, x.shape[1])
    ),
}
OTHER = {
    "numbers of samples": lambda x: torch.arange(x.shape[0])[:, None, None].expand(-1, x.shape[1], x.shape[1]),
    "all but the first": lambda x: (torch.arange(x.shape[0]) > 0)[:, None, None].expand(-1, x.shape[1], x.shape[1]),
    "a number of a tensor": lambda x: (
        torch.ones(x.shape[0], x.shape[1], x.shape[1], dtype=x.dtype) * torch.arange(x.shape[1]).sum().item()
    ),
    "the size of the batch": lambda x: (
        torch.full((x.shape[0], x.shape[1], x.shape[1]), 1.0, dtype=x.dtype) * x.shape[0]
    ),
}
PER_HEAD = {
    "zeros for each head": lambda q: torch.zeros(q.shape[0], q.shape[1], q.shape[1], dtype=q.dtype),
    "slopes for each head": lambda q: (
        (torch.arange(2 * 1.0).repeat(q.shape[0] // 2)[:, None, None] * torch.arange(q.shape[1]))
        .to(q.dtype)
        .expand(-1, q.shape[1], -1)
    ),
}
PER_HEAD_OTHER = {
    "samples inside": lambda q: (
        torch.arange(2 * 1.0)
        .repeat_interleave(q.shape[0] // 2)[:, None, None]
        .to(q.dtype)
        .expand(-1, q.shape[1], q.shape[1])
    ),
}


class Masked(nn.Module):
    def __init__(self, mask) -> None:
        super().__init__()
        self.w, self.mask = nn.Parameter(torch.randn(4, 4, dtype=torch.float64)), mask

    def forward(self, x):
        h = x @ self.w
        return (h @ h.transpose(1, 2)) * self.mask(x)


def graph_of(model: nn.Module):
    gm = run(export_graph(model, (), {"x": torch.randn(3, 6, 4, dtype=torch.float64)}, {"x": {0: B, 1: S}}), NORMALIZE)
    check_values(gm)
    return gm


def made(gm) -> list[tuple]:
    """Sizes of what is made of sizes and read with values: the operands of expands, where those are."""
    product = next(node for node in gm.graph.nodes if "mul.Tensor" in str(node.target))
    mask = product.args[1]
    return facts.shape(mask.args[0] if "expand" in str(mask.target) else mask)


@pytest.mark.parametrize("name", SAME)
def test_what_is_the_same_is_made_for_one_sample(name):
    model = Masked(SAME[name])
    gm = graph_of(model)
    assert made(gm)[0] == 1
    for batch in (2, 5):
        assert_same(gm, model, {"x": torch.randn(batch, 7, 4, dtype=torch.float64)})


@pytest.mark.parametrize("name", OTHER)
def test_what_differs_or_counts_samples_stays(name):
    model = Masked(OTHER[name])
    gm = graph_of(model)
    for batch in (2, 5):
        assert_same(gm, model, {"x": torch.randn(batch, 7, 4, dtype=torch.float64)})


class Heads(Masked):
    """Two heads, of all samples in one dim."""

    def forward(self, x):
        q = (x @ self.w).unflatten(-1, (2, 2)).transpose(1, 2).flatten(0, 1)
        return (q @ q.mT + self.mask(q)).softmax(-1) @ q


@pytest.mark.parametrize("name", PER_HEAD)
def test_what_is_the_same_for_heads_of_each_sample_is_made_for_those_of_one(name):
    model = Heads(PER_HEAD[name])
    gm = graph_of(model)
    (added,) = [node for node in gm.graph.nodes if "add.Tensor" in str(node.target)]
    wide = added.args[1].args[0]
    assert [str(n.target) for n in (added.args[1], wide)] == ["aten.reshape.default", "aten.expand.default"]
    assert facts.shape(wide.args[0])[:2] == (1, 2)
    for batch in (2, 5):
        assert_same(gm, model, {"x": torch.randn(batch, 7, 4, dtype=torch.float64)})


@pytest.mark.parametrize("name", PER_HEAD_OTHER)
def test_what_differs_for_heads_stays(name):
    model = Heads(PER_HEAD_OTHER[name])
    gm = graph_of(model)
    for batch in (2, 5):
        assert_same(gm, model, {"x": torch.randn(batch, 7, 4, dtype=torch.float64)})


def test_random_numbers_of_a_batch_are_drawn_like_a_tensor_of_its_sizes():
    model = Masked(lambda x: torch.rand(x.shape[0], 1, 1, dtype=x.dtype))
    gm = graph_of(model)
    drawn = [node for node in gm.graph.nodes if node.target in LIKE]
    assert [facts.shape(node)[1:] for node in drawn] == [(1, 1)] and not [
        node for node in gm.graph.nodes if node.target in DRAWN
    ]
    assert_same(gm, model, {"x": torch.randn(5, 7, 4, dtype=torch.float64)})


def test_values_lie_where_all_others_do():
    with torch.device("meta"):
        model = Masked(lambda x: SAME["counted positions"](x) * torch.arange(x.shape[1]))
        gm = run(export_graph(model, (torch.randn(3, 6, 4, dtype=torch.float64),), dims=({0: B, 1: S},)), NORMALIZE)
    assert {value.device.type for node in gm.graph.nodes if node.op != "output" for value in facts.tensors(node)} == {
        "meta"
    }
