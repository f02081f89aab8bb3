"""Long sequences: what the recipes `cp` and `ulysses` are, and when the search cuts the sequence of an attention."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.plan import NodePlan
from autopar.problem.read_graph import read
from autopar.recipes.attention import ATTENTION
from autopar.recipes.kinds import ATTRIBUTE, PARTIAL, REPLICATE
from tests.helpers.verify import by_recipe, subject
from tests.unit.decisions.planning import Planned, Work, planned

WORK = Work("llama3-8b", 1, 4096, torch.bfloat16)


def attention(made: Planned) -> NodePlan:
    """The plan of the attention of the repeated block."""
    (name,) = [n for n, op in made.program.ops.items() if "scaled_dot_product_attention" in str(op.target) and op.scope]
    return made.plan.nodes[name]


def rows_cut(made: Planned) -> dict[str, bool]:
    """Operator with a sequence of tokens in its result -> whether that is cut on the first axis."""
    found = {}
    for name, op in made.program.ops.items():
        if op.role != "op" or not op.scope or not op.call.outs[0].grad:
            continue  # tables of positions have no heads to cut
        dims = [d for d, n in enumerate(op.call.outs[0].shape) if not isinstance(n, int) and d not in op.batch[-1]]
        if dims:
            found[name] = made.plan.nodes[name].outs[0].split("|")[0].split(",")[0] in {f"S{d}" for d in dims}
    return found


@pytest.mark.parametrize("recipe", ["cp", "ulysses"])
def test_the_sequence_is_cut_everywhere_and_weights_are_whole(recipe: str) -> None:
    made = planned(WORK, "h100:1x8", recipe)
    used = {kind for kinds in made.kinds.values() for kind in kinds}
    assert ATTRIBUTE in used and used <= {ATTRIBUTE, REPLICATE, PARTIAL}, str(made)
    assert all(w.uses[0] in ("replicated", "gathered", "once") for w in made.weights.values()), str(made)
    here, whole = attention(made), [name for name, cut in rows_cut(made).items() if not cut]
    if recipe == "cp":
        assert here.runs == ("ring",) and {text.split("|")[0] for text in (*here.ins, *here.outs)} == {"S2"}
        assert not whole, whole
    else:
        assert here.runs == ("",) and {text.split("|")[0] for text in (*here.ins, *here.outs)} == {"S1"}
        # the attention and what leads to it: rope, views
        names = {made.program.ops[name].target.__name__ for name in whole}
        assert "scaled_dot_product_attention.default" in names and not names & {
            "linear.default",
            "matmul.default",
            "mean.dim",
            "silu.default",
        }, names
        assert all("S" in made.plan.nodes[name].outs[0].split("|")[0] for name in whole), {
            n: made.plan.nodes[n] for n in whole
        }


@torch.library.custom_op("autopar_test_sequence::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """An operator that only the user's rule can cut."""
    return 2 * x


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Doubling(nn.Module):
    """Attention of what is doubled."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(32, 16), nn.Linear(16, 48)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(doubled(self.embedding(ids))).chunk(3, -1)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("recipe", ["cp", "ulysses"])
def test_the_sequence_is_cut_in_operators_with_a_rule_of_the_user(recipe: str) -> None:
    made = autopar.compile(
        Doubling(),
        "cpu:1x4",
        (torch.zeros(2, 32, dtype=torch.long),),
        mode="inference",
        recipe=recipe,
        dynamic_shapes={"ids": {0: "b", 1: "s"}},
        rules={torch.ops.autopar_test_sequence.doubled: "b s d -> b s d"},
    )
    assert made.plan.nodes["doubled"].kinds == (ATTRIBUTE,) and made.plan.nodes["doubled"].outs == ("S1|-",)


@pytest.mark.parametrize("model", ["hf-gpt2", "hf-llama", "hf-llama-2kv", "hf-phi3", "hf-neox", "hf-t5"])
def test_ulysses_cuts_the_heads_of_every_attention(model: str) -> None:
    who = subject(model)
    plan, program = by_recipe(who, (2,), "ulysses"), read(who.captured.gm, {"b": 8, "s": 16}, training=True)
    nodes = [plan.nodes[op.name] for op in program.ops.values() if op.target is ATTENTION]
    assert nodes and all(node.outs[0].startswith("S1|") for node in nodes), nodes


@pytest.mark.slow
def test_131072_tokens_of_one_sample_cut_the_sequence_in_attention() -> None:
    """8 nodes of 8 devices and 8 key heads: heads across nodes (2 all-to-alls), rows round the ring inside; 1.1 s
    against 6.9 s of a ring over all 64. No recipe but those that cut the sequence fits."""
    made = planned(Work("llama3.1-8b", 1, 131072, torch.bfloat16), "h100:8x8")
    assert set(made.recipes_ms) == {"cp", "ulysses"}, str(made)
    assert made.step_ms <= min(made.recipes_ms.values())
    assert "ring" in attention(made).runs or any("S2" in text for text in attention(made).outs), str(made)
