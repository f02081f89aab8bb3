"""Models that call flex_attention as people do, by name: what is hidden, how scores are changed, where masks are
made."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention

WORDS, WIDTH, HEADS, LENGTH = 64, 32, 4, 16


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as torch.compile makes it, where it is asked for: the compiler takes seconds to import."""
    return torch.compile(function)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


class Attention(nn.Module):
    """Attention by flex_attention; `attend` says how."""

    def __init__(self, groups: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.groups, self.attend = groups, attend
        self.q, self.k, self.v, self.o = (
            nn.Linear(WIDTH, WIDTH if i in (0, 3) else groups * WIDTH // HEADS) for i in range(4)
        )
        self.bias, self.sinks = nn.Parameter(torch.randn(HEADS, 2 * LENGTH)), nn.Parameter(torch.randn(HEADS))
        self.register_buffer("slopes", 0.5 ** torch.arange(1, HEADS + 1))

    def forward(self, x: Tensor, mask: BlockMask | None) -> Tensor:
        """[b, s, width] to the same."""
        q, k, v = (
            layer(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in ((self.q, HEADS), (self.k, self.groups), (self.v, self.groups))
        )
        return self.o(self.attend(self, q, k, v, mask).transpose(1, 2).flatten(2))


class Reader(nn.Module):
    """Two blocks that read tokens [b, s], as `mask` and `attend` say; the loss of the tokens given as targets [b,
    s]."""

    def __init__(
        self, mask: Callable[..., BlockMask | None], attend: Callable[..., Tensor], groups: int = HEADS
    ) -> None:
        super().__init__()
        self.mask = mask
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.norms, self.blocks = (
            nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)),
            nn.ModuleList(Attention(groups, attend) for _ in range(2)),
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        mask, x = self.mask(tokens), self.words(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x), mask)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def made(
    mod: Callable[..., Tensor],
    tokens: Tensor,
    b: int | None = None,
    h: int | None = None,
    make: Any = create_block_mask,
    **kwargs: Any,
) -> BlockMask:
    return make(mod, b, h, tokens.shape[1], tokens.shape[1], device=tokens.device, **kwargs)


@lru_cache
def kept(length: int) -> BlockMask:
    return create_block_mask(causal, None, None, length, length, device="cpu")


def documents(tokens: Tensor) -> BlockMask:
    of = (tokens < 16).cumsum(-1)
    return made(lambda b, h, q, k: (q >= k) & (of[b, q] == of[b, k]), tokens, tokens.shape[0])


def seen(tokens: Tensor) -> BlockMask:
    words = tokens > 24  # some queries see none
    return made(lambda b, h, q, k: words[b, k] & (q >= k), tokens, tokens.shape[0])


MASKS: dict[str, Callable[[Tensor], BlockMask | None]] = {
    "none": lambda tokens: None,
    "causal": lambda tokens: made(causal, tokens),
    "window": lambda tokens: made(and_masks(causal, lambda b, h, q, k: q - k < 4), tokens),
    "by head": lambda tokens: made(lambda b, h, q, k: (q >= k) & ((h < 2) | (q - k < 3)), tokens, h=HEADS),
    "documents": documents,
    "seen": seen,
    "kept": lambda tokens: kept(tokens.shape[1]),
    "compiled": lambda tokens: made(causal, tokens, make=compiled(create_block_mask)),
    "compiled by flag": lambda tokens: made(causal, tokens, _compile=True),
    "moved": lambda tokens: made(causal, tokens).to(tokens.device),
}


def plainly(of: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Any, score_mod: Any = None, **kwargs: Any) -> Any:
    return flex_attention(q, k, v, score_mod, mask, enable_gqa=of.groups != HEADS, **kwargs)


def sinks(of: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    given, aux = plainly(of, q, k, v, mask, return_aux=AuxRequest(lse=True))
    return given * torch.sigmoid(aux.lse - of.sinks[:, None])[..., None]


ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "plain": plainly,
    "compiled": lambda of, q, k, v, mask: compiled(flex_attention)(
        q, k, v, block_mask=mask, enable_gqa=of.groups != HEADS
    ),
    "slopes": lambda of, q, k, v, mask: plainly(
        of, q, k, v, mask, lambda score, b, h, i, j, slopes=of.slopes: score + slopes[h] * (j - i)
    ),
    "bias": lambda of, q, k, v, mask: plainly(
        of, q, k, v, mask, lambda score, b, h, i, j: score + of.bias[h, i - j + LENGTH]
    ),
    "softcap": lambda of, q, k, v, mask: plainly(
        of, q, k, v, mask, lambda score, b, h, i, j: 5 * torch.tanh(score / 5), scale=0.3
    ),
    "hidden by score": lambda of, q, k, v, mask: plainly(
        of, q, k, v, mask, lambda score, b, h, i, j: torch.where(i >= j, score, -float("inf"))
    ),
    "sinks": sinks,
}


def reader(mask: str, attention: str, groups: int = HEADS) -> tuple[Reader, tuple[Tensor, Tensor]]:
    """The model, and a batch for it."""
    torch.manual_seed(0)
    tokens, targets = torch.randint(WORDS, (2, 8, LENGTH), generator=torch.Generator().manual_seed(1))
    return Reader(MASKS[mask], ATTENTIONS[attention], groups), (tokens, targets)
