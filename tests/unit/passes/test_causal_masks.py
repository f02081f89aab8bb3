"""Masks from sizes only: which are causal, which hide nothing, which stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from passes import NORMALIZE, run
from tests.helpers.export import B, S, assert_same, export_graph


def positions(x):
    rows = torch.arange(x.shape[1])
    return rows[:, None], rows[None, :]


MASKS = {
    "causal": (lambda x: positions(x)[0] >= positions(x)[1], "causal"),
    "causal 4d": (lambda x: (positions(x)[0] >= positions(x)[1]).expand(x.shape[0], 1, -1, -1), "causal"),
    "causal float": (
        lambda x: torch.triu(torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype), 1),
        "causal",
    ),
    "open": (lambda x: positions(x)[0] >= positions(x)[1] - (1 << 40), "open"),
    "open for long": (lambda x: positions(x)[0] >= positions(x)[1] - 10**6, "other"),
    "open float": (lambda x: torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype), "open"),
    "window": (lambda x: (positions(x)[0] >= positions(x)[1]) & (positions(x)[0] - positions(x)[1] < 4), "other"),
    "long window": (
        lambda x: (positions(x)[0] >= positions(x)[1]) & (positions(x)[1] > positions(x)[0] - 4096),
        "other",
    ),
    "long window of floats": (
        lambda x: torch.where(
            (positions(x)[0] >= positions(x)[1]) & (positions(x)[1] + 100.0 > positions(x)[0]), 0.0, -1e9
        ).to(x.dtype),
        "other",
    ),
    "chunks": (
        lambda x: (positions(x)[0] >= positions(x)[1]) & (positions(x)[0] // 8192 == positions(x)[1] // 8192),
        "other",
    ),
    "last positions": (
        lambda x: (positions(x)[0] >= positions(x)[1]) & (positions(x)[1] >= x.shape[1] - 1000),
        "other",
    ),
    "first positions": (lambda x: (positions(x)[0] >= positions(x)[1]) | (positions(x)[0] > 1 << 20), "other"),
    "causal, hidden by a number": (lambda x: (positions(x)[0] < positions(x)[1]).to(x.dtype) * -65504.0, "causal"),
    "causal, far": (lambda x: positions(x)[0] + (1 << 40) >= positions(x)[1] + (1 << 40), "causal"),
    "strict prefix": (lambda x: (positions(x)[0] >= positions(x)[1]) | (positions(x)[1] < 2), "other"),
    "content": (lambda x: (positions(x)[0] >= positions(x)[1]) & (x.sum() > -1e9), "other"),
    "bias": (lambda x: (positions(x)[0] - positions(x)[1]).to(x.dtype), "other"),
}


class Attention(nn.Module):
    def __init__(self, mask) -> None:
        super().__init__()
        self.w, self.mask = nn.Parameter(torch.randn(4, 4, dtype=torch.float64)), mask

    def forward(self, x):
        h = (x @ self.w).unsqueeze(1)
        return F.scaled_dot_product_attention(h, h, h, attn_mask=self.mask(x), scale=0.3)


@pytest.mark.parametrize("name", MASKS)
def test_mask(name):
    mask, verdict = MASKS[name]
    model = Attention(mask)
    gm = run(export_graph(model, (), {"x": torch.randn(3, 6, 4, dtype=torch.float64)}, {"x": {0: B, 1: S}}), NORMALIZE)
    node = next(node for node in gm.graph.nodes if "scaled_dot" in str(node.target))
    if verdict == "other":
        assert node.args[3] is not None
    else:
        assert node.args[3:] == (None, 0.0, verdict == "causal") and node.kwargs == {"scale": 0.3}
    assert_same(gm, model, {"x": torch.randn(2, 7, 4, dtype=torch.float64)})


@pytest.mark.parametrize(
    ("window", "longest", "verdict"),
    [(64, 64, "causal"), (63, 64, "other"), (100, 64, "causal"), (33, 64, "other"), (64, 4096, "other")],
)
def test_a_window_as_long_as_what_is_seen_hides_nothing(window, longest, verdict):
    """The greatest length that may be is known: a model is no longer than its positions."""
    model = Attention(lambda x: (positions(x)[0] >= positions(x)[1]) & (positions(x)[1] > positions(x)[0] - window))
    dims = {"x": {0: B, 1: Dim("s", max=longest)}}
    gm = run(export_graph(model, (), {"x": torch.randn(3, 6, 4, dtype=torch.float64)}, dims), NORMALIZE)
    assert (next(node for node in gm.graph.nodes if "scaled_dot" in str(node.target)).args[3] is None) is (
        verdict == "causal"
    )
    assert_same(gm, model, {"x": torch.randn(2, 64, 4, dtype=torch.float64)})


def test_keys_of_another_length_keep_their_mask():
    class Cross(Attention):
        def forward(self, x):
            h = (x @ self.w).unsqueeze(1)
            return F.scaled_dot_product_attention(h[:, :, 1:], h, h, attn_mask=self.mask(x)[1:])

    model = Cross(MASKS["causal"][0])
    dims = {"x": {0: B, 1: Dim("s", min=3)}}
    gm = run(export_graph(model, (), {"x": torch.randn(3, 6, 4, dtype=torch.float64)}, dims), NORMALIZE)
    assert next(node for node in gm.graph.nodes if "scaled_dot" in str(node.target)).args[3] is not None
    assert_same(gm, model, {"x": torch.randn(2, 7, 4, dtype=torch.float64)})
