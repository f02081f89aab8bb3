"""flex_attention as operators: the formula written out is the oracle, of what it gives and of its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from autopar.capture import capture
from autopar.capture.flexible import plain_flex_attention
from autopar.errors import CaptureError
from passes.edit import args_of, calls
from tests.helpers.flexible import ATTENTIONS, MASKS, Reader, causal, plainly, reader

sdpa = torch.ops.aten.scaled_dot_product_attention.default
LENGTH = 16


def blocks(*, full: bool = False, mask_mod: Any = causal) -> flex.BlockMask:
    """Of two blocks of queries by two of keys, the first of keys alone."""
    there = {
        "kv_num_blocks": torch.tensor([[[1, 1]]], dtype=torch.int32),
        "kv_indices": torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32),
    }
    return flex.BlockMask.from_kv_blocks(
        **there,
        **({f"full_{name}": x for name, x in there.items()} if full else {}),
        BLOCK_SIZE=LENGTH // 2,
        mask_mod=mask_mod,
    )


MODS: dict[str, Any] = {
    "none": None,
    "the same": lambda score, b, h, i, j: score,
    "distance": lambda score, b, h, i, j: score - 0.1 * (i - j).abs() * (h + 1),
    "hides": lambda score, b, h, i, j: torch.where((i + j + b) % 3 > 0, score, -float("inf")),
    "hides all": lambda score, b, h, i, j: torch.where(i > 0, score.tanh(), -float("inf")),
}


def formula(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask_mod: Any, scale: float) -> tuple[Tensor, Tensor]:
    """What flex_attention says, and the logarithm of the sum: zeros, and none, of a query that sees nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = scale * q @ k.transpose(-1, -2)
    at = [torch.arange(n).view([-1 if d == dim else 1 for d in range(4)]) for dim, n in enumerate(scores.shape)]
    scores = scores if score_mod is None else score_mod(scores, *at)
    scores = scores if mask_mod is None else scores.masked_fill(~mask_mod(*at), -float("inf"))
    most = scores.detach().amax(-1, keepdim=True)
    shares = (scores - most.where(most.isfinite(), 0.0)).exp()
    whole, seen = shares.sum(-1, keepdim=True), most.isfinite()
    some = whole.where(seen, 1.0)
    return shares / some @ v, (some.log() + most).squeeze(-1)


@given(
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3]),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.sampled_from(sorted(MODS)),
    st.sampled_from(["", "b", "h", "bh"]),
    st.integers(0, 2**20),
    st.booleans(),
    st.sampled_from([None, 0.7]),
)
def test_gives_what_torch_gives(
    b: int,
    of: int,
    queries: int,
    keys: int,
    heads: tuple[int, int],
    mod: str,
    by: str,
    seed: int,
    whole: bool,
    scale: float | None,
) -> None:
    random = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(b, n, length, dim, generator=random, dtype=torch.float64, requires_grad=True)
        for n, length, dim in ((heads[0], queries, 4), (heads[1], keys, 4), (heads[1], keys, of))
    )
    shown = torch.rand(b, heads[0], queries, keys, generator=random) < 0.6
    at = {"b": lambda i: i if "b" in by else 0, "h": lambda i: i if "h" in by else 0}

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return shown[at["b"](b), at["h"](h), i, j]

    with plain_flex_attention():
        mask = (
            None
            if whole
            else flex.create_block_mask(
                mask_mod, b if "b" in by else None, heads[0] if "h" in by else None, queries, keys, device="cpu"
            )
        )
        out, lse = flex.flex_attention(q, k, v, MODS[mod], mask, scale, heads[0] != heads[1], return_lse=True)
        alone = flex.flex_attention(q, k, v, MODS[mod], mask, scale, heads[0] != heads[1])
    wanted, lse_wanted = formula(q, k, v, MODS[mod], None if whole else mask_mod, 0.5 if scale is None else scale)
    assert torch.allclose(out, wanted) and torch.allclose(alone, wanted) and torch.allclose(lse, lse_wanted)
    weights = torch.randn(wanted.shape, generator=random, dtype=torch.float64)
    seen = lse_wanted.isfinite()  # of what sees nothing torch's gradient of the sum is none
    for given_, said in ((out, wanted), (alone, wanted), (lse[seen], lse_wanted[seen])):
        factor = weights if given_.shape == weights.shape else weights.sum(-1)[seen]
        ours = torch.autograd.grad((given_ * factor).sum(), (q, k, v), retain_graph=True, materialize_grads=True)
        theirs = torch.autograd.grad((said * factor).sum(), (q, k, v), retain_graph=True, materialize_grads=True)
        assert all(torch.allclose(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("mask", "attention"),
    [
        ("compiled by flag", "compiled"),
        ("documents", "plain"),
        ("kept", "softcap"),
        ("seen", "slopes"),
        *(
            pytest.param(mask, attention, marks=pytest.mark.slow)
            for mask in MASKS
            for attention in ATTENTIONS
            if mask == "causal" or attention == "plain"
        ),
    ],
)
def test_models_are_captured(mask: str, attention: str) -> None:
    model, inputs = reader(mask, attention)
    captured = capture(model, inputs)
    inner = [gm for gm in captured.gm.modules() if isinstance(gm, torch.fx.GraphModule)]
    found = [node for gm in inner for node in calls(gm, sdpa)]
    assert bool(found) == (attention in ("plain", "compiled", "sinks"))
    for given_ in map(args_of, found):
        hidden = mask in ("window", "by head", "documents", "seen")
        assert (given_["attn_mask"] is not None) == hidden and given_["is_causal"] == (not hidden and mask != "none")


def test_a_mask_says_nothing_of_what_it_does_not_look_at() -> None:
    with plain_flex_attention():
        out = torch.fx.experimental.proxy_tensor.make_fx(
            lambda q: flex.flex_attention(q, q, q, block_mask=flex.create_block_mask(causal, 2, 4, 6, 6, device="cpu"))
        )(torch.randn(2, 4, 6, 8))
    masks = [
        node.meta["val"]
        for node in out.graph.nodes
        if "val" in node.meta and getattr(node.meta["val"], "dtype", None) == torch.bool
    ]
    assert masks and all(mask.numel() <= 36 for mask in masks)


@pytest.mark.parametrize("mod", ["none", "the same", "distance"])
def test_scores_that_are_given_back_are_not_written_out(mod: str) -> None:
    with plain_flex_attention():
        out = torch.fx.experimental.proxy_tensor.make_fx(
            lambda q: flex.flex_attention(q, q, q, MODS[mod]), pre_dispatch=True
        )(torch.randn(2, 4, 6, 8))
    assert any(calls(out, sdpa)) == (mod != "distance")


def test_masks_that_were_made_before() -> None:
    for there in (
        flex.create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu"),
        flex.create_block_mask(
            causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=4, separate_full_blocks=False
        ),
    ):
        captured = capture(Reader(lambda _, there=there: there, plainly), reader("none", "plain")[1])
        assert any("block_mask was created for" in note for note in captured.notes)  # it has one length


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (blocks(), "whose blocks say more than its mask_mod"),
        (blocks(full=True), "whose blocks say more than its mask_mod"),
        (blocks(mask_mod=None), "whose blocks say more than its mask_mod"),
        (None, "whose blocks have no values"),
    ],
)
def test_blocks_by_hand_are_refused(made: Any, says: str) -> None:
    model = Reader(lambda tokens: made or blocks(), plainly)
    with pytest.raises(
        CaptureError, match=rf"flexible.py:\d+ gives flex_attention a block mask {says}.*let create_block_mask make it"
    ):
        capture(model, reader("none", "plain")[1])


def test_torchs_own_is_back_afterwards() -> None:
    own = (
        flex.flex_attention.__code__,
        flex.create_block_mask.__code__,
        flex.flex_attention.__defaults__,
        flex.flex_attention.__kwdefaults__,
    )
    names = set(vars(flex))
    with pytest.raises(ZeroDivisionError), plain_flex_attention(), plain_flex_attention():
        assert flex.flex_attention.__code__ is not own[0]
        raise ZeroDivisionError
    assert own == (
        flex.flex_attention.__code__,
        flex.create_block_mask.__code__,
        flex.flex_attention.__defaults__,
        flex.flex_attention.__kwdefaults__,
    )
    assert set(vars(flex)) == names


def test_what_torch_checks_is_checked() -> None:
    q = torch.randn(2, 4, 6, 8)
    with plain_flex_attention():
        with pytest.raises(ValueError, match="enable_gqa"):
            flex.flex_attention(q, q[:, :2], q[:, :2])
        with pytest.raises(ValueError, match="block_mask was created for"):
            flex.flex_attention(q, q, q, block_mask=flex.create_block_mask(causal, None, None, 4, 4, device="cpu"))
