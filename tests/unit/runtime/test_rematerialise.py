"""Blocks that are run again in the backward: what runs twice, what is stored, and the state that the second run
sees."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar._torch import Watch
from autopar.errors import RunError
from autopar.runtime import Block, Mesh, enough, keep, remat, rng, skip
from autopar.runtime.algorithms import dropout
from tests.helpers.kept import taped

WIDTH = 8
MESH = Mesh((1,), ("x",), "cpu")


class Plain(Block):
    """Two products with a norm before and a nonlinearity between."""

    def forward(self, h: Tensor) -> Tensor:
        norm = F.layer_norm(h, [WIDTH])
        up = norm @ self.w["up"]
        middle = torch.tanh(up)
        down = skip(lambda: middle @ self.w["down"])
        enough()
        return h + down


class Keeping(Block):
    """The same; the first product is kept."""

    def forward(self, h: Tensor) -> Tensor:
        norm = F.layer_norm(h, [WIDTH])
        up = keep(lambda: norm @ self.w["up"])
        middle = torch.tanh(up)
        down = skip(lambda: middle @ self.w["down"])
        enough()
        return h + down


class Skipping(Block):
    """The same; the sum behind the first product is kept, so that nobody needs the product."""

    def forward(self, h: Tensor) -> Tensor:
        norm = F.layer_norm(h, [WIDTH])
        up = skip(lambda: norm @ self.w["up"])
        moved = keep(lambda: up + 0.0)
        middle = torch.tanh(moved)
        down = skip(lambda: middle @ self.w["down"])
        enough()
        return h + down


class Ordering(Block):
    """The last product copies its first operand into order, and saves the copy instead of it."""

    def forward(self, h: Tensor) -> Tensor:
        middle = torch.tanh(h @ self.w["up"]).view(2, 2, 3, WIDTH)
        experts = torch.stack([self.w["up"], self.w["down"]])
        each = skip(lambda: torch.einsum("becd,edh->bech", middle, experts))
        enough()
        return h + each.reshape(4, 3, WIDTH)


class Looking(Block):
    """What is kept is a view, of what nobody computes again: one head is left of several, and repeating it moves
    nothing."""

    def forward(self, h: Tensor) -> Tensor:
        up = skip(lambda: h @ self.w["up"])
        heads = keep(lambda: up[:, None].reshape(4, 3, WIDTH))
        return torch.tanh(heads) @ self.w["down"]


def made(kind: type[Block]) -> tuple[Block, Tensor]:
    """A block with weights, and an input."""
    generator = torch.Generator().manual_seed(0)
    block = kind("block")
    block.w = {
        name: torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
        for name in ("up", "down")
    }
    return block, torch.randn(4, 3, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()


def gradients(
    block: Block, h: Tensor, call: Callable[..., Tensor], **options: Any
) -> tuple[list[Tensor], Counter[str]]:
    """Gradients of input and weights, and how often each kernel ran in the backward."""
    loss = call(block, h).square().sum()
    seen: Counter[str] = Counter()
    with Watch(lambda func, args, kwargs, result: seen.update([func._schema.name.removeprefix("aten::")])):
        found = torch.autograd.grad(loss, [h, *block.w.values()], **options)
    return list(found), seen


def plainly(block: Block, h: Tensor) -> Tensor:
    """The block itself."""
    result: Tensor = block(h)
    return result


@pytest.mark.parametrize(("kind", "products"), [(Plain, 1), (Keeping, 0), (Skipping, 0)])
def test_gradients_are_the_same_and_only_what_is_not_kept_runs_again(kind: type[Block], products: int) -> None:
    wanted, before = gradients(*made(Plain), plainly)
    found, after = gradients(*made(kind), remat)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert after["mm"] - before["mm"] == products  # the last product is not run: what it saves are its operands
    assert after["native_layer_norm"] == 1 and after["tanh"] == 1


def test_copies_that_are_saved_instead_of_operands_are_made_again() -> None:
    wanted, _ = gradients(*made(Ordering), plainly)
    found, seen = gradients(*made(Ordering), remat)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)) and seen["clone"] >= 1


def test_views_are_not_kept() -> None:
    with pytest.raises(RunError, match="gave a view, which is not stored"):
        remat(*made(Looking))


@pytest.mark.parametrize("kind", [Plain, Keeping, Skipping, Ordering])
def test_a_graph_that_is_kept_can_be_gone_through_again(kind: type[Block]) -> None:
    block, h = made(kind)
    loss = remat(block, h).square().sum()
    first, second = (torch.autograd.grad(loss, [h, *block.w.values()], retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def stored() -> int:
    """Bytes that kept results hold, of all calls that are alive."""
    return sum(t.untyped_storage().nbytes() for t in taped())


@pytest.mark.parametrize(("kind", "tensors"), [(Plain, 0), (Keeping, 1), (Skipping, 1)])
def test_results_are_stored_once_and_freed_with_the_graph(kind: type[Block], tensors: int) -> None:
    gc.freeze()  # what other tests left is not looked at
    try:
        block, h = made(kind)
        loss = remat(block, h).square().sum()
        assert stored() == tensors * h.nbytes
        loss.backward()
        del loss
        gc.collect()
        assert stored() == 0
    finally:
        gc.unfreeze()


class _Stateful(Block):
    """A block whose result depends on a buffer that it changes, and on random numbers."""

    MUTATES = ("mean",)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        shifted = dropout(h - self.b["mean"], 0.5, "R", key="drop", mesh=MESH)
        return torch.tanh(shifted @ self.w["up"]).square() @ self.w["down"], self.b[
            "mean"
        ] * 0.9 + 0.1 * h.detach().mean()


def _two_steps(call: Callable[..., Any]) -> list[Tensor]:
    """Two forwards, each of which changes the buffer, and then the backwards, the first one first (as microbatches in a
    pipeline)."""
    block, h = made(_Stateful)
    block.b = {"mean": torch.ones((), dtype=torch.float64)}
    state = rng.Rng(3)
    with rng.using(state):
        results = []
        for _ in range(2):
            result, mean = call(block, h)
            block.b["mean"].copy_(mean)
            results.append(result)
    found = [torch.autograd.grad(result.square().sum(), [h, *block.w.values()]) for result in results]
    return [*(g for grads in found for g in grads), block.b["mean"]]


def test_the_second_run_sees_the_random_numbers_and_buffers_of_the_first() -> None:
    wanted, found = _two_steps(lambda block, h: block(h)), _two_steps(remat)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("what", ["copy", "MUTATES"])
def test_forgetting_either_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "copy":
        monkeypatch.setattr(rng.Rng, "copy", lambda self: self)
    wanted = _two_steps(lambda block, h: block(h))
    if what == "MUTATES":
        monkeypatch.setattr(_Stateful, "MUTATES", ())
        with pytest.raises(RunError, match=r"block\.mean was modified between the forward and the backward"):
            _two_steps(remat)
        return
    assert not all(torch.equal(a, b) for a, b in zip(wanted, _two_steps(remat), strict=True))


def test_a_weight_that_was_changed_in_between_is_an_error() -> None:
    block, h = made(Plain)
    loss = remat(block, h).square().sum()
    with torch.no_grad():
        block.w["down"].mul_(2)
    with pytest.raises(
        RunError, match=r"block\.down was modified between the forward and the backward of a block that is run again"
    ):
        loss.backward()


def test_without_gradients_nothing_is_remembered() -> None:
    block, h = made(Keeping)
    with torch.no_grad():
        out = remat(block, h)
    assert torch.equal(out, block(h)) and not out.requires_grad
    alive = weakref.ref(remat(block, h))
    assert alive() is None


@pytest.mark.parametrize("kind", [Plain, Keeping])
def test_compiled_blocks_are_run_again_whole(kind: type[Block]) -> None:
    wanted, _ = gradients(*made(Plain), plainly)
    block, h = made(kind)
    block.compile(backend="aot_eager")
    found, _ = gradients(block, h, remat)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
