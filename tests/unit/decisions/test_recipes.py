"""Each recipe's plan is what its name says: how parameters rest and what operators split."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import autopar
from autopar.errors import InfeasibleError
from autopar.layout import is_shard
from autopar.problem.clusters import Allow
from autopar.recipes import RECIPES, Recipe, roles
from autopar.recipes.kinds import ATTRIBUTE, PARAMETER, PARTIAL, REPLICATE, SAMPLE
from models import mlp
from tests.unit.decisions.planning import Planned, Work, planned

LLAMA, GPT2 = Work("llama3-8b", 64, 4096, torch.bfloat16), Work("gpt2", 16, 1024)
SHORT = Work("gpt2", 4, 128)  # a CPU rank has 4 GiB
CASES = [(LLAMA, "h100:8x8"), (GPT2, "h100:1x4"), (SHORT, "cpu:1x4")]
DENSE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_attn", "c_fc")
each = partial(pytest.mark.parametrize, ("work", "cluster"), CASES, ids=["llama-h100", "gpt2-h100", "gpt2-cpu"])


def kinds(made: Planned, axis: int = 0) -> set[str]:
    return {per_axis[axis] for per_axis in made.kinds.values()}


def rests(made: Planned, axis: int = 0) -> dict[str, bool]:
    """Parameter -> whether it rests cut on that axis."""
    return {name: is_shard(w.layout.split(",")[axis]) for name, w in made.weights.items()}


def largest(made: Planned) -> dict[str, bool]:
    return {name: cut for name, cut in rests(made).items() if len(made.weights[name].shape) > 1}


def _out_of_matrices(ways: int) -> Allow:
    whole, cut = roles.data(ways), roles.zero3(ways)
    return lambda op, option: (cut if op.role == "param" and len(op.call.outs[0].sizes) == 2 else whole)(op, option)


def test_a_recipe_of_ones_own_is_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, and among all others where none is asked for; as docs/planning.md has it."""
    monkeypatch.setitem(RECIPES, "own", Recipe("own", (_out_of_matrices,), "data parallel, matrices rest cut"))
    model, batch = mlp.tiny()
    named, free = (autopar.compile(model, "cpu:1x2", batch, recipe=recipe).plan for recipe in ("own", None))
    assert named.strategy == "own" and (named.nodes["p_head_weight"].outs, named.nodes["p_head_bias"].outs) == (
        ("S0|S0",),
        ("R|R",),
    )
    assert [row.step_s for row in free.alternatives if row.name == "own"] == [pytest.approx(named.predicted.step_s)]


@each()
def test_single_and_data_parallel(work: Work, cluster: str) -> None:
    zero3 = planned(work, cluster, "zero3")
    assert kinds(zero3) <= {SAMPLE, REPLICATE, PARTIAL} and SAMPLE in kinds(zero3)
    assert all(w.uses == ("gathered",) for w in zero3.weights.values()), str(zero3)
    if work is LLAMA:  # 60 GiB of parameters, gradients and optimizer state leave no room for a sample
        for recipe in ("single", "ddp"):
            with pytest.raises(InfeasibleError, match="are missing"):
                planned(work, cluster, recipe, remat="none")
        return
    assert kinds(planned(work, cluster, "single")) <= {REPLICATE, PARTIAL}
    ddp = planned(work, cluster, "ddp")
    assert kinds(ddp) <= {SAMPLE, REPLICATE, PARTIAL} and SAMPLE in kinds(ddp)
    assert all(w.uses == ("replicated",) for w in ddp.weights.values()), str(ddp)
    assert zero3.plan.predicted.memory_bytes < ddp.plan.predicted.memory_bytes
    zero1 = planned(work, cluster, "zero1")
    assert all(w.uses == ("once",) for w in zero1.weights.values()), str(zero1)
    assert zero1.kinds == ddp.kinds
    assert zero3.plan.predicted.memory_bytes < zero1.plan.predicted.memory_bytes < ddp.plan.predicted.memory_bytes


@each()
def test_hybrid_sharding_cuts_on_the_inner_axis_only(work: Work, cluster: str) -> None:
    made = planned(work, cluster, "hsdp")
    assert len(made.plan.mesh) == 2
    assert set(rests(made, 0).values()) == {False} and set(rests(made, 1).values()) == {True}, str(made)
    assert SAMPLE in kinds(made, 0) and SAMPLE in kinds(made, 1)
    assert (kinds(made, 0) | kinds(made, 1)) <= {SAMPLE, REPLICATE, PARTIAL}


@pytest.mark.parametrize("recipe", ["tp", "tp_sp", "megatron"])
@pytest.mark.parametrize(
    ("work", "cluster"),
    [(Work("llama3-8b", 1, 4096, torch.bfloat16), "h100:1x8"), *CASES[1:]],
    ids=["llama-h100", "gpt2-h100", "gpt2-cpu"],
)
def test_tensor_parallel(work: Work, cluster: str, recipe: str) -> None:
    made = planned(work, cluster, recipe)
    assert SAMPLE not in kinds(made) and PARAMETER in kinds(made)
    block = {name: w for name, w in made.weights.items() if len(w.shape) == 2 and w.scope}
    columns = [name for name, w in block.items() if w.uses == ("column",)]
    rows = [name for name, w in block.items() if w.uses == ("row",)]
    assert len(columns) + len(rows) == len(block), str(made)
    assert columns == [name for name in block if name.split(".")[-2] in DENSE], str(made)
    vocabulary = [w for w in made.weights.values() if "vocabulary" in w.uses[0]]
    assert any(max(w.shape) > 50_000 for w in vocabulary) == (recipe == "megatron"), str(made)
    norms = [n for n, op in made.program.ops.items() if "layer_norm" in str(op.target) or "rms_norm" in str(op.target)]
    split = {made.kinds[name] for name in norms if made.program.ops[name].scope}
    assert split == ({(ATTRIBUTE,)} if recipe == "tp_sp" else {(REPLICATE,)}), str(made)


def test_megatron_splits_the_loss_by_vocabulary() -> None:
    made = planned(GPT2, "h100:1x4", "megatron")
    (loss,) = [name for name, op in made.program.ops.items() if "cross_entropy" in str(op.target)]
    assert made.plan.nodes[loss].runs == ("cross_entropy",)


@each()
def test_two_dimensional(work: Work, cluster: str) -> None:
    """ZeRO-3 outside, tensor and sequence parallel inside."""
    made = planned(work, cluster, "tp_zero3")
    assert kinds(made, 0) <= {SAMPLE, REPLICATE, PARTIAL} and SAMPLE in kinds(made, 0)
    assert SAMPLE not in kinds(made, 1) and {PARAMETER, ATTRIBUTE} <= kinds(made, 1)
    assert all(w.uses[0] == "gathered" for w in made.weights.values()), str(made)
    matrices = {name: w.uses[1] for name, w in made.weights.items() if len(w.shape) == 2 and w.scope}
    # one that is small may rest whole inside, though it is cut in use: what its gradient takes more hides, and its
    # gather takes no copies
    assert len([use for use in matrices.values() if use in ("column", "row")]) >= len(matrices) - 1, str(made)
    assert set(matrices.values()) <= {"column", "row", "sliced"}, str(made)
    assert all(largest(made).values())


def test_every_recipe_is_tested_here() -> None:
    """one_weird_trick is in test_strategies, ep in test_experts, cp and ulysses in test_sequence: they need
    convolutions, experts, long sequences."""
    assert set(RECIPES) == {
        "single",
        "ddp",
        "zero1",
        "zero2",
        "zero3",
        "hsdp",
        "tp",
        "tp_sp",
        "megatron",
        "tp_zero3",
        "ep",
        "cp",
        "ulysses",
        "one_weird_trick",
    }
