"""A decoder-only transformer with learned positions and a tied head, after GPT-2 and nanoGPT."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are GPT-2 small."""

    vocab: int = 50257
    positions: int = 1024
    layers: int = 12
    heads: int = 12
    hidden: int = 768
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention with query, key and value side by side in one weight: [b, s, d] -> [b, s, d]."""

    def __init__(self, config):
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, d // self.heads).transpose(1, 2) for t in self.qkv(x).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.proj(y.transpose(1, 2).reshape(b, s, d))


class FeedForward(nn.Module):
    """Two linear layers with GELU between: [b, s, d] -> [b, s, d]."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One pre-norm layer: [b, s, d] -> [b, s, d]."""

    def __init__(self, config):
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.hidden)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """Token ids in, loss and logits out."""

    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.positions, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids, targets):
        """(mean cross-entropy, logits [b, s, vocab]) of ids [b, s] against the next ids [b, s]."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


def build(config, batch, seq):
    """The model and one batch for it."""
    ids = torch.randint(config.vocab, (batch, seq + 1))
    return GPT(config), (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def tiny(batch=8, seq=16):
    """2 layers, 8 heads, hidden 64 and a vocabulary that divides by nothing, for tests."""
    return build(Config(vocab=257, positions=64, layers=2, heads=8, hidden=64), batch, seq)


def small(batch=8, seq=128):
    """GPT-2 small: 124 M parameters."""
    return build(Config(), batch, seq)
