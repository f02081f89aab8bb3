"""Causal attention with its query rows split, in whole models, of fewer and of more rows than keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.verify import case_of, verify
from tests.helpers.ranks import living
from tests.helpers.verify import Sizes, Subject, by_chance

WIDTH, LENGTH = 8, 8


class Attends(nn.Module):
    """Each of the first `rows` positions sees itself and those before it, of the first `keys`."""

    def __init__(self, rows: int, keys: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.rows, self.keys = rows, keys

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k, v = q[:, :, : self.rows], k[:, :, : self.keys], v[:, :, : self.keys]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


@pytest.mark.parametrize(("rows", "keys"), [(4, LENGTH), (LENGTH, 5)])
@pytest.mark.parametrize("sizes", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_equals_one_device(sizes: Sizes, rows: int, keys: int) -> None:
    torch.manual_seed(0)
    model, x = Attends(rows, keys), torch.randn(4, LENGTH, WIDTH)
    captured = capture(model, (x,), dynamic_shapes={"x": {0: "b"}})
    who = Subject("attends", "train", captured, model.state_dict())
    attention = torch.ops.aten.scaled_dot_product_attention.default
    made = by_chance(who, sizes, 0, {attention: ("q",) * len(sizes)})
    assert "causal_rows" in str([node.runs for node in made.nodes.values()])
    report = verify(case_of(captured, made, who.weights, {"x": x}), ranks=living(made.ranks))
    assert report.ok, (report.first, report.worst)
