"""A model planned in another dtype is the model that `model.to(dtype)` is, and stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
import autopar.frontend
from autopar.errors import PlanError
from tests.helpers.tiny import TINY


@pytest.mark.parametrize("name", [pytest.param("hf-llama", marks=pytest.mark.slow), "cnn"])
def test_precision_plans_the_cast_model_and_leaves_the_model_alone(name: str) -> None:
    loaded = autopar.frontend.load(TINY[name], batch=4, seq=8, device="cpu")
    before = {n: t.clone() for n, t in loaded.model.state_dict().items()}
    compiled = autopar.compile(
        loaded.model, "cpu:1x2", (loaded.args, loaded.kwargs), recipe="ddp", precision="bfloat16"
    )
    cast = autopar.frontend.load(TINY[name], batch=4, seq=8, device="cpu", dtype=torch.bfloat16)
    plain = autopar.compile(cast.model, "cpu:1x2", (cast.args, cast.kwargs), recipe="ddp")
    assert compiled.plan.precision == plain.plan.precision == "bfloat16"
    assert compiled.plan.graph_hash == plain.plan.graph_hash and compiled.plan.predicted == plain.plan.predicted
    assert list(compiled.bundle.constants) == list(plain.bundle.constants)
    for key, value in compiled.bundle.constants.items():
        assert torch.equal(value, plain.bundle.constants[key]), key
    assert all(torch.equal(t, before[n]) and t.dtype == before[n].dtype for n, t in loaded.model.state_dict().items())


def test_an_unknown_precision_is_refused() -> None:
    loaded = autopar.frontend.load(TINY["mlp"], batch=4, seq=8, device="cpu")
    with pytest.raises(PlanError, match="precision 'int64' is neither mixed precision"):
        autopar.compile(loaded.model, "cpu:1x2", (loaded.args, loaded.kwargs), precision="int64")


class TwoDtypes(nn.Module):
    """Layers in bfloat16 between a norm and a router in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.router = nn.LayerNorm(8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        held = self.layer.weight.dtype
        return self.router(self.layer(self.norm(x).to(held)).to(x.dtype)).square().mean()


def test_a_model_of_two_dtypes_keeps_them_unless_one_is_asked_for() -> None:
    """All of it was computed in the dtype of most of its weights, in silence."""
    given = TwoDtypes(), "cpu:1x2", (torch.zeros(4, 8),)
    own, asked = (autopar.compile(*given, recipe="ddp", precision=precision) for precision in (None, "float32"))
    assert [own.plan.precision, asked.plan.precision] == ["bfloat16", "float32"]
    for compiled, dtypes in ((own, {"float32", "bfloat16"}), (asked, {"float32"})):
        weights = compiled.captured.gm.graph.find_nodes(op="placeholder")
        assert {str(node.meta["val"].dtype).removeprefix("torch.") for node in weights} == dtypes
