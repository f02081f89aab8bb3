"""Sums, means and losses over the rows that a mask picks, and such rows that go back to their places: all rows are
computed, with the values and the gradients of the picked ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes import NORMALIZE, edit, facts, run
from passes._torch import free_unbacked_symbols
from tests.helpers.export import B, S, assert_same, check_values, export_graph, targets

D = 5


class Picks(nn.Module):
    """Something of rows [b, s, D], or [b, D], labels and a mask."""

    def __init__(self, loss: Callable[..., object]) -> None:
        super().__init__()
        self.loss, self.linear, self.norm = loss, nn.Linear(D, D).double(), nn.LayerNorm(D).double()

    def forward(self, x: Tensor, y: Tensor, m: Tensor) -> object:
        return self.loss(self, self.linear(x), y, m)


def _head_of_some(net: Picks, h: Tensor, y: Tensor, m: Tensor) -> object:
    rows = net.norm(F.gelu(net.linear(h[m])) + net.linear.bias)
    return F.cross_entropy(rows, y[m], label_smoothing=0.1), (rows.argmax(-1) == y[m]).double().mean()


def _by_places(net: Picks, h: Tensor, y: Tensor, m: Tensor) -> object:
    found = m.nonzero(as_tuple=True)
    return -h.log_softmax(-1)[found].gather(-1, y[found].unsqueeze(-1)).squeeze(-1).mean()


def _written_back(net: Picks, h: Tensor, y: Tensor, m: Tensor) -> object:
    h = h.clone()
    h[h > 0] *= 2
    h[m] = net.norm(F.gelu(net.linear(h[m]))) + h[m].exp()
    rows, low = m.nonzero(as_tuple=True), h < 1
    return h.cos().index_put(rows, h.sin()[rows].exp(), accumulate=True), h.masked_scatter(
        low, torch.masked_select(h, low).tanh() * 3
    )


LOSSES: dict[str, Callable[..., object]] = {
    "classes": lambda net, h, y, m: F.cross_entropy(h[m], y[m]),
    "sum over classes": lambda net, h, y, m: F.cross_entropy(h[m], y[m], reduction="sum", ignore_index=2),
    "weights of classes": lambda net, h, y, m: F.cross_entropy(
        h[m], y[m], net.norm.weight.detach() + y.new_tensor(range(D))
    ),
    "variance of all that counts": lambda net, h, y, m: torch.masked.var(h, None, True, mask=h > 0),
    "likelihoods": lambda net, h, y, m: F.nll_loss(F.log_softmax(h, -1)[m], y[m]),
    "squares": lambda net, h, y, m: F.mse_loss(h[m], h.detach().flip(-1)[m]),
    "against constants": lambda net, h, y, m: (
        F.binary_cross_entropy_with_logits(h[m], torch.ones_like(h[m]))
        + (h[m] - torch.full_like(h[m], 0.5)).abs().mean()
        + F.mse_loss(h[m], torch.zeros_like(h[m]))
    ),
    "squares of each": lambda net, h, y, m: ((h[m] - h.detach().cos()[m]) ** 2).mean(),
    "elements": lambda net, h, y, m: (
        torch.masked_select(h.square().sum(-1), m).mean(),
        torch.masked_select(y, m).sum(),
    ),
    "columns": lambda net, h, y, m: (h[m].mean(0), h[m].sum(0), h[m].sum(-1).mean()),
    "a head of picked rows": _head_of_some,
    "by places": _by_places,
    "written back": _written_back,
    "binary, each with weights of its own": lambda net, h, y, m: F.binary_cross_entropy_with_logits(
        h[..., 0][m], (y % 2).to(h.dtype)[m], h.detach()[..., 1].abs()[m], pos_weight=h.detach()[..., 2].abs()[m]
    ),
    "binary": lambda net, h, y, m: F.binary_cross_entropy_with_logits(h[..., 0][m], (y % 2).to(h.dtype)[m]),
}


def graph(loss: str, wide: bool):
    """The graph of a loss in which no size depends on what tensors hold, compared with its model; and which operators
    it has."""
    torch.manual_seed(0)
    lead, net = (4, 3) if wide else (6,), Picks(LOSSES[loss])
    given = {"x": torch.randn(*lead, D, dtype=torch.float64), "y": torch.randint(D, lead), "m": torch.rand(lead) < 0.6}
    dims = {name: {0: B, 1: S} if wide else {0: B} for name in given}
    gm = run(export_graph(net, (), given, dims), NORMALIZE)
    check_values(gm)
    assert not [
        node for node in edit.calls(gm) for held in facts.tensors(node) if free_unbacked_symbols(list(held.shape))
    ]
    assert_same(gm, net, given)
    return gm, net, given


@pytest.mark.parametrize(
    ("loss", "wide"),
    [
        *((loss, False) for loss in LOSSES),
        ("classes", True),
        ("columns", True),
        *(pytest.param(loss, True, marks=pytest.mark.slow) for loss in LOSSES if loss not in ("classes", "columns")),
    ],
)
def test_of_picked_rows(loss: str, wide: bool) -> None:
    graph(loss, wide)


def test_what_is_not_picked_has_no_part_in_it() -> None:
    """Labels that are no class, and rows that are no numbers."""
    gm, net, given = graph("classes", wide=False)
    out = ~given["m"]
    assert_same(gm, net, {**given, "y": given["y"].masked_fill(out, -7)})
    gm, net, given = graph("columns", wide=False)
    net.linear.weight.requires_grad_(False)  # its own gradient is nan, in the model too
    assert_same(gm, net, {**given, "x": given["x"].masked_fill(out[:, None], float("inf"))})


@pytest.mark.parametrize(
    "loss",
    [
        lambda net, h, y, m: h[m].square().log().mean(),
        lambda net, h, y, m: (h[m] / h.exp()[m]).sum(),
        lambda net, h, y, m: h[m].abs().sqrt().mean(),
        lambda net, h, y, m: F.layer_norm(h[m], (D,), eps=0.0).square().mean(),
        lambda net, h, y, m: F.rms_norm(h[m], (D,), eps=0.0).square().mean(),
    ],
)
def test_gradients_that_may_be_infinite_are_left_alone(loss: Callable[..., object]) -> None:
    given = {
        "x": torch.randn(6, D, dtype=torch.float64),
        "y": torch.zeros(6, dtype=torch.long),
        "m": torch.rand(6) < 0.6,
    }
    gm = run(export_graph(Picks(loss), (), given, {name: {0: B} for name in given}), NORMALIZE)
    assert "aten.index.Tensor" in targets(gm) and [
        node for node in edit.calls(gm) for held in facts.tensors(node) if free_unbacked_symbols(list(held.shape))
    ]


def _numbers(net: Picks, h: Tensor, y: Tensor, m: Tensor) -> object:
    h, y = h.clone(), y.clone()
    h[h > 0.5] = -1.5
    y[m] = 1
    h[y == 2] = 3
    return F.cross_entropy(h.flatten(0, -2), y.flatten())


def _one_row(net: Picks, h: Tensor, y: Tensor, m: Tensor) -> object:
    h = h * 2
    h[m] = net.linear.bias
    h[y == 1] = net.norm.weight[0].exp()
    return h.index_put((y == 3).nonzero(as_tuple=True), net.linear.bias * 2).sin().mean()


@pytest.mark.parametrize("write", [_numbers, _one_row])
@pytest.mark.parametrize("sizes", [(4, 6), (24,)], ids=str)
def test_the_same_for_all_rows_of_a_mask_is_pointwise(write: Callable[..., object], sizes: tuple[int, ...]) -> None:
    """Labels of padding, mask tokens: an index by a mask would be computed whole on every rank."""
    torch.manual_seed(0)
    x = torch.randn(*sizes, D, dtype=torch.float64)
    model, inputs = Picks(write), {"x": x, "y": torch.randint(0, D, sizes), "m": torch.rand(sizes) < 0.5}
    dims = dict(enumerate((B, S)[: len(sizes)]))
    gm = run(export_graph(model, (), inputs, dict.fromkeys(inputs, dims)), NORMALIZE)
    check_values(gm)
    assert_same(gm, model, inputs, 1e-10)
    assert not {"aten.index_put.default", "aten.nonzero.default"} & set(targets(gm))
