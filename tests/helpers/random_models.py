"""Small models drawn at random: any operators in any order, in repeated blocks and around them, some of them frozen.

All dims have one of few sizes (batch, sequence and width are 8), so that whoever takes one dim for another finds the
sizes right.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D = 8
"""Width, and the sizes of batch and sequence."""


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(-3, -2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).flatten(-2)


def _written(h: Tensor) -> Tensor:
    h = h.clone()
    h[..., 1:3] = h[..., 0:2].clone()
    return h


def _attention(h: Tensor, m: Block) -> Tensor:
    q, k, v = F.linear(h, m.qkv).unflatten(-1, (3, D)).unbind(-2)
    unseen = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril().logical_not()
    return h + torch.softmax((q @ k.transpose(-1, -2) / D**0.5).masked_fill(unseen, float("-inf")), -1) @ v


def _gated(h: Tensor, m: Block) -> Tensor:
    gate, up = F.linear(h, m.up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, m.down[:, :16])


def _rope(h: Tensor, m: Block) -> Tensor:
    turned = torch.cat((-h[..., D // 2 :], h[..., : D // 2]), -1)
    return h * m.places[: h.shape[1]].cos() + turned * m.places[: h.shape[1]].sin()


STEPS: dict[str, Callable[[Tensor, Block], Tensor]] = {
    "addmm": lambda h, m: torch.addmm(m.v, h.reshape(-1, D), m.a).reshape(h.shape),
    "amax": lambda h, m: h - h.amax(-1, keepdim=True),
    "attention": _attention,
    "batch mean": lambda h, m: h - h.mean(0),
    "bmm": lambda h, m: torch.bmm(h, m.a.expand(h.shape[0], D, D)),
    "chunk": lambda h, m: torch.cat(h.chunk(2, -1)[::-1], -1),
    "conv": lambda h, m: F.conv1d(h.transpose(1, 2), m.conv, m.v, padding=1).transpose(1, 2),
    "cumsum": lambda h, m: h.cumsum(1) / 8,
    "depthwise": lambda h, m: F.conv1d(h.transpose(1, 2), m.depthwise, padding=1, groups=D).transpose(1, 2),
    "einsum": lambda h, m: torch.einsum("bsd,de->bse", h, m.b),
    "embedding": lambda h, m: h + F.embedding(h.argmax(-1), m.table),
    "expand": lambda h, m: h + m.v.expand(h.shape[0], h.shape[1], D),
    "flip": lambda h, m: h.flip(1) + h,
    "fused attention": lambda h, m: (
        h
        + _joined(
            F.scaled_dot_product_attention(*[_heads(x, 4) for x in F.linear(h, m.qkv).chunk(3, -1)], is_causal=True)
        )
    ),
    "gated": _gated,
    "gather": lambda h, m: h.gather(1, h.argsort(1)),
    "grouped heads": lambda h, m: _joined(
        F.scaled_dot_product_attention(
            _heads(h @ m.a, 4), _heads(h @ m.kv[0], 2), _heads(h @ m.kv[1], 2), enable_gqa=True, is_causal=True
        )
    ),
    "heads": lambda h, m: F.linear(h.unflatten(-1, (2, 4)).transpose(2, 3).flatten(2), m.a),
    "index": lambda h, m: h + h[torch.arange(h.shape[0]), h.sum(-1).argmax(-1)].unsqueeze(1),
    "index add": lambda h, m: (
        h + torch.zeros_like(m.table).index_add(0, h.argmax(-1).flatten(), h.flatten(0, 1))[:D].sum(0) / 8
    ),
    "layer norm": lambda h, m: F.layer_norm(h, (D,), m.g, m.v),
    "linear": lambda h, m: F.linear(h, m.a, m.v),
    "log softmax": lambda h, m: F.log_softmax(h, -1),
    "mean": lambda h, m: h * h.mean(),
    "merge": lambda h, m: h.flatten(0, 1).view(-1, 2, D // 2).transpose(1, 2).reshape(h.shape),
    "mlp": lambda h, m: F.linear(F.gelu(F.linear(h, m.up)), m.down),
    "no grad": lambda h, m: h / (h.detach().abs().amax() + 1),
    "norm": lambda h, m: h / (h.norm() + 1),
    "odd slices": lambda h, m: torch.cat((-h[..., 3:], h[..., :3]), -1),
    "one hot": lambda h, m: h + F.one_hot(h.argmax(-1), D).to(h.dtype) @ m.a,
    "permuted list": lambda h, m: h[..., [7, 0, 2, 1, 4, 3, 6, 5]],
    "pool": lambda h, m: F.avg_pool1d(h.transpose(1, 2), 3, 1, 1).transpose(1, 2) + h,
    "positions": lambda h, m: h + F.embedding(torch.arange(h.shape[1]), m.square),
    "products": lambda h, m: torch.einsum("bst,bte->bse", torch.einsum("bsd,btd->bst", h, h) / D, h) / 4,
    "repeat": lambda h, m: h.repeat_interleave(2, -1)[..., :D] + h.repeat(1, 1, 2)[..., ::2],
    "rms norm": lambda h, m: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * m.g,
    "roll": lambda h, m: h.roll(1, -1) + h,
    "rope": _rope,
    "scale": lambda h, m: h * m.s.exp().clamp(max=3),
    "scatter": lambda h, m: torch.zeros_like(h).scatter_add(-1, h.argsort(-1), h) + h,
    "shift": lambda h, m: F.pad(h, (1, 1))[..., 1:-1] * F.pad(h, (0, 0, 1, 0))[:, :-1],
    "softmax over rows": lambda h, m: torch.softmax(h, 1) * h,
    "sort": lambda h, m: h.sort(1).values,
    "spread": lambda h, m: h / (h.std((0, 1)) + 1),
    "stack": lambda h, m: torch.stack(h.unbind(-1)[::-1], -1),
    "tied": lambda h, m: F.linear(F.linear(h, m.table), m.table.T) / 8,
    "top": lambda h, m: torch.cat([h.topk(4, -1).values, h[..., 4:]], -1),
    "transposed": lambda h, m: torch.tanh(h.transpose(0, 1)).contiguous().transpose(0, 1),
    "where": lambda h, m: torch.where(h > 0, h @ m.a, h * 0.5),
    "write": lambda h, m: _written(h),
}
"""What a block may do to `h [b, s, D]` with its parameters; the result has the same shape."""

TOGETHER = ("batch mean", "index", "index add", "mean", "no grad", "norm", "spread")
"""The steps in which samples meet, so that microbatches are refused."""

LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mse": lambda h, x, y: F.mse_loss(h, x.flip(0)),
    "cross entropy": lambda h, x, y: F.cross_entropy(h.flatten(0, 1), y.flatten(), ignore_index=0),
    "square": lambda h, x, y: h.square().sum() / 100,
    "contrast": lambda h, x, y: F.cross_entropy(h.mean(1) @ x.mean(1).T, torch.arange(len(x))),
}


LOSSES_ALONE = ("cross entropy", "square")
"""Those that are sums over samples, or such sums over a count."""


class Block(nn.Module):
    """Some steps, with or without what came in added at the end."""

    def __init__(self, steps: list[str], residual: bool) -> None:
        super().__init__()
        self.steps, self.residual = steps, residual
        shapes = {
            "a": (D, D),
            "b": (D, D),
            "v": (D,),
            "s": (1,),
            "up": (32, D),
            "down": (D, 32),
            "qkv": (3 * D, D),
            "kv": (2, D, D // 2),
            "table": (16, D),
            "square": (D, D),
            "conv": (D, D, 3),
            "depthwise": (D, 1, 3),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(0.35 * torch.randn(shape)))
        self.g = nn.Parameter(1 + 0.1 * torch.randn(D))
        self.register_buffer("places", torch.randn(D, D))

    def forward(self, h: Tensor) -> Tensor:
        x = h
        for step in self.steps:
            x = STEPS[step](x, self)
        return h + x if self.residual else x


class Drawn(nn.Module):
    """A stem, one to three alike blocks, a head and a loss, as `seed` draws them; float64. In some the stem, the blocks
    or both are frozen. `alone`: no sample meets another one but in the loss."""

    def __init__(self, seed: int, *, alone: bool = False) -> None:
        super().__init__()
        draw = random.Random(seed)
        known = sorted(step for step in STEPS if not alone or step not in TOGETHER)
        torch.manual_seed(seed)

        def steps(least: int, most: int) -> list[str]:
            return [draw.choice(known) for _ in range(draw.randint(least, most))]

        self.stem, body, residual = Block(["linear", *steps(0, 3)], False), steps(1, 4), draw.random() < 0.6
        self.blocks = nn.ModuleList([Block(body, residual) for _ in range(draw.randint(1, 3))])
        self.head, self.loss = (
            Block([*steps(0, 3), "linear"], False),
            draw.choice(LOSSES_ALONE if alone else sorted(LOSSES)),
        )
        frozen: list[tuple[nn.Module, ...]] = [(self.stem,), (self.blocks,), (self.stem, self.blocks)]
        for part in draw.choice(frozen) if draw.random() < 0.3 else ():
            part.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return LOSSES[self.loss](self.head(h), x, y)

    def extra_repr(self) -> str:
        return f"\n{self.stem.steps} {len(self.blocks)} x {self.blocks[0].steps} {self.head.steps} {self.loss}"  # type: ignore[union-attr]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Inputs [8, 8, D] and labels [8, 8] of a Drawn."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(D, D, D, dtype=torch.float64, generator=generator), torch.randint(
        0, D, (D, D), generator=generator
    )


def tame(model: nn.Module, x: Tensor, y: Tensor) -> bool:
    """Whether gradients are of a size at which float64 tells a wrong one from rounding."""
    model(x, y).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return all(bool(g.isfinite().all()) and float(g.abs().max()) < 1e5 for g in grads)
