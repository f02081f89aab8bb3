"""Key heads that are fewer than ranks: whose projections strategies by hand leave whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.recipes.attention import makes_few_heads

LENGTH = 64
"""Each is used twice: there are two to the power of this many paths."""


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


def _branching(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for _ in range(LENGTH):
        k = k + k.neg()
    return _attention(q, k, v)


CASES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]] = {
    "keys and values": (_attention, True),
    "a long way": (_branching, True),
    "as queries, too": (lambda q, k, v: _attention(q + k.repeat(1, 2, 1, 1), k, v), False),
    "beside attention": (lambda q, k, v: _attention(q, k, v) + k.sum(), False),
}


class Model(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 32), nn.Linear(8, 16), nn.Linear(8, 16)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.body(q, k, v).sum()


@pytest.mark.parametrize("name", CASES)
def test_what_is_keys_and_values_only_has_few_heads(name: str) -> None:
    body, few = CASES[name]
    gm = capture(Model(body), (torch.randn(4, 6, 8),)).gm
    (keys,) = [
        n
        for n in gm.graph.nodes
        if n.op == "call_function" and n.target is torch.ops.aten.linear.default and "k" in n.args[1].name.split("_")
    ]
    assert makes_few_heads(keys, 4) is few
    assert not makes_few_heads(keys, 2), "two key heads are enough for two ranks"
