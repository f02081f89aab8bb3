"""flex_attention, traced as plain operators. Used by devices.

torch compiles it to kernels of its own, has no gradient of it on CPUs, and refuses fake tensors. Its argument checks
are kept. It becomes scaled dot product attention with a mask (which a pass may recognise as causal), or, with a
`score_mod`, two matmuls with a softmax between them. A block mask is evaluated as its `mask_mod`; a block mask that
hides more than that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import log
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention

from autopar._torch import copied
from autopar.capture._torch import flex_attention_by, items_are_indices, redirected
from autopar.capture.lines import caller
from autopar.errors import CaptureError

Mod = Callable[..., Tensor]
INDICES = (0, 1, 2, 3)  # sample, head, query, key
HAND_MADE = "let create_block_mask make it, of a mask_mod that says all that is hidden"


@contextmanager
def plain_flex_attention() -> Iterator[None]:
    """A context in which flex_attention runs as plain differentiable operators, block masks are computed from sizes
    alone, and code compiled by torch.compile (as flex_attention mostly is) runs uncompiled. Raises CaptureError,
    inside, for a block mask whose blocks leave out what its `mask_mod` does not, or of which that cannot be told."""
    if _inside:
        yield
        return
    plain = _Plain(copied(flex.flex_attention), copied(flex.create_block_mask))
    _inside.append(plain)
    try:
        with (
            torch.compiler.set_stance("force_eager"),
            redirected(flex.flex_attention, plain.attention),
            redirected(flex.create_block_mask, plain.made),
        ):
            yield
    finally:
        _inside.clear()


@dataclass
class _Plain:
    """The replacements of flex_attention and create_block_mask, and copies of both."""

    attention_before: Callable[..., Any]
    made_before: Callable[..., Any]
    # block masks of elsewhere that are what their mask_mod says
    told: WeakKeyDictionary[Any, None] = field(default_factory=WeakKeyDictionary)

    def made(
        self,
        mask_mod: Mod,
        B: int | None,
        H: int | None,
        Q_LEN: int,
        KV_LEN: int,
        device: Any = None,
        *_: Any,
        **__: Any,
    ) -> Said:
        """As create_block_mask."""
        return _of_one_block(mask_mod, (B or 1, H or 1, Q_LEN, KV_LEN), torch.empty((), device=device))

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Mod | None = None,
        block_mask: flex.BlockMask | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        *,
        return_aux: Any = None,
    ) -> Any:
        """As flex_attention."""
        mask, mask_mod = block_mask, None
        if block_mask is not None:
            if not isinstance(block_mask, Said) and block_mask not in self.told:
                _refuse_hand_made(block_mask, self.made_before)
                self.told[block_mask] = None
            mask = _of_one_block(block_mask.mask_mod, block_mask.shape, query)
            mask_mod = block_mask.mask_mod if block_mask.mask_mod is not flex.noop_mask else None
        asked = return_lse or return_aux is not None

        def attend(
            query: Tensor, key: Tensor, value: Tensor, _: Any, __: Any, scale: float, ___: Any
        ) -> tuple[Tensor, Tensor | None, Tensor | None]:
            seen = None if mask_mod is None else _over(mask_mod, query, key)
            if score_mod is not None and not _gives_scores(score_mod, query):
                return _in_full(query, key, value, score_mod, seen, scale)
            given = scaled_dot_product_attention(
                query, key, value, seen, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )
            # no operators are left of what nobody reads
            return given, *(_in_full(query, key, value, None, seen, scale)[1:] if asked else (None, None))

        return flex_attention_by(self.attention_before, attend)(
            query, key, value, score_mod, mask, scale, enable_gqa, return_lse, kernel_options, return_aux=return_aux
        )


_inside: list[_Plain] = []  # one, also for the threads in which parts of a trace run


class Said(flex.BlockMask):
    """A block mask of one block that hides nothing, for places where only its `mask_mod` counts (models cache such
    masks)."""

    def to(self, device: torch.device | str) -> Said:
        """Itself: nothing reads its block."""
        return self


def _of_one_block(mask_mod: Mod, shape: Any, like: Tensor) -> Said:
    """A block mask of `shape` [b, h, queries, keys] on the device of `like`."""
    b, h, queries, keys = shape
    one = torch.ones((b, h, 1), dtype=torch.int32, device=like.device)
    return Said.from_kv_blocks(
        one,
        one[..., None] - 1,
        BLOCK_SIZE=(queries, keys),
        mask_mod=mask_mod,
        seq_lengths=(queries, keys),
        compute_q_blocks=False,
    )


def _refuse_hand_made(mask: flex.BlockMask, make: Callable[..., flex.BlockMask]) -> None:
    """Raise CaptureError unless the blocks of `mask`, made elsewhere, equal those that `make` gives for its
    `mask_mod`."""
    if type(mask.kv_indices) is not Tensor or mask.kv_indices.device.type == "meta":
        raise CaptureError(
            f"{caller()} gives flex_attention a block mask whose blocks have no values that could be compared with its "
            f"mask_mod; {HAND_MADE}"
        )
    with ThreadPoolExecutor(1) as outside:  # of what traces, which is a thread's
        if outside.submit(_leaves_out, mask, make).result():
            raise CaptureError(
                f"{caller()} gives flex_attention a block mask whose blocks say more than its mask_mod; {HAND_MADE}"
            )


def _leaves_out(mask: flex.BlockMask, make: Callable[..., flex.BlockMask]) -> bool:
    """Whether the blocks of `mask` hide what its `mask_mod` does not, or show in full what it hides."""
    own = make(mask.mask_mod, *mask.shape, device=mask.kv_indices.device, BLOCK_SIZE=mask.BLOCK_SIZE)
    hides = bool(((own.to_dense() > 0) & (mask.to_dense() == 0)).any())
    return hides or bool((_full(mask) > _full(own)).any())


def _full(mask: flex.BlockMask) -> Tensor:
    """1 for each block that `mask` shows in full [b, h, blocks of queries, blocks of keys], else 0."""
    if mask.full_kv_num_blocks is None or mask.full_kv_indices is None:
        return torch.zeros_like(mask.to_dense())
    return flex.BlockMask.from_kv_blocks(
        mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=mask.BLOCK_SIZE, seq_lengths=mask.seq_lengths
    ).to_dense()


def _over(mod: Mod, query: Tensor, key: Tensor, *scores: Tensor) -> Tensor:
    """The result of `mod` for all samples, heads, queries and keys, or for the `scores` [b, h, queries, keys] there. A
    mask has size 1 in dims on which it does not depend."""
    looked_at = INDICES if scores else _looked_at(mod, query.device)
    sizes = (*query.shape[:-1], key.shape[-2])
    at = [
        torch.arange(sizes[dim], device=query.device)
        if dim in looked_at
        else torch.zeros((), dtype=torch.int64, device=query.device)
        for dim in INDICES
    ]
    with items_are_indices():
        found = _mapped(mod, looked_at, len(scores))(*scores, *at)
    for dim in INDICES:
        found = found if dim in looked_at else found.unsqueeze(dim)
    return found


def _gives_scores(mod: Mod, like: Tensor) -> bool:
    """Whether `mod` returns the scores unchanged. Asked inside a vmap, which is traced apart: torch.export writes the
    indexing of a tensor down as a call of a function, though nothing reads it."""
    unchanged = False

    def asked(score: Tensor, *at: Tensor) -> Tensor:
        nonlocal unchanged
        unchanged = mod(score, *at) is score
        return score

    score, index = (torch.zeros(1, dtype=dtype, device=like.device) for dtype in (like.dtype, torch.int64))
    with items_are_indices():
        torch.vmap(asked)(score, *[index] * len(INDICES))
    return unchanged


def _looked_at(mod: Mod, device: torch.device) -> tuple[int, ...]:
    """Which of its indices the result of `mod` depends on."""
    twice = torch.zeros(2, dtype=torch.int64, device=device)
    with items_are_indices():
        found = _mapped(mod, INDICES, 0)(twice, twice, twice, twice)
    return tuple(dim for dim in INDICES if found.stride(dim))


def _mapped(mod: Mod, dims: Sequence[int], scores: int) -> Mod:
    """`mod` mapped over the indices in `dims` at once; its first `scores` arguments are scores."""
    for dim in reversed(dims):
        mod = torch.vmap(mod, in_dims=(*[0] * scores, *(0 if dim == other else None for other in INDICES)))
    return mod


def _in_full(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None, seen: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention [b, h, queries, dims], and the log-sum-exp and the maximum of the scores, to the base 2, as torch's
    kernels return them. Zero for a query that sees no key."""
    key, value = (
        x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) if query.shape[1] != key.shape[1] else x
        for x in (key, value)
    )
    scores = (query @ key.transpose(-2, -1)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    scores = scores if score_mod is None else _over(score_mod, query, key, scores)
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    blind = (scores == -torch.inf).all(dim=-1, keepdim=True)
    shown = scores.masked_fill(blind, 0.0)
    given = torch.softmax(shown, dim=-1).masked_fill(blind, 0.0).to(query.dtype) @ value
    total, largest = (
        x.masked_fill(blind.squeeze(-1), -torch.inf) / log(2)
        for x in (torch.logsumexp(shown, dim=-1), shown.detach().amax(dim=-1))
    )
    return given, total, largest
