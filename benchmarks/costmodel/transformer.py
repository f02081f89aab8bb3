"""A decoder-only transformer that is all of GPT, Llama and Mixtral by its sizes: what most published training runs train."""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock


@dataclass(frozen=True)
class Config:
    """Sizes and kinds; the defaults are GPT-2 small.

    `norm_in_parts`: RMS norms are operators one by one. `gated`: silu(gate) * up instead of gelu(up). `rotary`: positions by rotation, else learned. `fused_attention`: one operator,
    else scores, softmax and their product one by one, `fused_softmax`: scale and mask in the kernel of the softmax. `experts` > 0: each token meets `top_k` of them, each `expert_ffn` wide.
    `adapters` > 0: low-rank adapters so wide beside the matmuls of each block that `adapted` names (https://arxiv.org/abs/2106.09685), which alone are trained.
    """

    vocab: int = 50257
    positions: int = 1024
    layers: int = 12
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 64
    hidden: int = 768
    ffn: int = 3072
    rms: bool = False
    norm_in_parts: bool = False
    gated: bool = False
    squared_relu: bool = False
    bias: bool = True
    rotary: bool = False
    tied: bool = True
    dropout: float = 0.0
    fused_attention: bool = True
    fused_softmax: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    adapters: int = 0
    adapted: tuple[str, ...] = ()

    def with_layers(self, layers):
        """The same with another depth."""
        return replace(self, layers=layers)


class Adapted(nn.Linear):
    """A linear layer with a low-rank adapter beside it: [..., d] -> [..., n]."""

    def __init__(self, wide, narrow, bias, rank):
        super().__init__(wide, narrow, bias=bias)
        self.adapter = nn.Sequential(nn.Linear(wide, rank, bias=False), nn.Linear(rank, narrow, bias=False))

    def forward(self, x):
        return super().forward(x) + self.adapter(x)


def linear(config, name, wide, narrow):
    """The layer of a block that is called `name`."""
    if name in config.adapted:
        return Adapted(wide, narrow, config.bias, config.adapters)
    return nn.Linear(wide, narrow, bias=config.bias)


class Attention(nn.Module):
    """Causal self-attention of `heads` queries over `kv_heads` keys and values: [b, s, d] -> [b, s, d]."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.qkv = linear(config, "qkv", config.hidden, (config.heads + 2 * config.kv_heads) * config.head_dim)
        self.proj = linear(config, "proj", config.heads * config.head_dim, config.hidden)

    def forward(self, x, cos, sin, mask):
        c = self.config
        b, s, _ = x.shape
        widths = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        q, k, v = (t.view(b, s, t.shape[2] // c.head_dim, c.head_dim).transpose(1, 2) for t in self.qkv(x).split(widths, dim=2))
        if c.rotary:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if c.fused_attention:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=c.kv_heads != c.heads)
        else:
            y = attention(q, k, v, mask, c.dropout if self.training else 0.0)
        return self.proj(y.transpose(1, 2).reshape(b, s, c.heads * c.head_dim))


def rotation(rows, width, dtype):
    """Cosines and sines of rotary positions: two of [s, width / 2]."""
    rates = torch.exp(torch.arange(width // 2, device=rows.device, dtype=torch.float32) * (-math.log(10000.0) * 2 / width))
    angles = rows.float()[:, None] * rates
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x, cos, sin):
    """Rotary positions: [b, h, s, d] -> the same."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def attention(q, k, v, mask, dropout):
    """Scaled dot-product attention in single operators, the whole square of scores kept; `mask [s, s]` is true where nobody looks, None where the softmax is one
    kernel that scales and masks what it reads (and the square that it reads and writes is what counts)."""
    if mask is None:
        return F.dropout(((q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)).softmax(-1), dropout) @ v
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return F.dropout(scores.masked_fill(mask, float("-inf")).softmax(-1), dropout) @ v


class FeedForward(nn.Module):
    """Up, activation, down: [..., d] -> [..., d]."""

    def __init__(self, config, width):
        super().__init__()
        self.config = config
        self.up = linear(config, "up", config.hidden, width)
        self.gate = linear(config, "gate", config.hidden, width) if config.gated else None
        self.down = linear(config, "down", width, config.hidden)

    def forward(self, x):
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        h = self.up(x)
        return self.down(F.relu(h) ** 2 if self.config.squared_relu else F.gelu(h))


def experts(config):
    """Each token through `top_k` experts: [b, s, d] -> [b, s, d]; tokens sorted by expert, one grouped matmul per layer."""
    sizes = MixtralConfig(hidden_size=config.hidden, intermediate_size=config.expert_ffn, num_local_experts=config.experts,
                          num_experts_per_tok=config.top_k, experts_implementation="grouped_mm")
    return MixtralSparseMoeBlock(sizes)


class RMSNorm(nn.RMSNorm):
    """One operator, or, `in_parts`, those of torch before it had a kernel for it (pytorch/pytorch#153666), which run in 32 bits: [..., d] -> the same."""

    def __init__(self, width, in_parts):
        super().__init__(width)
        self.in_parts = in_parts

    def forward(self, x):
        if not self.in_parts:
            return super().forward(x)
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def norm(config):
    """The norm of a row."""
    return RMSNorm(config.hidden, config.norm_in_parts) if config.rms else nn.LayerNorm(config.hidden)


class Block(nn.Module):
    """One pre-norm layer: [b, s, d] -> [b, s, d]."""

    def __init__(self, config):
        super().__init__()
        self.norm_1, self.norm_2 = norm(config), norm(config)
        self.attention = Attention(config)
        self.mlp = experts(config) if config.experts else FeedForward(config, config.ffn)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cos, sin, mask):
        x = x + self.dropout(self.attention(self.norm_1(x), cos, sin, mask))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class Transformer(nn.Module):
    """Token ids in, loss out."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = None if config.rotary else nn.Embedding(config.positions, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = norm(config)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        if config.adapters:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".adapter." in name)

    def forward(self, ids, targets):
        """Mean cross-entropy of ids [b, s] against the next ids [b, s]."""
        x, rows = self.tokens(ids), torch.arange(ids.shape[1], device=ids.device)
        if self.positions is not None:
            x = x + self.positions(rows)
        cos, sin = rotation(rows, self.config.head_dim, x.dtype) if self.config.rotary else (None, None)
        mask = None if self.config.fused_attention or self.config.fused_softmax else rows[:, None] < rows
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
