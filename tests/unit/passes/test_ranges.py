"""Ranges over whole dims among indices: gone, with the same values, where at most one other index is left."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from passes import NORMALIZE, run
from tests.helpers.export import B, S, assert_same, check_values, export_graph

aten = torch.ops.aten
D = 3


def rows(x):
    return torch.arange(x.shape[0])


def columns(x):
    return torch.arange(x.shape[1])


FORMS = {
    "last of each": lambda x, last: x[rows(x), last],
    "last of each, by its size": lambda x, last: x[torch.arange(0, x.shape[0], 1), last % x.shape[1]],
    "several of each": lambda x, last: x[rows(x)[:, None], last[:, None] % torch.tensor([1, 2, 3])],
    "several of each, turned": lambda x, last: x[rows(x)[None, :], (last[:, None] % torch.tensor([1, 2, 3])).T],
    "the same of all": lambda x, last: x[rows(x)[:, None], torch.tensor([2, 0, 2, 1])],
    "one of all": lambda x, last: x[rows(x), torch.tensor(1)],
    "all": lambda x, last: x[rows(x)[:, None, None, None], columns(x)[None, None, :, None]],
    "all, turned": lambda x, last: x[rows(x)[None, :], columns(x)[:, None]],
    "first dim by number": lambda x, last: x[(last % 2)[:, None], columns(x)[None, :]],
    "behind a dim": lambda x, last: x.permute(2, 0, 1)[:, rows(x), last],
    "between dims": lambda x, last: x[:, :, None].expand(-1, -1, 4, -1)[
        :, :, torch.arange(4), torch.tensor([2, 0, 1, 1])
    ],
    "a range alone": lambda x, last: x[rows(x)],
    "from the end": lambda x, last: x[rows(x), last - 4],
    "from the end of all": lambda x, last: x[rows(x)[:, None], torch.tensor([-1, 0, -2, 1])],
    "from the end of several": lambda x, last: x[rows(x)[:, None], last[:, None] - torch.tensor([1, 2, 3])],
    "two dims of each": lambda x, last: x[
        rows(x)[:, None, None], last[:, None, None] % 5 + torch.arange(2)[:, None] + torch.tensor([0, 1, 1])
    ],
    "two dims of all": lambda x, last: x[rows(x)[:, None, None], torch.tensor([[2, 0, 2], [1, 1, 3]])],
    "two dims, turned": lambda x, last: x[rows(x), last % 5 + torch.arange(4).view(2, 2, 1)],
    "two dims of each, ranges expanded": lambda x, last: x[
        rows(x).view(-1, 1, 1).repeat(1, 2, 3),
        last[:, None, None] % 5 + torch.arange(2)[:, None] + torch.tensor([0, 1, 1]),
    ],
    "several of each, both expanded": lambda x, last: x[rows(x)[:, None].expand(-1, 2), last[:, None].expand(-1, 2)],
    "two others": lambda x, last: x[rows(x), last, last % 2],
    "two others in front": lambda x, last: x.mT.expand(2, -1, -1, -1).permute(0, 3, 1, 2)[last % 2, last, rows(x)],
    "two others, from the end": lambda x, last: x[rows(x)[:, None], last[:, None] - 4, torch.tensor([-1, 0, 1])],
    "two others between": lambda x, last: x.unsqueeze(1).expand(-1, 2, -1, -1)[rows(x), last % 2, last],
    "the largest": lambda x, last: (
        x[rows(x), x.sum(-1).argmax(-1)] + x[rows(x)[:, None], x.sum(-1).topk(2).indices].sum(1)
    ),
}
OTHERS = {
    "range over a part": lambda x, last: x[:, torch.arange(2), torch.tensor([2, 0])],
    "range from 1": lambda x, last: x[torch.arange(1, x.shape[0] + 1) % 2, last],
    "backwards": lambda x, last: x[rows(x).flip(0), last],
    "not neighbours": lambda x, last: x[rows(x), :, last % 2],
    "others around a range": lambda x, last: x.permute(1, 0, 2)[last, rows(x), last % 2],
    "a range between two dims": lambda x, last: x[
        rows(x)[:, None], last[None, :, None] % 2 + torch.arange(2)[:, None, None] + torch.tensor([0, 1])
    ],
}


class Indexed(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.read, self.map = {**FORMS, **OTHERS}[form], nn.Linear(D, D, dtype=torch.float64)

    def forward(self, x, last):
        return self.read(self.map(x), last).square().sum()


def normalized(form):
    torch.manual_seed(0)
    model, inputs = Indexed(form), {"x": torch.randn(4, 7, D, dtype=torch.float64), "last": torch.tensor([6, 0, 3, 1])}
    gm = run(export_graph(model, (), inputs, {"x": {0: B, 1: S}, "last": {0: B}}), NORMALIZE)
    check_values(gm)
    assert_same(gm, model, inputs, 1e-10)
    return gm


@pytest.mark.parametrize("form", FORMS)
def test_ranges_are_gone(form):
    assert not normalized(form).graph.find_nodes(op="call_function", target=aten.index.Tensor)


@pytest.mark.parametrize(
    ("form", "wrapped"),
    [("from the end", 1), ("last of each, by its size", 1), ("first dim by number", 0), ("the largest", 0)],
)
def test_numbers_that_may_be_below_0_count_from_the_end(form, wrapped):
    assert len(normalized(form).graph.find_nodes(op="call_function", target=aten.where.self)) == wrapped


@pytest.mark.parametrize("column", [7, 12, -8])
def test_cells_outside_of_a_matrix_are_refused(column):
    gm = run(export_graph(Cells(), (torch.randn(4, 5, 7), torch.tensor([6, 0, 3, 1])), {}, {}), NORMALIZE)
    assert not gm.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        gm(torch.randn(4, 5, 7), torch.tensor([0, 0, column, 0]))


class Cells(nn.Module):
    """One cell of the matrix of each sample, in the second row."""

    def forward(self, x, column):
        return x[rows(x), torch.ones_like(column), column].sum()


@pytest.mark.parametrize("form", OTHERS)
def test_anything_else_stays(form):
    assert len(normalized(form).graph.find_nodes(op="call_function", target=aten.index.Tensor)) == 1


class Hardest(nn.Module):
    """How far each sample is from the others, by products of all pairs and their diagonal."""

    def __init__(self, form):
        super().__init__()
        self.form, self.map = form, nn.Linear(D, D, dtype=torch.float64)

    def forward(self, x):
        z = self.map(x)
        pairs = z @ z.T
        squares = self.form(pairs)
        return (squares[:, None] - 2 * pairs + squares).amax(1).sum()


@pytest.mark.parametrize("form", [torch.diag, torch.diagonal, lambda pairs: torch.diagonal(pairs, 0, -1, 0)])
def test_a_diagonal_of_all_pairs_is_read_row_by_row(form):
    torch.manual_seed(0)
    model, inputs = Hardest(form), {"x": torch.randn(4, D, dtype=torch.float64)}
    gm = run(export_graph(model, (), inputs, {"x": {0: B}}), NORMALIZE)
    check_values(gm)
    assert_same(gm, model, inputs, 1e-10)
    assert not {aten.diag.default, aten.diagonal.default} & {node.target for node in gm.graph.nodes}
