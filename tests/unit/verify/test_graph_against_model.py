"""The user's module against its graph: the same numbers, and what capture could get wrong is seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from autopar import frontend
from autopar.capture import capture
from autopar.verify import Row, graph_rows
from autopar.verify.graph_against_model import SINGLE, _Both, _rows, undropped
from autopar.verify.randomness import keep_all
from passes import ops
from passes.switches import EVALUATED
from tests.helpers.tiny import TINY

aten = torch.ops.aten
QUICK = ("hf-gpt2", "hf-resnet", "hf-mixtral", "recommender")


def rows_of(
    name: str,
    mode: str = "train",
    spoil: Callable[[fx.GraphModule], None] = lambda gm: None,
    dtype: torch.dtype = torch.float32,
) -> list[Row]:
    loaded = frontend.load(
        TINY[name], batch=4, seq=16, device="cpu", dtype=dtype, train=mode == "train", labels=mode == "train"
    )
    captured = capture(loaded.model, loaded.args, loaded.kwargs, mode=mode)
    spoil(captured.gm)
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    rows, notes = graph_rows(loaded.model, captured, loaded.args, loaded.kwargs, training=mode == "train")
    assert notes == [] and all(torch.equal(tensor, before[name]) for name, tensor in loaded.model.state_dict().items())
    assert all(parameter.grad is None for parameter in loaded.model.parameters())
    return rows


@pytest.mark.parametrize(
    ("name", "mode", "dtype"),
    [
        *((name, "train", torch.float32) for name in QUICK),
        ("hf-gpt2", "inference", torch.float32),
        ("hf-llama", "train", torch.bfloat16),
        *(
            pytest.param(name, mode, torch.float32, marks=pytest.mark.slow)
            for name in TINY
            for mode in ("train", "inference")
        ),
    ],
)
def test_a_graph_is_its_model(name: str, mode: str, dtype: torch.dtype) -> None:
    """Dropout and statistics of batch norms included; weights of half precision count as they are."""
    rows = rows_of(name, mode, dtype=dtype)
    assert {row.name for row in rows} >= ({"loss"} if mode == "train" else set())
    assert any(row.name.startswith("gradient of") for row in rows) is (mode == "train")
    assert max(row.error for row in rows) < 1e-5


def open_masks(gm: fx.GraphModule) -> None:
    """Attention sees what comes later."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.target is aten.scaled_dot_product_attention.default:
                node.args = (*node.args[:5], False)
    gm.recompile()


def fewer_outputs(gm: fx.GraphModule) -> None:
    """The logits are forgotten."""
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (output.args[0][:1],)
    gm.meta["outputs"] = gm.meta["outputs"][:1]


@pytest.mark.parametrize(
    ("name", "spoil", "wrong"),
    [
        ("hf-gpt2", open_masks, {"loss", "logits", "gradient of transformer.wte.weight"}),
        ("gpt", fewer_outputs, {"2 outputs of the model, 1 of its graph"}),
    ],
)
def test_a_graph_that_is_another_model_is_seen(
    name: str, spoil: Callable[[fx.GraphModule], None], wrong: set[str]
) -> None:
    assert {row.name for row in rows_of(name, "train", spoil) if not row.ok} >= wrong


class Counted(nn.Module):
    """A batch norm, and a sum of all that came by."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, 4] -> []."""
        self.seen = self.seen + x.detach().sum(0)
        return self.norm(x).square().mean() + self.seen.sum()


def test_what_buffers_hold_behind_the_step_is_compared() -> None:
    """A change that capture did not see was none: running statistics of instance norms, of which the operator's schema
    says nothing."""
    model, x = Counted(), torch.randn(6, 4)
    captured = capture(model, (x,))
    rows, _ = graph_rows(model, captured, (x,), {}, training=True)
    assert {row.name for row in rows if row.name.startswith("new ")} == {
        *(f"new norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
        "new seen",
        "new seen, in evaluation",
    }
    assert all(row.ok for row in rows)
    (output,) = captured.gm.graph.find_nodes(op="output")
    still = [place for place, about in enumerate(captured.gm.meta["outputs"]) if about["kind"] != "mutation"]
    output.args = (tuple(output.args[0][place] for place in still),)
    captured.gm.meta["outputs"] = [captured.gm.meta["outputs"][place] for place in still]
    captured.gm.recompile()
    wrong = {row.name for row in graph_rows(model, captured, (x,), {}, training=True)[0] if not row.ok}
    assert wrong == {
        "new norm.running_mean",
        "new norm.running_var",
        "new norm.num_batches_tracked",
        "new seen",
        "new seen, in evaluation",
    }


class Chaotic(nn.Module):
    """Batch norms over two samples, one behind the other: float32 rounds to another model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(part for _ in range(16) for part in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_what_rounds_far_in_float32_is_compared_in_float64() -> None:
    torch.manual_seed(0)
    model, x = Chaotic(), torch.randn(2, 32)
    captured = capture(model, (x,))
    assert not all(row.ok for row in _rows(_Both(model, captured, (x,), {}, True), keep_all, SINGLE))
    rows, notes = graph_rows(model, captured, (x,), {}, training=True)
    assert not notes and max(row.error for row in rows) < 1e-8
    tanh = torch.ops.aten.tanh.default
    for node in [
        n
        for part in captured.gm.modules()
        if isinstance(part, fx.GraphModule)
        for n in part.graph.find_nodes(op="call_function", target=aten.relu.default)
    ][:1]:
        node.target = tanh
    assert not all(row.ok for row in graph_rows(model, captured, (x,), {}, training=True)[0])


class Policy(nn.Module):
    """How uncertain choices are. A distribution bounds its logits by the least number of their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chances = torch.distributions.Categorical(logits=self.linear(x))
        return chances.entropy().mean() - chances.log_prob(x.argmax(-1)).mean()


def test_the_least_number_of_float64_is_that_of_float32_there() -> None:
    """Operators refuse numbers that their dtype does not have: a model of float64 could not be compared."""
    model, x = Policy().double(), torch.randn(6, 4).double()
    rows, notes = graph_rows(model, capture(model, (x,)), (x,), {}, training=True)
    assert not notes and all(row.ok for row in rows) and "loss" in {row.name for row in rows}


class Noisy(nn.Module):
    """Draws numbers; drops some."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (F.dropout(self.linear(x), 0.5) + torch.randn_like(x)).sum()


def test_a_model_that_draws_numbers_is_not_compared() -> None:
    x = torch.randn(4, 4)
    model = Noisy()
    rows, notes = graph_rows(model, capture(model, (x,)), (x,), {}, training=True)
    assert (
        rows == [] and len(notes) == 1 and "draws random numbers (randn_like" in notes[0] and "not compared" in notes[0]
    )


def test_dropout_is_as_before_afterwards() -> None:
    before = (F.dropout, F.scaled_dot_product_attention)
    with pytest.raises(ZeroDivisionError), undropped():
        assert torch.equal(F.dropout(torch.ones(100), 0.9), torch.ones(100))
        _ = 1 / 0
    assert before == (F.dropout, F.scaled_dot_product_attention)


class Dropping(nn.Module):
    """Normed, dropped and left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        nn.init.uniform_(self.norm.running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.norm(self.linear(x)), 0.5, self.training)
        return (x * torch.rand(x.shape[0], 1).round() if self.training else x).square().mean()


def test_a_model_is_compared_as_it_evaluates() -> None:
    x, model = torch.randn(6, 4), Dropping()
    captured = capture(model, (x,))
    rows, notes = graph_rows(model, captured, (x,), {}, training=True)
    assert (
        model.training
        and model.norm.training
        and [note[-len("in evaluation alone") :] for note in notes] == ["in evaluation alone"]
    )
    assert {row.name for row in rows} == {
        f"{name}, in evaluation"
        for name in ("structure of outputs", "loss", *(f"gradient of {name}" for name, _ in model.named_parameters()))
    }
    assert all(row.ok for row in rows)
    with mock.patch.dict(EVALUATED, {ops.statistic: ops.statistic}):  # the statistics of the batch
        assert not all(row.ok for row in graph_rows(model, captured, (x,), {}, training=True)[0])


class Twice(nn.Module):
    """A module under two names, and a weight of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.again = nn.ModuleList([self.first])
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, 4] -> []."""
        return self.last(self.again[0](x).tanh()).square().mean()


def test_a_module_of_two_names_is_compared_and_left_as_it_was() -> None:
    model, x = Twice(), torch.randn(8, 4)
    before = dict(model.named_parameters())
    captured = capture(model, (x,))
    for _ in range(2):
        rows, _ = graph_rows(model, captured, (x,), {}, training=True)
        assert {row.name for row in rows} >= {"loss", "gradient of first.weight", "gradient of first.bias"} and all(
            row.ok for row in rows
        )
    assert (
        model.first.weight is model.last.weight is before["first.weight"] and model.first.bias is before["first.bias"]
    )


class Halves(nn.Module):
    """Adds rows of half precision up in a result that is as precise as its input: both are half where weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.proj(x).bfloat16()
        return torch.zeros_like(x).scatter_add(0, torch.zeros(x.shape, dtype=torch.int64), rows)


def test_a_model_that_does_not_run_in_float32_is_not_compared() -> None:
    model, x = Halves().bfloat16(), torch.randn(4, 8, dtype=torch.bfloat16)
    rows, notes = graph_rows(model, capture(model, (x,), mode="inference"), (x,), {}, training=False)
    assert rows == [] and len(notes) == 1 and "does not run in float32 on a CPU (" in notes[0] and "dtype" in notes[0]


@dataclass
class Record:
    """What models of libraries of their own return."""

    loss: torch.Tensor
    parts: Any
    label: str = "a label"


class Giving(nn.Module):
    """A loss and what else a function makes of it."""

    def __init__(self, form: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(4, 4), form

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return self.form(y.square().mean(), y)


def output_of_transformers(loss: torch.Tensor, y: torch.Tensor) -> Any:
    """One with another inside, both with what is left out: such an output drops a key that becomes None."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    inside = outputs.BaseModelOutputWithPooling(last_hidden_state=y, pooler_output=object())
    return outputs.MaskedLMOutput(loss=loss, logits=inside, attentions=object())


@pytest.mark.parametrize(
    ("form", "other"),
    [
        (lambda loss, y: {"z": y, "loss": loss, "a": [y + 1, None]}, {"a": 0, "loss": 1, "z": (2, None)}),
        (lambda loss, y: {"z": y, "loss": loss}, {"loss": 1, "z": 0}),  # the same items in another order
        (lambda loss, y: (loss, (y, True, "said", 5)), (0, (1, True, "said", 5))),  # numbers are left out
        (lambda loss, y: Record(loss, {0: y}), {"loss": 0, "parts": {1: 1}, "label": "a label"}),
        (lambda loss, y: OrderedDict(loss=loss, none=(), y=y), {"loss": 0, "y": 1}),
        (lambda loss, y: [loss, (y, y + 1)], (0, 1, 2)),
        (output_of_transformers, {"loss": 0, "logits": {"last_hidden_state": 1}}),
    ],
)
def test_the_structure_of_outputs_is_compared(form: Callable[..., Any], other: Any) -> None:
    model, x = Giving(form), torch.randn(2, 4)
    captured = capture(model, (x,))
    rows, _ = graph_rows(model, captured, (x,), {}, training=True)
    assert all(row.ok for row in rows) and "structure of outputs" in {row.name for row in rows}
    rows, _ = graph_rows(model, replace(captured, structure=other), (x,), {}, training=True)
    assert [row.name[:20] for row in rows if not row.ok] == ["structure of outputs"]
