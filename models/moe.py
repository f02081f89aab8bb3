"""A mixture-of-experts transformer with dense dispatch, after GShard (https://arxiv.org/abs/2006.16668).

Tokens go to experts through one-hot einsums with a fixed capacity, and the experts' weights are stacked, so the expert
is an ordinary dim of every tensor and no shape depends on data. Each sequence is its own dispatch group.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from models import gpt


@dataclass(frozen=True)
class Config(gpt.Config):
    """Sizes; the defaults give 4.7 G parameters, of which each token meets 2 experts in 8."""

    vocab: int = 32000
    positions: int = 4096
    layers: int = 16
    heads: int = 16
    hidden: int = 2048
    expert_hidden: int = 8192
    experts: int = 8
    top_k: int = 2
    capacity_factor: int = 2
    balance: float = 0.01


class Router(nn.Module):
    """Which expert gets which token: [b, s, d] -> combine [b, s, e, c] (gates) and the balance loss (scalar)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden, config.experts, bias=False)

    def forward(self, x):
        config, s = self.config, x.shape[1]
        probs = self.gate(x).softmax(-1)
        chosen = (probs >= probs.topk(config.top_k, dim=-1).values[..., -1:]).to(x.dtype)
        gates = probs * chosen
        gates = gates / gates.sum(-1, keepdim=True)
        capacity = (s * config.top_k * config.capacity_factor + config.experts - 1) // config.experts
        slot = (chosen.cumsum(1) - 1).unsqueeze(-1)  # a token beyond the capacity matches no slot and is dropped
        slots = torch.arange(capacity, device=x.device, dtype=x.dtype)
        combine = gates.unsqueeze(-1) * (slot == slots)
        balance = config.experts * (chosen.mean((0, 1)) * probs.mean((0, 1))).sum()
        return combine, balance


class Experts(nn.Module):
    """Stacked feed-forward networks: [b, e, c, d] -> [b, e, c, d]."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Parameter(torch.empty(config.experts, config.hidden, config.expert_hidden).normal_(std=0.02))
        self.down = nn.Parameter(torch.empty(config.experts, config.expert_hidden, config.hidden).normal_(std=0.02))

    def forward(self, x):
        h = F.gelu(torch.einsum("becd,edh->bech", x, self.up))
        return torch.einsum("bech,ehd->becd", h, self.down)


class MixtureOfExperts(nn.Module):
    """Dispatch, experts, combine: [b, s, d] -> [b, s, d] and the balance loss."""

    def __init__(self, config):
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x):
        combine, balance = self.router(x)
        dispatch = (combine > 0).to(x.dtype)
        y = self.experts(torch.einsum("bsec,bsd->becd", dispatch, x))
        return torch.einsum("bsec,becd->bsd", combine, y), balance


class Block(nn.Module):
    """One pre-norm layer: [b, s, d] -> [b, s, d] and the balance loss."""

    def __init__(self, config):
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.hidden)
        self.attention = gpt.Attention(config)
        self.norm_2 = nn.LayerNorm(config.hidden)
        self.moe = MixtureOfExperts(config)

    def forward(self, x, balance):
        x = x + self.attention(self.norm_1(x))
        y, extra = self.moe(self.norm_2(x))
        return x + y, balance + extra


class MoE(nn.Module):
    """Token ids in, loss and logits out."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.positions, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, ids, targets):
        """(cross-entropy plus balance loss, logits [b, s, vocab]) of ids [b, s] against the next ids [b, s]."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        balance = x.new_zeros(())
        for block in self.blocks:
            x, balance = block(x, balance)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss + self.config.balance * balance, logits


def build(config, batch, seq):
    """The model and one batch for it."""
    ids = torch.randint(config.vocab, (batch, seq + 1))
    return MoE(config), (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def tiny(batch=8, seq=16):
    """2 layers, 8 heads, hidden 64, 4 experts, for tests."""
    config = Config(vocab=257, positions=64, layers=2, heads=8, hidden=64, expert_hidden=128, experts=4)
    return build(config, batch, seq)


def medium(batch=8, seq=2048):
    """16 layers of 8 experts of 8192: 4.7 G parameters."""
    return build(Config(), batch, seq)
