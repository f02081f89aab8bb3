"""Causal self-attention as published runs have it: of heads, in windows, from latent vectors."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.costmodel.linear import linear, norm


class Attention(nn.Module):
    """`heads` queries over `kv_heads` keys and values: [b, s, d] -> [b, s, d]; `window` > 0: of so many tokens; where
    samples are packed, inside each."""

    def __init__(self, config, window=0):
        super().__init__()
        self.config, self.window = config, window
        self.qkv = linear(config, "qkv", config.hidden, (config.heads + 2 * config.kv_heads) * config.head_dim)
        self.proj = linear(config, "proj", config.heads * config.head_dim, config.hidden)

    def forward(self, x, cos, sin, mask):
        c = self.config
        b, s, _ = x.shape
        widths = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        q, k, v = (
            t.view(b, s, t.shape[2] // c.head_dim, c.head_dim).transpose(1, 2) for t in self.qkv(x).split(widths, dim=2)
        )
        if c.rotary:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if self.window:
            y = in_pieces(q, k, v, self.window)
        elif c.packed:
            y = in_pieces(q, k, v, c.packed, causal=True)
        elif c.fused_attention:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=c.kv_heads != c.heads)
        else:
            k, v = (repeated(t, c.heads // c.kv_heads) for t in (k, v))
            y = attention(q, k, v, mask, c.dropout if self.training else 0.0)
        return self.proj(y.transpose(1, 2).reshape(b, s, c.heads * c.head_dim))


class LatentAttention(nn.Module):
    """Queries, keys and values of heads from narrow vectors of each token (config.Latent), keys with positions shared
    by all heads: [b, s, d] -> [b, s, d]."""

    def __init__(self, config):
        super().__init__()
        self.config, latent = config, config.latent
        queries = config.heads * latent.width
        self.q_down = linear(config, "q_down", config.hidden, latent.queries) if latent.queries else None
        self.q_norm = norm(config, latent.queries) if latent.queries else None
        self.q_up = linear(config, "q_up", latent.queries or config.hidden, queries)
        self.kv_down = linear(config, "kv_down", config.hidden, latent.values + latent.rotary)
        self.kv_norm = norm(config, latent.values)
        self.kv_up = linear(config, "kv_up", latent.values, config.heads * (latent.plain + latent.value))
        self.proj = linear(config, "proj", config.heads * latent.value, config.hidden)

    def forward(self, x, cos, sin, mask):
        c, latent = self.config, self.config.latent
        b, s, _ = x.shape
        q = (
            self.q_up(self.q_norm(self.q_down(x)) if self.q_down is not None else x)
            .view(b, s, c.heads, latent.width)
            .transpose(1, 2)
        )
        values, shared = self.kv_down(x).split([latent.values, latent.rotary], dim=2)
        kv = self.kv_up(self.kv_norm(values)).view(b, s, c.heads, latent.plain + latent.value).transpose(1, 2)
        k, v = kv.split([latent.plain, latent.value], dim=3)
        q, turned = q.split([latent.plain, latent.rotary], dim=3)
        shared = rotated(shared.view(b, s, 1, latent.rotary).transpose(1, 2), cos, sin).expand(
            b, c.heads, s, latent.rotary
        )
        q, k = torch.cat((q, rotated(turned, cos, sin)), dim=3), torch.cat((k, shared), dim=3)
        if c.fused_attention:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = attention(q, k, v, mask, c.dropout if self.training else 0.0)
        return self.proj(y.transpose(1, 2).reshape(b, s, c.heads * latent.value))


def rotation(rows, width, dtype):
    """Cosines and sines of rotary positions: two of [s, width / 2]."""
    rates = torch.exp(
        torch.arange(width // 2, device=rows.device, dtype=torch.float32) * (-math.log(10000.0) * 2 / width)
    )
    angles = rows.float()[:, None] * rates
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x, cos, sin):
    """Rotary positions: [b, h, s, d] -> the same."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def in_pieces(q, k, v, tokens, causal=False):
    """Attention inside pieces of so many tokens. Each token to all of its piece is the work of a causal window as long.
    All [b, h, s, d]; s is a multiple of a piece."""
    b, _, s, d = q.shape
    pieces = [t.transpose(1, 2).reshape(b * (s // tokens), tokens, t.shape[1], d).transpose(1, 2) for t in (q, k, v)]
    y = F.scaled_dot_product_attention(*pieces, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1])
    return y.transpose(1, 2).reshape(b, s, q.shape[1], d).transpose(1, 2)


def repeated(x, times):
    """Each head so many times: [b, h, s, d] -> [b, h * times, s, d]."""
    if times == 1:
        return x
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)


def attention(q, k, v, mask, dropout):
    """Scaled dot-product attention in single operators, the whole square of scores kept; `mask [s, s]` is true where
    nobody looks, None where the softmax is one kernel that scales and masks what it reads (and the square that it reads
    and writes is what counts)."""
    if mask is None:
        return F.dropout(((q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)).softmax(-1), dropout) @ v
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return F.dropout(scores.masked_fill(mask, float("-inf")).softmax(-1), dropout) @ v
