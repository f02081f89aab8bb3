"""The transformers that published runs train: as many parameters as their papers say, the work of a window, layers of
each kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.costmodel.config import CAPTURED, Config, Latent
from benchmarks.costmodel.predictions import captured
from benchmarks.costmodel.transformer import Transformer

LLAMA = {"rms": True, "gated": True, "bias": False, "rotary": True, "tied": False}
DEEPSEEK = Config(
    vocab=129280,
    layers=61,
    heads=128,
    kv_heads=128,
    hidden=7168,
    ffn=18432,
    latent=Latent(),
    experts=256,
    top_k=8,
    expert_ffn=2048,
    shared=2048,
    dense=3,
    **LLAMA,
)
KIMI = replace(DEEPSEEK, vocab=163840, heads=64, experts=384, dense=1)
MOONLIGHT = Config(
    vocab=163840,
    layers=27,
    heads=16,
    kv_heads=16,
    hidden=2048,
    ffn=11264,
    latent=Latent(queries=0),
    experts=64,
    top_k=6,
    expert_ffn=1408,
    shared=2816,
    dense=1,
    **LLAMA,
)
GPT_OSS = Config(
    vocab=201088,
    layers=36,
    heads=64,
    kv_heads=8,
    head_dim=64,
    hidden=2880,
    window=128,
    experts=128,
    top_k=4,
    expert_ffn=2880,
    **LLAMA,
)
SMALL = Config(
    vocab=128,
    layers=4,
    heads=4,
    kv_heads=4,
    head_dim=16,
    hidden=64,
    ffn=128,
    latent=Latent(24, 16, 16, 8, 16),
    experts=4,
    top_k=2,
    expert_ffn=32,
    shared=32,
    dense=1,
    ahead=True,
    **LLAMA,
)


@pytest.mark.parametrize(
    "config, billions",
    [
        (DEEPSEEK, 671.0),
        (replace(DEEPSEEK, ahead=True), 671.0 + 11.5),
        (KIMI, 1026.4),
        (MOONLIGHT, 15.96),
        (GPT_OSS, 116.8),
    ],
    ids=["deepseek-v3", "with its prediction ahead", "kimi-k2", "moonlight", "gpt-oss-120b"],
)
def test_models_have_the_parameters_of_their_papers(config: Config, billions: float) -> None:
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_all_weights_of_a_latent_model_learn() -> None:
    torch.manual_seed(0)
    model, ids = Transformer(SMALL), torch.randint(128, (2, 32))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                torch.nn.init.normal_(weight)
            elif "experts" in name:
                torch.nn.init.normal_(weight, std=0.1)
    model(ids, ids).backward()
    assert {name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()} == set()


def test_a_window_multiplies_as_much_as_it_has_tokens() -> None:
    def flops(config: Config, seq: int) -> int:
        with torch.device("meta"):
            model, ids = Transformer(config), torch.empty(1, seq, dtype=torch.int64)
            with FlopCounterMode(display=False) as counted:
                model(ids, ids)
        return counted.get_total_flops()

    dense = replace(SMALL, latent=None, experts=0, dense=0, ahead=False, layers=2)
    more = [flops(config, 1024) - 2 * flops(config, 512) for config in (dense, replace(dense, window=64))]
    # half of the layers see the whole sequence, what the others do grows with it alone
    assert more[1] == pytest.approx(more[0] / 2)
    assert flops(replace(dense, packed=64), 1024) == 2 * flops(replace(dense, packed=64), 512) < flops(dense, 1024)


@pytest.mark.parametrize(
    "config, layers, shown",
    [
        (DEEPSEEK, (61, 3, 1), 2 * CAPTURED),
        (GPT_OSS, (36, 0, 2), 2 * CAPTURED),
        (replace(SMALL, experts=0), (4, 0, 1), CAPTURED),
    ],
)
def test_a_short_model_shows_every_kind_of_layer(config: Config, layers: tuple[int, ...], shown: int) -> None:
    kinds, short = config.layer_kinds, config.short()
    assert (kinds.count, kinds.leading, kinds.period) == layers and short.layers == shown
    assert {short.kind(layer) for layer in range(short.layers)} == {
        config.kind(layer) for layer in range(config.layers)
    }
    assert short == replace(config, layers=config.layers + 2).short()


@pytest.mark.parametrize("fused_softmax", [False, True])
def test_heads_share_keys_in_single_operators_too(fused_softmax: bool) -> None:
    """The loss of attention in one kernel and in single operators is the same one, and a graph of the latter can be
    captured."""
    torch.manual_seed(0)
    one = replace(SMALL, latent=None, experts=0, dense=0, ahead=False, layers=2, kv_heads=SMALL.heads // 2)
    single = replace(one, fused_attention=False, fused_softmax=False)
    models, ids = (Transformer(one).eval(), Transformer(single).eval()), torch.randint(one.vocab, (2, 16))
    models[1].load_state_dict(models[0].state_dict())
    assert torch.allclose(*(model(ids, ids) for model in models), rtol=1e-4)
    assert captured(replace(single, fused_softmax=fused_softmax), "bfloat16") is not None
