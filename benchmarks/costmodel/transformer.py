"""A decoder-only transformer that is all of GPT, Llama, Mixtral and DeepSeek by its sizes: what most published training
runs train."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from benchmarks.costmodel.attention import Attention, LatentAttention, rotation
from benchmarks.costmodel.linear import linear, norm


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
    """Each token through `top_k` experts: [b, s, d] -> [b, s, d]; tokens sorted by expert, one grouped matmul per
    layer."""
    sizes = MixtralConfig(
        hidden_size=config.hidden,
        intermediate_size=config.expert_ffn,
        num_local_experts=config.experts,
        num_experts_per_tok=config.top_k,
        experts_implementation="grouped_mm",
    )
    return MixtralSparseMoeBlock(sizes)


class Block(nn.Module):
    """One pre-norm layer: [b, s, d] -> [b, s, d]; what `number` makes of it says Config.kind."""

    def __init__(self, config, number):
        super().__init__()
        routed, windowed = config.kind(number)
        self.norm_1, self.norm_2 = norm(config), norm(config)
        self.attention = (
            LatentAttention(config) if config.latent else Attention(config, config.window if windowed else 0)
        )
        self.mlp = experts(config) if routed else FeedForward(config, config.ffn)
        self.shared_mlp = FeedForward(config, config.shared) if routed and config.shared else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cos, sin, mask):
        x = x + self.dropout(self.attention(self.norm_1(x), cos, sin, mask))
        wide = self.norm_2(x)
        made = self.mlp(wide)
        return x + self.dropout(made if self.shared_mlp is None else made + self.shared_mlp(wide))


class Ahead(nn.Module):
    """What a token is behind the next: of rows and the embeddings of the next ones, both [b, s, d], rows [b, s, d]."""

    def __init__(self, config):
        super().__init__()
        self.norm_rows, self.norm_next, self.norm = norm(config), norm(config), norm(config)
        self.proj = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        self.block = Block(config, config.layers)

    def forward(self, x, following, cos, sin, mask):
        x = self.proj(torch.cat((self.norm_next(following), self.norm_rows(x)), dim=-1))
        return self.norm(self.block(x, cos, sin, mask))


class Transformer(nn.Module):
    """Token ids in, loss out."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = None if config.rotary else nn.Embedding(config.positions, config.hidden)
        self.blocks = nn.ModuleList(Block(config, number) for number in range(config.layers))
        self.ahead = Ahead(config) if config.ahead else None
        self.norm = norm(config)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        if config.adapters:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".adapter." in name)

    def forward(self, ids, targets):
        """Mean cross-entropy of ids [b, s] against the next ids [b, s], and against those behind them, in the same
        places, where the model predicts them too."""
        x, rows = self.tokens(ids), torch.arange(ids.shape[1], device=ids.device)
        if self.positions is not None:
            x = x + self.positions(rows)
        width = self.config.latent.rotary if self.config.latent else self.config.head_dim
        cos, sin = rotation(rows, width, x.dtype) if self.config.rotary else (None, None)
        mask = None if self.config.fused_attention or self.config.fused_softmax else rows[:, None] < rows
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        loss = self.loss(self.norm(x), targets)
        if self.ahead is None:
            return loss
        return loss + 0.1 * self.loss(self.ahead(x, self.tokens(targets), cos, sin, mask), targets)

    def loss(self, x, targets):
        """Mean cross-entropy of rows [b, s, d] against ids [b, s]."""
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())
