"""The emitted module has the state dict of the model: the same names, tied ones included, in the same order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.bundle import Bundle
from autopar.codegen.module import emit
from autopar.codegen.order import compact
from autopar.codegen.tables import Names
from autopar.errors import RunError
from autopar.problem.original_names import Naming
from autopar.runtime import Mesh, Param, ShardedModule
from tests.helpers.tiny import TINY
from tests.helpers.verify import by_recipe, subject

FAST = ("hf-gpt2", "hf-resnet", "mlp")


def same_order(name: str) -> None:
    who = subject(name)
    plan = by_recipe(who, (1,), "single")
    module = Bundle(plan, emit(who.captured.gm, plan, Names.of(who.captured)), who.captured.constants).build(
        who.weights
    )
    assert list(module.state_dict()) == list(who.weights) == list(module.full_state_dict())
    for key, value in module.state_dict().items():
        assert torch.equal(value, who.weights[key])


@pytest.mark.parametrize("name", FAST)
def test_the_state_dict_is_the_models(name: str) -> None:
    same_order(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TINY if name not in FAST])
def test_the_state_dict_is_the_models_for_all(name: str) -> None:
    same_order(name)


class Odd(nn.Module):
    """Buffers before parameters, a head that is registered first and used last, a tie whose alias comes first, blocks
    in between."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.head = nn.Linear(8, 8, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))
        self.first = nn.Linear(8, 8, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](self.first(x) * self.scale)
        for block in self.blocks:
            h = block(h)
        return ((self.head(self.norms[1](h)) - y) ** 2).mean()


def test_odd_orders() -> None:
    torch.manual_seed(0)
    model = Odd()
    compiled = autopar.compile(model, "cpu:1x1", (torch.zeros(4, 8), torch.zeros(4, 8)))
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert (
        "*(f'blocks.{i}' for i in range(0, 6))" in compiled.source
        or '*(f"blocks.{i}" for i in range(0, 6))' in compiled.source
    )
    assert compiled.module.get_parameter("head.weight") is compiled.module.get_parameter("first.weight")


def test_paths_that_count_up_are_one_expression() -> None:
    assert compact(["h.0", "h.1", "h.2"]) == '[f"h.{i}" for i in range(0, 3)]'
    assert compact(["h.0", "h.2", "h.4"]) == '[f"h.{i}" for i in range(0, 6, 2)]'
    assert compact(["h.0", "h.1", "h.3"]) == "['h.0', 'h.1', 'h.3']"
    assert compact(["h.2", "h.1", "h.0"]) == "['h.2', 'h.1', 'h.0']"
    assert compact(["h.0", "h.1"]) == "['h.0', 'h.1']"
    assert compact(["a", "b", "c"]) == "['a', 'b', 'c']"


PAIRS: list[Naming] = [{"0": f"h.{i}", "1": f"h.{i + 1}.x"} for i in range(2, 8, 2)]


@pytest.mark.parametrize(
    "namings",
    [
        PAIRS,
        [f"h.{i}" for i in range(7)],
        [*PAIRS, {"0": "h.8", "1": "other"}],
        ["a{0}", "a{1}", "a{2}"],
        [{"0": "h.0", "a": "x.1"}, {"0": "h.1", "a": "x.3"}, {"0": "h.2", "a": "x.5"}],
    ],
)
def test_what_is_compact_is_the_same(namings: list[Naming]) -> None:
    assert eval(compact(namings)) == namings


def test_blocks_in_pairs_are_one_expression() -> None:
    assert compact(PAIRS) == """[{'0': f"h.{i}", '1': f"h.{i + 1}.x"} for i in range(2, 8, 2)]"""


def test_an_order_that_names_nothing_is_an_error() -> None:
    class Model(ShardedModule):
        MESH = Mesh((1,), ("x",), "cpu")
        PARAMS = {"w": Param((2,), "float32", "R")}  # noqa: RUF012
        ORDER = ("w", "v")

    with pytest.raises(RunError, match="ORDER names 'v', which is no parameter, buffer or block"):
        Model()
