"""What an expert would choose is what comes out; every assertion prints the plan with the steps of all recipes."""

from __future__ import annotations

import pytest
import torch

from autopar.recipes.kinds import PARAMETER, PARTIAL, REPLICATE, SAMPLE
from tests.unit.decisions.planning import Work, planned


@pytest.mark.slow
def test_a_small_model_on_fast_links_is_data_parallel() -> None:
    made = planned(Work("gpt2", 64, 512, torch.bfloat16), "a100-80:1x8")
    kinds = {kind for per_axis in made.kinds.values() for kind in per_axis}
    assert kinds <= {SAMPLE, REPLICATE, PARTIAL}, str(made)
    whole = [name for name, w in made.weights.items() if w.scope and not {*w.uses} <= {"replicated", "once"}]
    assert whole == [], str(made)
    # what is left to the search is worth less than 4 %: large weights rest cut, so that their optimizer step is short,
    # small ones whole
    recipes = made.recipes_ms
    assert (
        min(recipes, key=lambda name: recipes[name]) in ("ddp", "zero1")
        and recipes["zero1"] == pytest.approx(recipes["ddp"], rel=0.03)
        and made.step_ms > 0.96 * recipes["ddp"]
    ), str(made)
    assert recipes["tp"] > 2 * recipes["ddp"], str(made)


def test_what_does_not_fit_is_sharded() -> None:
    # two samples per rank: replicas of all weights leave no room
    made = planned(Work("llama3-8b", 16, 2048, torch.bfloat16), "h100:1x8")
    assert not {"single", "ddp"} & set(made.recipes_ms), str(made)
    large = {name: w for name, w in made.weights.items() if len(w.shape) == 2}
    assert all(w.layout.startswith("S") for w in large.values()), str(made)
    gathered = [name for name, w in large.items() if w.uses in (("gathered",), ("once",))]
    assert len(gathered) >= 7, str(made)  # all of the block
    # both begin a block ahead and hide: ZeRO-3's second gather only slows down what it runs beside
    recipes = made.recipes_ms
    assert made.step_ms <= recipes["zero1"] < recipes["zero3"] < 1.02 * recipes["zero1"], str(made)
    assert recipes["zero3"] < recipes["tp_sp"], str(made)


@pytest.mark.slow
def test_a_large_mlp_on_few_samples_is_tensor_parallel() -> None:
    made = planned(Work("wide-mlp", 16), "h100:1x8")
    for weight in made.weights.values():
        if len(weight.shape) == 2:
            assert weight.uses[0] in ("row", "column"), str(made)
    assert made.step_ms < 0.2 * made.recipes_ms["ddp"] and made.step_ms < 0.2 * made.recipes_ms["zero3"], str(made)


def test_alexnet_gets_one_weird_trick() -> None:
    """Krizhevsky 2014: convolutions by sample, dense layers by parameter; he had PCIe, as l4 has."""
    for cluster in ("l4:1x4", "v100:1x4", "cpu:1x4"):
        made = planned(Work("alexnet", 128), cluster, mesh=(4,))
        for name, op in made.program.ops.items():
            if op.role == "op" and any(
                weight and len(t.shape) > 1 for weight, t in zip(op.weight, op.call.ins, strict=True)
            ):
                convolution = len(op.call.outs[0].shape) == 4
                assert made.kinds[name] == ((SAMPLE,) if convolution else (PARAMETER,)), (
                    name,
                    made.kinds[name],
                    str(made),
                )
        dense = [w for name, w in made.weights.items() if len(w.shape) == 2]
        assert len(dense) == 3 and all(w.uses[0] in ("row", "column") for w in dense), str(made)
        recipes = made.recipes_ms
        assert made.step_ms <= recipes["one_weird_trick"] < min(recipes["ddp"], recipes["zero3"], recipes["tp"]), str(
            made
        )
