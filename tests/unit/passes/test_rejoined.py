"""Rows that are taken apart and put together again are left as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from passes import NORMALIZE, run
from tests.helpers.export import assert_same, check_values, export_graph, targets

FORMS = {
    "one behind the other": lambda x: torch.cat(list(x), dim=0),
    "unbound": lambda x: torch.cat(x.unbind(0)),
    "stacked": lambda x: torch.stack([row for row in x]),  # noqa: C416  # as models have it
}
OTHERS = {
    "in another order": lambda x: torch.cat(list(x)[::-1]),
    "not all": lambda x: torch.cat(list(x)[1:]),
    "along another dim": lambda x: torch.cat(list(x), dim=1),
    "taken apart along another dim": lambda x: torch.cat(x.unbind(1)),
    "mapped": lambda x: torch.cat([row * n for n, row in enumerate(x)]),
}


class Joined(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.join, self.map = {**FORMS, **OTHERS}[form], nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x):
        return self.join(self.map(x)).square().sum()


def normalized(form):
    torch.manual_seed(0)
    model, inputs = Joined(form), {"x": torch.randn(4, 5, 3, dtype=torch.float64)}
    gm = run(export_graph(model, (), inputs), NORMALIZE)
    check_values(gm)
    assert_same(gm, model, inputs, 1e-10)
    return targets(gm)


@pytest.mark.parametrize("form", FORMS)
def test_whole_rows_stay_together(form):
    assert not {"aten.split_with_sizes.default", "aten.cat.default", "aten.stack.default"} & set(normalized(form))


@pytest.mark.parametrize("form", OTHERS)
def test_anything_else_stays(form):
    assert "aten.split_with_sizes.default" in normalized(form)
