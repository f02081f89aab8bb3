"""Bags of rows of a table: one op on samples that stay apart where each has as many, one op on all where not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.verify import graph_rows
from passes import ops
from tests.helpers.export import targets

IDS = torch.tensor([[1, 2, 0, 2], [0, 3, 3, 3], [1, 1, 4, 0], [4, 2, 0, 1]])
STARTS = torch.tensor([0, 5, 6, 12])


class Bags(nn.Module):
    """The mean square of bags of mapped rows."""

    def __init__(self, call, **settings):
        super().__init__()
        self.bag, self.call = nn.EmbeddingBag(5, 3, **settings), call

    def forward(self, ids, gates, starts=None):
        return self.call(self.bag, ids, gates, starts).square().mean()


def plain(bag, ids, gates, starts):
    return bag(ids)


def weighted(bag, ids, gates, starts):
    return bag(ids, per_sample_weights=gates * 2)


def single(bag, ids, gates, starts):
    """Bags of one row each, as features of one category have them."""
    return bag(ids[:, :1])


def single_weighted(bag, ids, gates, starts):
    return bag(ids[:, :1], per_sample_weights=gates[:, :1])


def behind(bag, ids, gates, starts):
    return bag(ids.reshape(-1), starts)


def behind_weighted(bag, ids, gates, starts):
    return bag(ids.reshape(-1), starts, per_sample_weights=gates.reshape(-1))


def last_row_is_padding(bag, ids, gates, starts):
    """As nn.EmbeddingBag does not call it: with the number of the row counted from the end."""
    return F.embedding_bag(ids, bag.weight, starts, mode="sum", padding_idx=-1)


def behind_multiples(bag, ids, gates, starts):
    return bag(ids.reshape(-1), torch.arange(ids.shape[0]) * ids.shape[1])


def behind_remainders(bag, ids, gates, starts):
    """Bags of one row each, and the last of the rest."""
    return bag(ids.reshape(-1), torch.arange(ids.shape[0]) % ids.shape[1])


def captured(call, with_starts=False, **settings):
    torch.manual_seed(0)
    model = Bags(call, **settings)
    inputs = (IDS, torch.rand(4, 4), *([STARTS] if with_starts else []))
    found = capture(model, inputs)
    rows, notes = graph_rows(model, found, inputs, {}, training=True)
    assert not notes and all(row.ok for row in rows) and len(rows) > 1, rows
    return found


@pytest.mark.parametrize(
    ("call", "settings"),
    [
        (plain, {"mode": "sum"}),
        (plain, {}),
        (plain, {"mode": "max"}),
        (plain, {"mode": "sum", "padding_idx": 3}),
        (last_row_is_padding, {"mode": "sum"}),
        (plain, {"mode": "sum", "sparse": True}),
        (behind_multiples, {"mode": "sum"}),
        (single, {"mode": "max"}),
        (single_weighted, {"mode": "sum"}),
        (weighted, {"mode": "sum"}),
        (weighted, {"mode": "sum", "padding_idx": 0}),
    ],
)
def test_bags_of_one_length_are_rows_of_samples(call, settings):
    found = captured(call, **settings)
    assert list(found.hints) == ["b", "s"]
    (bag,) = [node for node in found.gm.graph.nodes if node.target is ops.bag]
    assert not {"aten.embedding_bag.padding_idx", "aten.reshape.default", "aten.arange.default"} & set(
        targets(found.gm)
    )
    assert bag.args[ops.MODE] == settings.get("mode", "mean")


@pytest.mark.parametrize(
    ("call", "settings"),
    [
        (behind, {"mode": "sum"}),
        (behind, {}),
        (behind_weighted, {"mode": "sum"}),
        (behind, {"mode": "sum", "include_last_offset": True}),
    ],
)
def test_bags_of_several_lengths_are_one_op(call, settings):
    found = captured(call, with_starts=True, **settings)
    assert sum(node.target is ops.ragged_bags for node in found.gm.graph.nodes) == 1


def test_bags_that_begin_at_other_numbers_than_multiples_of_a_length_are_not_taken_for_rows_of_samples():
    found = captured(behind_remainders, mode="sum")
    assert ops.bag not in {node.target for node in found.gm.graph.nodes}


def test_gradients_scaled_by_how_often_a_row_comes_stay_those_of_torch():
    found = captured(plain, mode="sum", scale_grad_by_freq=True)
    assert "aten.embedding_bag.padding_idx" in targets(found.gm)


def test_bags_of_a_matrix_given_as_one_row_outside_of_a_capture_are_torchs():
    assert F.embedding_bag.__module__ == "torch.nn.functional"
