"""Features in the places of tokens: recognised where whole rows are filled from as many features for each sample."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from passes import NORMALIZE, ops, run
from tests.helpers.export import B, S, assert_same, check_values, export_graph

N, D, TOKEN = 3, 4, 7
aten = torch.ops.aten


def _written(x, marks, rows):
    x[marks] = rows
    return x


FORMS = {
    "three dims": lambda x, marks, rows: x.masked_scatter(marks.unsqueeze(-1), rows),
    "expanded mask": lambda x, marks, rows: x.masked_scatter(marks.unsqueeze(-1).expand_as(x), rows),
    "flattened": lambda x, marks, rows: x.masked_scatter(marks[..., None], rows.reshape(-1, D)),
    "written to a mask": lambda x, marks, rows: torch.index_put(x, [marks], rows.reshape(-1, D)),
    "written to a mask, in place": lambda x, marks, rows: _written(x.clone(), marks, rows.view(-1, D)),
    "flattened, in place": lambda x, marks, rows: x.clone().masked_scatter_(marks[..., None], rows.flatten(0, 1)),
}
OTHERS = {
    "added to a mask": lambda x, marks, rows: x.index_put([marks], rows.reshape(-1, D), accumulate=True),
    "a sample's rows": lambda x, marks, rows: x.index_put([marks[:, 0]], rows[:0, :1].expand(0, 8, D)),
    "single numbers": lambda x, marks, rows: x.masked_scatter(marks.unsqueeze(-1) & (x > 0), rows),
    "of another batch": lambda x, marks, rows: x.masked_scatter(marks.unsqueeze(-1), rows[:2]),
    "features of other widths": lambda x, marks, rows: x.masked_scatter(marks.unsqueeze(-1), rows.reshape(-1, N * D)),
}


class Filled(nn.Module):
    """Token embeddings, with features in the places of one token."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.table, self.map = (
            form,
            nn.Embedding(9, D, dtype=torch.float64),
            nn.Linear(2, D, dtype=torch.float64),
        )

    def forward(self, ids, features):
        return ({**FORMS, **OTHERS}[self.form](self.table(ids), ids == TOKEN, self.map(features))).square().sum()


def normalized(form):
    torch.manual_seed(0)
    model, ids = Filled(form), torch.zeros(4, 8, dtype=torch.long)
    ids[:, 1 : 1 + N] = TOKEN
    inputs = {"ids": ids, "features": torch.randn(4, N, 2, dtype=torch.float64)}
    gm = run(export_graph(model, (), inputs, {"ids": {0: B, 1: S}, "features": {0: B}}), NORMALIZE)
    check_values(gm)
    return gm, model, inputs


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_features_are_one_op_on_samples_that_stay_apart(form):
    gm, model, inputs = normalized(form)
    assert_same(gm, model, inputs, 1e-10)
    (fill,) = [node for node in gm.graph.nodes if node.target is ops.fill_rows]
    assert [tuple(n.meta["val"].shape[1:]) for n in fill.args][2] == (N, D) and not gm.graph.find_nodes(
        op="call_function", target=aten.reshape.default
    )


@pytest.mark.parametrize("form", OTHERS)
def test_anything_else_stays(form):
    gm, _, _ = normalized(form)
    assert not any(node.target is ops.fill_rows for node in gm.graph.nodes)
    assert sum(node.target in (aten.masked_scatter.default, aten.index_put.default) for node in gm.graph.nodes) == 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 2**16))
def test_places_are_filled_in_order_and_must_be_as_many(counts, seed):
    """Samples that differ in their places are no error for who has them all: the features are taken one after the
    other."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.stack([torch.randperm(5, generator=generator) < count for count in counts])
    x, total = torch.zeros(len(counts), 5, 2), sum(counts)
    if total % len(counts):
        with pytest.raises(ValueError, match=rf"got {total} places"):
            ops.fill_rows(x, places, torch.ones(len(counts), total // len(counts), 2))
        return
    rows = torch.arange(1.0, 2 * total + 1).view(len(counts), -1, 2)
    filled = ops.fill_rows(x, places, rows)
    assert torch.equal(filled[places], rows.reshape(-1, 2)) and not filled[~places].any()
