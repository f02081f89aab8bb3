"""The plain models: they train, their factories cost nothing on meta, and the expert dispatch is what it says."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import moe

NAMES = ("mlp", "gpt", "cnn", "recommender", "moe")
# Millions of parameters of the realistic factories: GPT-2 small and AlexNet as published, the others as documented.
LARGE = {
    "mlp": ("wide", 554),
    "gpt": ("small", 124.4),
    "cnn": ("alexnet", 61.1),
    "recommender": ("large", 462),
    "moe": ("medium", 4703),
}


def first(out):
    return out if isinstance(out, torch.Tensor) else out[0]


@pytest.mark.parametrize("name", NAMES)
def test_tiny_trains(name):
    torch.manual_seed(0)
    model, args = importlib.import_module(f"models.{name}").tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = first(model(*args))
        assert loss.shape == ()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize("name", NAMES)
def test_realistic_factory_on_meta(name):
    factory, millions = LARGE[name]
    with torch.device("meta"):
        model, args = getattr(importlib.import_module(f"models.{name}"), factory)(batch=4)
    assert {t.device.type for t in (*model.parameters(), *args)} == {"meta"}
    assert all(t.shape[0] == 4 for t in args)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=2e-3)
    assert first(model(*args)).shape == ()


def dispatch_config(**sizes):
    return moe.Config(hidden=8, expert_hidden=12, **sizes)


def expert(layer, index, token):
    """One expert's feed-forward network on one token [d]."""
    experts = layer.experts
    return torch.nn.functional.gelu(token @ experts.up[index]) @ experts.down[index]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), experts=st.integers(2, 5), seq=st.integers(1, 7), factor=st.integers(1, 5))
def test_dispatch_equals_a_loop_over_tokens(seed, experts, seq, factor):
    torch.manual_seed(seed)
    config = dispatch_config(experts=experts, top_k=2, capacity_factor=factor)
    layer = moe.MixtureOfExperts(config).double()
    x = torch.randn(3, seq, 8, dtype=torch.float64)
    capacity = -(-seq * 2 * factor // experts)
    wanted = torch.zeros_like(x)
    for b in range(3):
        taken = [0] * experts
        for s in range(seq):
            gates, chosen = layer.router.gate(x[b, s]).softmax(-1).topk(2)
            for gate, index in zip(gates / gates.sum(), chosen.tolist(), strict=True):
                if taken[index] < capacity:
                    wanted[b, s] += gate * expert(layer, index, x[b, s])
                taken[index] += 1
    torch.testing.assert_close(layer(x)[0], wanted, rtol=1e-10, atol=1e-12)


def test_balance_is_one_for_even_routing_and_more_for_uneven():
    router = moe.Router(dispatch_config(experts=4, top_k=1)).double()
    eye = torch.zeros(1, 4, 8, dtype=torch.float64)
    eye[0, :, :4] = torch.eye(4)
    with torch.no_grad():
        router.gate.weight.zero_()[:, :4] = 9 * torch.eye(4)
    assert router(eye)[1].item() == pytest.approx(1)
    assert router(eye[:, :1].expand(1, 4, 8))[1].item() == pytest.approx(4, rel=1e-2)
