"""Split algorithms on real ranks against the plain operator, in float64, gradients too."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from autopar.runtime import Mesh, count
from autopar.runtime.algorithms import (
    causal_rows,
    dropout,
    own_heads,
    placed,
    vocab_bag,
    vocab_cross_entropy_sum,
    vocab_embedding,
)
from autopar.runtime.collectives import all_reduce
from autopar.runtime.cuts import own
from autopar.runtime.rng import Rng, using
from passes import ops
from tests.helpers.ranks import on_ranks

MESHES = [(2,), (4,), (2, 2)]
SIZES = [257, 3, 1]  # uneven, and with empty shards


def _mesh(sizes):
    return Mesh(sizes, ("x", "y")[: len(sizes)], "cpu")


def _sum(x, mesh):
    for axis in range(len(mesh.sizes)):
        x = all_reduce(x, axis, mesh)
    return x


def _cut(x, dim, mesh):
    return own(x, (f"S{dim}",) * len(mesh.sizes), mesh.sizes, mesh.coord).contiguous()


def _close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)


def _embedding(sizes, vocab, padding):
    mesh, axes = _mesh(sizes), tuple(range(len(sizes)))
    torch.manual_seed(0)
    table, ids = torch.randn(vocab, 6, dtype=torch.float64), torch.randint(0, vocab, (3, 9))
    pull = torch.randn(3, 9, 6, dtype=torch.float64)
    whole, part = table.clone().requires_grad_(), _cut(table, 0, mesh).requires_grad_()
    wanted = F.embedding(ids, whole, padding_idx=padding if padding >= 0 else None)
    wanted.backward(pull)
    got = vocab_embedding(ids, part, padding, vocab=vocab, axes=axes, mesh=mesh)
    got.backward(pull)
    _close(_sum(got.detach(), mesh), wanted.detach())
    _close(part.grad, _cut(whole.grad, 0, mesh))


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("padding", [-1, 0])
def test_vocab_embedding(sizes, vocab, padding):
    on_ranks(math.prod(sizes), _embedding, sizes, vocab, padding)


def _no_row(ids):
    mesh, table = _mesh((2,)), torch.arange(14.0).view(7, 2)
    start, stop = mesh.span(7, (0,))
    return _sum(vocab_embedding(torch.tensor(ids), table[start:stop], vocab=7, axes=(0,), mesh=mesh), mesh).tolist()


def test_vocab_embedding_of_no_row_is_no_number():
    """One device raises an error. Positions of a sequence that is longer than their table would all have had the same
    value, zero."""
    nothing = [math.nan] * 2
    for found in on_ranks(2, _no_row, [0, 7, 6, -1]):
        assert found == [pytest.approx(row, nan_ok=True) for row in ([0.0, 1.0], nothing, [12.0, 13.0], nothing)]


def _bag(sizes, vocab, mode, gated, padding):
    mesh, axes = _mesh(sizes), tuple(range(len(sizes)))
    torch.manual_seed(0)
    table, chosen = torch.randn(vocab, 6, dtype=torch.float64), torch.randint(0, vocab, (3, 4, 5))
    gates, pull = torch.rand(3, 4, 5, dtype=torch.float64) if gated else None, torch.randn(3, 4, 6, dtype=torch.float64)
    whole, part = table.clone().requires_grad_(), _cut(table, 0, mesh).requires_grad_()
    theirs, mine = [gates.clone().requires_grad_() if gated else None for _ in range(2)]
    wanted, got = (
        ops.bag(whole, chosen, theirs, mode, padding),
        vocab_bag(part, chosen, mine, mode, padding, vocab=vocab, axes=axes, mesh=mesh),
    )
    wanted.backward(pull)
    got.backward(pull)
    _close(_sum(got.detach(), mesh), wanted.detach())
    _close(part.grad, _cut(whole.grad, 0, mesh))
    if gated:
        _close(_sum(mine.grad, mesh), theirs.grad)


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize(("mode", "gated", "padding"), [("sum", True, -1), ("sum", False, 0), ("mean", False, 0)])
def test_vocab_bag(sizes, mode, gated, padding):
    for vocab in SIZES:
        on_ranks(math.prod(sizes), _bag, sizes, vocab, mode, gated, padding)


def _bags_of_no_row(chosen, mode):
    mesh, table = _mesh((2,)), torch.arange(14.0).view(7, 2)
    start, stop = mesh.span(7, (0,))
    bags = vocab_bag(table[start:stop], torch.tensor(chosen), None, mode, vocab=7, axes=(0,), mesh=mesh)
    return _sum(bags, mesh).tolist()


@pytest.mark.parametrize(("mode", "row"), [("sum", [12.0, 14.0]), ("mean", [6.0, 7.0])])
def test_vocab_bag_with_what_is_no_row_is_no_number(mode, row):
    """One device raises an error, also for -1 where no row is padding."""
    nothing = [math.nan] * 2
    for found in on_ranks(2, _bags_of_no_row, [[0, 6], [7, 6], [-1, 0]], mode):
        assert found == [pytest.approx(bag, nan_ok=True) for bag in (row, nothing, nothing)]


def _cross_entropy(sizes, vocab, smoothing, scale):
    mesh, axes = _mesh(sizes), tuple(range(len(sizes)))
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 5, vocab, dtype=torch.float64) * scale, torch.randint(0, vocab, (4, 5))
    labels[1], labels[2, 2:] = -100, -100
    whole, part = logits.clone().requires_grad_(), _cut(logits, 2, mesh).requires_grad_()
    wanted = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=smoothing)
    (wanted * 0.7).backward()
    with count() as seen:
        got = vocab_cross_entropy_sum(part, labels, -100, smoothing, vocab=vocab, axes=axes, mesh=mesh)
        (got * 0.7).backward()
    torch.testing.assert_close(_sum(got.detach(), mesh), wanted.detach(), rtol=1e-13, atol=1e-11)
    _close(part.grad, _cut(whole.grad, 2, mesh))
    assert [(c.kind, c.axis, c.bytes) for c in seen] == [("all_reduce", a, 4 * 5 * 8) for a in reversed(axes)] * 2


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("vocab", SIZES)
def test_vocab_cross_entropy(sizes, vocab):
    on_ranks(math.prod(sizes), _cross_entropies, sizes, vocab)


def _cross_entropies(sizes, vocab):
    for smoothing in (0.0, 0.1):
        for scale in (1.0, 300.0):  # large logits overflow where the maximum is not taken out
            _cross_entropy(sizes, vocab, smoothing, scale)


def _nothing_valid():
    mesh = _mesh((2,))
    part = torch.randn(3, 4, requires_grad=True)
    vocab_cross_entropy_sum(part, torch.full((3,), 7), 7, vocab=8, axes=(0,), mesh=mesh).backward()
    assert torch.count_nonzero(part.grad) == 0


def test_vocab_cross_entropy_of_nothing_is_zero():
    on_ranks(2, _nothing_valid)


def _no_class(label):
    mesh = _mesh((2,))
    logits, labels = torch.zeros(3, 4), torch.tensor([0, label, -100])
    loss = vocab_cross_entropy_sum(logits, labels, -100, vocab=8, axes=(0,), mesh=mesh)
    return float(_sum(loss, mesh))


@pytest.mark.parametrize(("label", "wanted"), [(-1, math.nan), (8, math.nan), (7, 2 * math.log(8))])
def test_vocab_cross_entropy_of_what_is_no_class_is_no_number(label, wanted):
    """One device raises an error. Labels that are padded with another number than is ignored would have a loss that
    nobody wants to go down."""
    assert on_ranks(2, _no_class, label) == pytest.approx([wanted] * 2, nan_ok=True)


def _causal(sizes, length, keys, kv_heads):
    mesh, axes = _mesh(sizes), tuple(range(len(sizes)))
    torch.manual_seed(0)
    shapes = ((2, 4, length, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8))
    whole = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    pull = torch.randn(shapes[0], dtype=torch.float64)
    wanted = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=kv_heads < 4, scale=0.3)
    wanted.backward(pull)
    q = _cut(whole[0].detach(), 2, mesh).requires_grad_()
    k, v = (t.detach().clone().requires_grad_() for t in whole[1:])
    got = causal_rows(q, k, v, rows=length, axes=axes, mesh=mesh, scale=0.3, enable_gqa=kv_heads < 4)
    got.backward(_cut(pull, 2, mesh))
    _close(got.detach(), _cut(wanted.detach(), 2, mesh))
    _close(q.grad, _cut(whole[0].grad, 2, mesh))
    for part, full in ((k, whole[1]), (v, whole[2])):
        _close(_sum(part.grad, mesh), full.grad)


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize(("length", "keys"), [(8, 8), (10, 10), (3, 3), (4, 9), (9, 4)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_causal_rows(sizes, length, keys, kv_heads):
    on_ranks(math.prod(sizes), _causal, sizes, length, keys, kv_heads)


def _own_heads(sizes, heads, groups, within):
    mesh, axes = _mesh(sizes), tuple(range(len(sizes)))
    torch.manual_seed(0)
    shapes = ((2, heads, 5, 8), (2, groups, 5, 8), (2, groups, 5, 8))
    whole = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    pull = torch.randn(shapes[0], dtype=torch.float64)
    wanted = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    wanted.backward(pull)
    lies = tuple("S1" if axis in within else "R" for axis in axes)
    q = _cut(whole[0].detach(), 1, mesh).requires_grad_()
    k, v = (own(t.detach(), lies, mesh.sizes, mesh.coord).clone().requires_grad_() for t in whole[1:])
    taken = [own_heads(t, heads=heads, groups=groups, axes=axes, within=within, mesh=mesh) for t in (k, v)]
    got = F.scaled_dot_product_attention(q, *taken, is_causal=True, enable_gqa=True)
    got.backward(_cut(pull, 1, mesh))
    _close(got.detach(), _cut(wanted.detach(), 1, mesh))
    _close(q.grad, _cut(whole[0].grad, 1, mesh))
    for part, full in ((k, whole[1]), (v, whole[2])):
        total = part.grad
        for axis in set(axes) - set(within):
            total = all_reduce(total, axis, mesh)
        _close(total, own(full.grad, lies, mesh.sizes, mesh.coord))
    return taken[0].shape[1], taken[0].untyped_storage().data_ptr() == k.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("sizes", "heads", "groups", "within", "taken"),
    [
        # a part of a group, whole groups
        ((2,), 8, 2, (), 1),
        ((4,), 8, 2, (), 1),
        ((4,), 8, 1, (), 1),
        ((2,), 12, 4, (), 2),
        ((2, 2), 8, 2, (), 1),
        ((2, 2), 8, 2, (0,), 1),
        ((2, 2), 16, 8, (0,), 2),
        ((3,), 6, 2, (), None),
        ((2,), 10, 2, (), 1),
        ((2,), 9, 3, (), None),
        ((2,), 5, 1, (), 1),
        ((2, 2), 12, 4, (0,), 1),
    ],
)
def test_own_heads(sizes, heads, groups, within, taken):
    """The heads that a rank takes are a view of what it holds, except where a chunk of queries ends inside a group and
    has others."""
    found = on_ranks(math.prod(sizes), _own_heads, sizes, heads, groups, within)
    assert taken is None or found == [(taken, True)] * len(found)


def _dropouts(seed):
    mesh, rng = _mesh((2, 2)), Rng(seed)
    found = []
    with using(rng):
        for _ in range(2):
            rng.advance()
            for key in ("a", "a", "b"):
                x = torch.ones(64, requires_grad=True)
                y = dropout(x, 0.25, "S0,R", key=key, mesh=mesh)
                y.sum().backward()
                assert torch.equal(x.grad, y.detach())
                found.append(tuple(y.tolist()))
    return found


def test_dropout_agrees_on_replicas_differs_on_shards_calls_and_steps_and_is_reproducible():
    first, again, other = (on_ranks(4, _dropouts, seed) for seed in (1, 1, 2))
    assert first == again
    assert first[0] == first[1] and first[2] == first[3]
    masks = [mask for rank in (0, 2) for mask in first[rank]] + [mask for rank in (0, 2) for mask in other[rank]]
    assert len(set(masks)) == len(masks) == 24
    values = torch.tensor(masks)
    assert values.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert 0.2 < (values == 0).double().mean() < 0.3


def _complex_elsewhere():
    mesh = _mesh((2,))
    angle = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    turned = placed(
        0, 1, lambda: torch.polar(torch.ones_like(angle), angle), (angle,), (torch.complex128, (2,)), mesh=mesh
    )
    (turned.real.sum() + turned.imag.sum()).backward()
    return angle.grad.tolist()


def test_complex_numbers_that_are_placed_have_gradients_on_every_rank():
    """A rank without one would not run the collectives that sum them up."""
    nothing, own = on_ranks(2, _complex_elsewhere)
    assert nothing == [0.0, 0.0] and own == [pytest.approx(math.cos(x) - math.sin(x)) for x in (1.0, 2.0)]
