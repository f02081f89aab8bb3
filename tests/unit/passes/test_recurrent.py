"""Recurrent networks: FLOPs against torch's own counter, and what the CPU keeps against what autograd holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from passes import ANNOTATE, NORMALIZE, edit, facts, run
from passes.annotate_flops import FLOPS
from passes.recurrent import CELLS, GATES
from tests.helpers.export import export_graph

STEPS, SAMPLES, WIDE, HIDDEN = 6, 4, 8, 12


class First(nn.Module):
    """The first result of a network, of what a linear layer gives if there is one."""

    def __init__(self, network: nn.Module, up: nn.Module | None = None) -> None:
        super().__init__()
        self.network, self.up = network, up or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        result = self.network(self.up(x))
        return result[0] if isinstance(result, tuple) else result


def annotated(model: nn.Module, x: Tensor):
    return run(export_graph(model, (x,)), (*NORMALIZE, *ANNOTATE))


NETWORKS = {
    "lstm": (nn.LSTM, {}),
    "lstm of two layers": (nn.LSTM, {"num_layers": 2}),
    "lstm both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "lstm with projection": (nn.LSTM, {"num_layers": 2, "proj_size": 5}),
    "lstm with dropout": (nn.LSTM, {"num_layers": 3, "dropout": 0.5}),
    "lstm both ways with dropout": (nn.LSTM, {"num_layers": 2, "dropout": 0.5, "bidirectional": True}),
    "gru": (nn.GRU, {}),
    "gru with positions first": (nn.GRU, {"num_layers": 2, "batch_first": False}),
    "gru both ways": (nn.GRU, {"num_layers": 2, "bidirectional": True, "bias": False}),
    "rnn": (nn.RNN, {"num_layers": 2, "nonlinearity": "relu"}),
    "rnn with dropout": (nn.RNN, {"num_layers": 2, "dropout": 0.5}),
}


def made(name: str, dtype: torch.dtype, wide: int = WIDE, hidden: int = HIDDEN) -> nn.Module:
    kind, options = NETWORKS[name]
    return kind(wide, hidden, dtype=dtype, **{"batch_first": True, **options})


def flops_agree(model: nn.Module, x: Tensor) -> None:
    products = [node for node in edit.calls(annotated(model, x)) if node.target in FLOPS]
    with FlopCounterMode(display=False) as forward:
        result = model(x)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    assert sum(map(facts.flops, products)) == forward.get_total_flops()
    assert sum(map(facts.backward_flops, products)) == backward.get_total_flops()


@pytest.mark.parametrize("trained", [False, True], ids=["data", "trained"])
@pytest.mark.parametrize("name", NETWORKS)
def test_flops_are_those_of_torch(name, trained):
    flops_agree(
        First(made(name, torch.float64), nn.Linear(WIDE, WIDE, dtype=torch.float64) if trained else None),
        torch.randn(SAMPLES, STEPS, WIDE, dtype=torch.float64),
    )


def test_frozen_layers_have_no_backward():
    network = made("lstm of two layers", torch.float64)
    for name, weight in network.named_parameters():
        weight.requires_grad_(name.endswith("l1"))
    gm = export_graph(First(network), (x := torch.randn(SAMPLES, STEPS, WIDE, dtype=torch.float64),))
    for node in gm.graph.nodes:
        if node.meta.get("role") == "param":
            node.meta["requires_grad"] = node.meta["fqn"].split(".")[1].endswith("l1")
    (node,) = edit.calls(run(gm, (*NORMALIZE, *ANNOTATE)), *GATES)
    result = network(x)[0]
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    assert facts.backward_flops(node) == backward.get_total_flops()


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_flops_of_cells(kind):
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(WIDE, HIDDEN, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            state = self.cell(x[1], self.cell(x[0]))
            return state[0] if isinstance(state, tuple) else state

    model, x = Cells(), torch.randn(2, SAMPLES, WIDE, dtype=torch.float64)
    assert len(list(edit.calls(annotated(model, x), *CELLS))) == 2
    flops_agree(model, x)


class One(nn.Module):
    """A cell, for one position, of states that are trained or data."""

    def __init__(self, kind: type[nn.Module], states: int, *, trained: bool, first: bool) -> None:
        super().__init__()
        self.cell, self.up = (
            kind(WIDE, HIDDEN, dtype=torch.float64),
            nn.Linear(WIDE, WIDE, dtype=torch.float64) if trained else None,
        )
        self.states = (
            nn.ParameterList(torch.randn(SAMPLES, HIDDEN, dtype=torch.float64) for _ in range(states))
            if first
            else None
        )
        self.count = states

    def given(self, x: Tensor) -> tuple[Tensor, Any]:
        states = (
            tuple(self.states)
            if self.states is not None
            else tuple(torch.zeros(SAMPLES, HIDDEN, dtype=torch.float64) for _ in range(self.count))
        )
        return (x if self.up is None else self.up(x)), states if self.count > 1 else states[0]

    def forward(self, x: Tensor) -> Tensor:
        found = self.cell(*self.given(x))
        return sum(found) if self.count > 1 else found


@pytest.mark.parametrize("first", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("trained", [False, True], ids=["data", "trained"])
@pytest.mark.parametrize(("kind", "states"), [(nn.LSTMCell, 2), (nn.GRUCell, 1), (nn.RNNCell, 1)])
def test_what_cells_keep(kind, states, trained, first):
    model, x = One(kind, states, trained=trained, first=first), torch.randn(SAMPLES, WIDE, dtype=torch.float64)
    (node,) = edit.calls(annotated(model, x), *CELLS)
    inward, before = model.given(x)
    before = tuple(state.detach().requires_grad_(first) for state in (before if states > 1 else (before,)))
    assert said(node) == held(
        lambda inward: model.cell(inward, before if states > 1 else before[0]), inward.detach().requires_grad_(trained)
    )


def said(node) -> float:
    """Bytes that a call keeps on a CPU, by its annotation."""
    kept = node.meta.get("saved_on_cpu", node.meta["saved"])
    operands = edit.tensor_operands(node)
    own = [
        facts.nbytes(operands[place]) if place < len(operands) else facts.tensors(node)[place - len(operands)].nbytes
        for place in (*kept.positions, *kept.copies)
    ]
    return sum(own) + kept.extra_bytes


def held(network: Callable[[Tensor], Any], x: Tensor) -> int:
    """Bytes that autograd keeps of it."""
    found: dict[int, int] = {}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(x)
    return sum(found.values())


@pytest.mark.parametrize("trained", [False, True], ids=["data", "trained"])
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_kept_position_by_position(name, trained):
    network, up = made(name, torch.float64), nn.Linear(WIDE, WIDE, dtype=torch.float64) if trained else None
    x = torch.randn(SAMPLES, STEPS, WIDE, dtype=torch.float64)
    (node,) = edit.calls(annotated(First(network, up), x), *GATES)
    assert said(node) == held(network, x.clone().requires_grad_(trained))


@pytest.mark.parametrize("sizes", [(64, 64), (128, 64), (48, 256), (80, 100)], ids=str)
@pytest.mark.parametrize("name", [name for name in NETWORKS if name.startswith("lstm") and "projection" not in name])
def test_what_onednn_keeps(name, sizes):
    """Its workspace is in pages."""
    network, x = made(name, torch.float32, *sizes), torch.randn(64, 20, sizes[0])
    (node,) = edit.calls(annotated(First(network), x), *GATES)
    assert said(node) == pytest.approx(held(network, x), rel=0.002)
