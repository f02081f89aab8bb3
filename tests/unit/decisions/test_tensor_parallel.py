"""On meshes that are only for tensor parallelism the plan is the one that Hugging Face wrote by hand."""

from __future__ import annotations

import fnmatch

import pytest
import torch

from autopar.layout import dim_of, is_shard
from tests.unit.decisions.planning import Planned, Work, loaded, planned

# Hugging Face's words: which dim of the weight [out, in] (of a stack of experts: [expert, out, in]) each rank has a
# part of. It gathers around the fused projections of Phi-3, because it cannot cut q, k and v apart; they are still
# column and row.
DIMS = {"colwise": -2, "packed_colwise": -2, "colwise_gather_output": -2, "rowwise": -1, "rowwise_split_input": -1}
LLAMA_8B = Work("llama3-8b", 1, 2048, torch.bfloat16)


def by_hand(work: Work) -> dict[str, int]:
    """Pattern of a module or parameter -> the dim that is cut, as the model's config class has it."""
    rows = loaded(work).model.config.base_model_tp_plan
    found = {pattern: DIMS[style] for pattern, style in rows.items() if style in DIMS}
    assert len(found) >= 4
    return found


def check(made: Planned, wanted: dict[str, int], matches: int) -> None:
    """Every weight that a pattern names is cut along that dim, and those outside of all patterns are not."""
    seen = 0
    for name, weight in made.weights.items():
        module = name.removesuffix(".weight").partition(".")[2]
        dims = [dim for pattern, dim in wanted.items() if fnmatch.fnmatch(module, pattern)]
        if dims:
            seen += 1
            assert is_shard(weight.layout) and dim_of(weight.layout) == len(weight.shape) + dims[0], (
                name,
                weight.layout,
                str(made),
            )
            assert weight.uses[0] in ("column", "row"), (name, weight.uses, str(made))
        elif len(weight.shape) == 1 and not name.endswith("bias"):
            assert weight.layout == "R", (name, weight.layout, str(made))
    assert seen == matches, (seen, str(made))


@pytest.mark.parametrize("recipe", ["tp", "megatron"])
@pytest.mark.parametrize(
    ("work", "cluster", "matches"),
    [
        (Work("hf-llama", 1, 64), "h100:1x4", 7),
        (LLAMA_8B, "h100:1x4", 7),
        (LLAMA_8B, "h100:1x8", 7),
        (Work("hf-phi3", 1, 64), "h100:1x4", 4),
        (Work("hf-neox", 1, 64), "h100:1x4", 4),
        (Work("hf-mixtral", 1, 64), "h100:1x4", 6),
    ],
    ids=str,
)
def test_equals_hugging_face(work: Work, cluster: str, matches: int, recipe: str) -> None:
    check(planned(work, cluster, recipe), by_hand(work), matches)


def test_fused_projections_are_cut_by_their_parts() -> None:
    phi3, gpt2 = (planned(Work(name, 1, 64), "h100:1x4", "tp").weights for name in ("hf-phi3", "hf-gpt2"))
    # 8 query heads, 4 and 4 of keys and values
    assert phi3["model.layers.0.self_attn.qkv_proj.weight"].layout == "S0/2:1:1"
    assert phi3["model.layers.0.mlp.gate_up_proj.weight"].layout == "S0/2"
    assert gpt2["transformer.h.0.attn.c_attn.weight"].layout == "S1/3"
    assert gpt2["transformer.h.0.attn.c_proj.weight"].layout == "S0"


def test_the_free_search_of_one_sample_is_tensor_parallel_and_faster() -> None:
    """It adds what the plan by hand lacks: sequence parallel norms. An attention output that changes sides (63.5 ms by
    earlier prices, 67.1 simulated) gains nothing: weights gathered for it stand in line in front of what blocks wait
    for."""
    free, tp, tp_sp = (planned(LLAMA_8B, "h100:1x8", recipe, (8,)) for recipe in (None, "tp", "tp_sp"))
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert free.weights[f"model.layers.0.{part}.weight"].uses == ("column",), str(free)
    assert free.weights["model.layers.0.mlp.down_proj.weight"].uses == ("row",), str(free)
    assert free.step_ms <= tp_sp.step_ms < tp.step_ms, (str(free), str(tp_sp), str(tp))
