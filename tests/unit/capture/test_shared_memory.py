"""Tensors that a model has in several places: weights that it finds elsewhere than in their modules are these weights,
and tensors that share memory with others which change are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.verify import graph_rows

WIDTH = 8
Body = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """A squared error of two maps, and of what `body` makes of the first one; `change` is called when it is made."""

    def __init__(self, body: Body, change: Callable[[Any], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.body = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), body
        self.register_buffer("table", torch.randn(4, WIDTH))
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.body(self, self.one(x))).square().mean()


def moves(net: Any, h: Tensor) -> Tensor:
    net.table.mul_(0.9).add_(h.detach().mean(0))
    return h + net.table.sum(0)


def in_a_list(net: Any) -> None:
    net.weights = [net.one.weight, (net.two.weight,)]


def in_a_dict(net: Any) -> None:
    net.found = {"weight": net.one.weight, "table": net.table}


def changes_found(net: Any, h: Tensor) -> Tensor:
    net.found["table"].add_(h.detach().mean(0))
    return h @ net.found["weight"] + net.table.sum(0)


def held_by_a_function(net: Any) -> None:
    weight = net.two.weight
    net.body = lambda _, h: moves(net, h @ weight)


def held_by_a_hook(net: Any) -> None:
    """As hooks that are defined where a model is made, and have the whole model in their closure."""
    seen = {}

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        net.table.mul_(0.9).add_(out.detach().mean(0))
        seen["out"] = out
        return net.two(out)

    net.one.register_forward_hook(hook)
    net.body = lambda net, h: h + seen["out"].tanh() + net.table.sum(0)


ELSEWHERE: dict[str, tuple[Body, Callable[[Any], object]]] = {
    "list": (lambda net, h: h @ net.weights[0] + net.weights[1][0].sum(0), in_a_list),
    "dict": (changes_found, in_a_dict),
    "function": (moves, held_by_a_function),
    "hook": (moves, held_by_a_hook),
    "penalty": (
        lambda net, h: h * sum(weight.square().mean() for weight in net.all),
        lambda net: setattr(net, "all", list(net.parameters())),
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_weights_are_found_outside_of_their_modules(name: str) -> None:
    """They were constants, without values and without gradients."""
    model, x = Net(*ELSEWHERE[name]), torch.randn(6, WIDTH)
    captured = capture(model, (x,))
    assert not captured.constants and not captured.notes
    rows, notes = graph_rows(model, captured, (x,), {}, training=True)
    assert not notes and all(row.ok for row in rows), rows


def row_of_a_weight(net: Any) -> None:
    net.register_buffer("row", net.one.weight.detach()[0])


def lower_half_of_a_table(net: Any) -> None:
    net.register_buffer("lower", net.table[2:])


def whole_as_an_attribute(net: Any) -> None:
    net.plain = net.two.weight.data


def tied_by_data(net: Any) -> None:
    net.two.weight.data = net.one.weight.data


def seen_by_a_function(net: Any) -> None:
    weight = net.two.weight.detach()
    net.body = lambda net, h: h @ weight


SHARED: dict[str, tuple[Body, Callable[[Any], object], str]] = {
    "row": (lambda net, h: h * net.row, row_of_a_weight, "row shares memory with one.weight, which trains"),
    "lower": (
        lambda net, h: moves(net, h) + net.lower.sum(0),
        lower_half_of_a_table,
        "lower shares memory with table, which forward changes",
    ),
    "attribute": (lambda net, h: h @ net.plain, whole_as_an_attribute, "shares memory with two.weight, which trains"),
    "tied": (lambda net, h: h, tied_by_data, "two.weight shares memory with one.weight, which trains"),
    "function": (moves, seen_by_a_function, "reads from elsewhere.* shares memory with two.weight, which trains"),
}


@pytest.mark.parametrize("name", SHARED)
def test_memory_of_what_changes_is_not_shared(name: str) -> None:
    body, change, why = SHARED[name]
    with pytest.raises(CaptureError, match=f"Net cannot be captured: .*{why}"):
        capture(Net(body, change), (torch.randn(6, WIDTH),))


def rows_of_one_tensor(net: Any) -> None:
    both = torch.randn(2 * WIDTH, WIDTH)
    net.one.weight, net.two.weight = nn.Parameter(both[:WIDTH]), nn.Parameter(both[WIDTH:])


@pytest.mark.parametrize(
    ("body", "change"),
    [
        (lambda net, h: h + net.lower.sum(0) + net.table.sum(0), lower_half_of_a_table),
        (moves, lambda net: net.register_buffer("again", net.table)),
        (lambda net, h: h, rows_of_one_tensor),
    ],
    ids=["unchanged", "two names", "rows"],
)
def test_memory_may_be_shared_where_nothing_differs(body: Body, change: Callable[[Any], object]) -> None:
    assert capture(Net(body, change), (torch.randn(6, WIDTH),)).gm


def test_in_inference_weights_do_not_change() -> None:
    model = Net(lambda net, h: h * net.row, row_of_a_weight)
    assert capture(model, (torch.randn(6, WIDTH),), mode="inference").gm


def test_a_tensor_that_no_operator_makes_is_refused() -> None:
    """It was planned, with a note that the model is on meta."""
    model = Net(lambda net, h: h * torch.tensor([h.mean(), h.sum()]).sum(), lambda net: None)
    with pytest.raises(CaptureError, match=r"Net cannot be captured: .*test_shared_memory.py:\d+.* torch.stack"):
        capture(model, (torch.randn(6, WIDTH),))
