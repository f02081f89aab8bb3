"""Whole models: normalized, folded graphs compute what the model computes, gradients and buffers included."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch.export import Dim

from passes import ANNOTATE, NORMALIZE, facts, run
from tests.helpers.export import B, S, assert_same, check_values, export_graph, targets

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 61}


def gpt2():
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_embd=32,
            n_head=4,
            n_layer=3,
            vocab_size=61,
            use_cache=False,
            n_positions=32,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=2, num_hidden_layers=3, use_cache=False))


def phi3():
    return hf.Phi3ForCausalLM(
        hf.Phi3Config(
            **SMALL,
            num_key_value_heads=2,
            num_hidden_layers=2,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def bert():
    return hf.BertForMaskedLM(
        hf.BertConfig(**SMALL, num_hidden_layers=2, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    )


def t5():
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            d_model=32,
            d_ff=64,
            num_heads=4,
            d_kv=8,
            num_layers=3,
            vocab_size=61,
            use_cache=False,
            dropout_rate=0,
            decoder_start_token_id=0,
        )
    )


def vit():
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            **{k: v for k, v in SMALL.items() if k != "vocab_size"}, num_hidden_layers=2, image_size=16, patch_size=8
        )
    )


def resnet():
    return hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=5)
    )


def mixtral():
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(**SMALL, num_key_value_heads=2, num_hidden_layers=2, num_local_experts=4, use_cache=False)
    )


FOLDS = {gpt2: [3], llama: [3], phi3: [2], bert: [2], t5: [2, 2], vit: [2], resnet: [2], mixtral: [2]}
DTYPE = {mixtral: torch.float32}  # torch's grouped matmul takes no float64


def example(build, device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    if build in (vit, resnet):
        made = {"pixel_values": torch.randn(3, 3, 16, 16, dtype=torch.float64), "labels": torch.randint(0, 2, (3,))}
    else:
        ids = torch.randint(2, 61, (3, 7))
        made = {"input_ids": ids, "labels": ids.clone()}
    return {name: tensor.to(device) for name, tensor in made.items()}


def graph_of(build, *, train: bool = True):
    with torch.device("meta"):
        model = build().to(DTYPE.get(build, torch.float64)).train(train)
    inputs = example(build, "meta")
    sequence = {bert: Dim("s", max=512), t5: Dim("s", min=3)}.get(build, S)
    dims = {name: {0: B, 1: sequence} if tensor.dim() == 2 else {0: B} for name, tensor in inputs.items()}
    return export_graph(model, (), inputs, dims)


@pytest.mark.parametrize(
    "build",
    [pytest.param(build, marks=[pytest.mark.slow] * (build in (phi3, mixtral, t5))) for build in FOLDS],
    ids=lambda build: build.__name__,
)
def test_model_is_unchanged_by_the_passes(build):
    gm = run(graph_of(build), NORMALIZE)
    check_values(gm)
    torch.manual_seed(0)
    model = build().to(DTYPE.get(build, torch.float64)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    inputs = example(build, "cpu")
    if "input_ids" in inputs and build is not t5:
        inputs["labels"][0, 3:] = -100
    assert_same(gm, model, inputs, 1e-5)  # casts to float32 are part of these models
    gm = run(gm, ANNOTATE)
    assert [node.meta["repeat"] for node in gm.graph.nodes if node.op == "call_module"] == FOLDS[build]
    assert_same(gm, model, inputs, 1e-5)


def test_gpt2_has_the_form_that_splits():
    gm = run(graph_of(gpt2), NORMALIZE)
    found = targets(gm)
    assert "aten.addmm.default" not in found and "aten.cross_entropy_loss.default" not in found
    attention = [node for node in gm.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert all(node.args[3] is None and node.args[5] is True for node in attention)
    for node in gm.graph.nodes:
        if node.op == "call_function" and str(node.target) in ("aten.matmul.default", "aten.linear.default"):
            assert [str(size) for size in facts.shape(node)[:2]] == ["b", "s"], node
    assert found.count("aten.split_with_sizes.default") == 3
    assert not [name for name in found if name in ("aten.cumsum.default", "aten.index.Tensor")]


def test_batch_norm_updates_are_outputs():
    gm = run(graph_of(resnet), NORMALIZE)
    kinds = [entry["kind"] for entry in gm.meta["outputs"]]
    assert kinds.count("mutation") == 3 * 10  # running mean, running variance and count of each of ten norms
