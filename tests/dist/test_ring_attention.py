"""Ring attention on real ranks against the plain operator, in float64, gradients too, and what it sends."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from autopar.errors import RunError
from autopar.rules import RULES
from autopar.rules.algorithms import ALGORITHMS
from autopar.rules.language import Call, Tensor
from autopar.rules.site import Site
from autopar.runtime import Mesh, count
from autopar.runtime.algorithms import ring_attention
from autopar.runtime.algorithms.ring_order import Order, dims_in_memory
from autopar.runtime.cuts import own
from tests.helpers.peak import allocations
from tests.helpers.ranks import on_ranks

WIDTHS = (8, 10, 3, 12, 24)  # over 2, 3 and 4 ranks: in halves, even, uneven, with an empty shard


def _mesh(ways):
    return Mesh((ways,), ("x",), "cpu")


def _cut(x, mesh):
    return own(x, (f"S{x.dim() - 2}",), mesh.sizes, mesh.coord).contiguous()


def _compare(
    ways,
    rows,
    *,
    lead=(2,),
    heads=4,
    groups=4,
    width=8,
    mask=None,
    causal=False,
    scale=None,
    dtype=torch.float64,
    close=1e-12,
):
    mesh = _mesh(ways)
    torch.manual_seed(rows)
    shapes = ((*lead, heads, rows, 8), (*lead, groups, rows, 8), (*lead, groups, rows, width))
    whole = [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]
    pull = torch.randn((*lead, heads, rows, width), dtype=dtype)
    masks = [] if mask is None else [_mask(mask, rows)]
    wanted = F.scaled_dot_product_attention(*whole, *masks, is_causal=causal, enable_gqa=groups < heads, scale=scale)
    wanted.backward(pull)
    parts = [_cut(x.detach(), mesh).requires_grad_() for x in whole]
    cut = [_cut(m.detach(), mesh) if m.shape[-2] > 1 else m.detach() for m in masks]
    cut = [m.requires_grad_(m.is_floating_point()) for m in cut]
    with count() as seen:
        got = ring_attention(
            *parts, *cut, rows=rows, axes=(0,), mesh=mesh, is_causal=causal, enable_gqa=groups < heads, scale=scale
        )
        got.backward(_cut(pull, mesh))
    pairs = [(got.detach(), wanted.detach()), *((part.grad, x.grad) for part, x in zip(parts, whole, strict=True))]
    for found, full in pairs:
        torch.testing.assert_close(found, _cut(full, mesh), rtol=close, atol=close)
    for m, part in zip(masks, cut, strict=True):
        if m.requires_grad and m.shape[-2] > 1:
            torch.testing.assert_close(part.grad, _cut(m.grad, mesh), rtol=close, atol=close)
    return [(c.kind, c.bytes) for c in seen]


def _mask(kind, rows):
    if kind == "columns":  # one row for all, as a padding mask
        return torch.arange(rows).unsqueeze(0) < max(1, rows - 2)
    if kind == "hidden rows":
        return torch.rand(4, rows, rows) > torch.linspace(0, 1.0, rows).unsqueeze(-1)
    if kind == "rows":  # one column for all
        return torch.randn(rows, 1, dtype=torch.float64, requires_grad=True)
    return torch.randn(1, 4, rows, rows, dtype=torch.float64, requires_grad=True)


def _cases(ways):
    for rows, causal, groups in itertools.product(WIDTHS, (True, False), (4, 2, 1)):
        _compare(ways, rows, causal=causal, groups=groups)
    for rows, kind in itertools.product((8, 10, 3), ("columns", "hidden rows", "rows", "bias")):
        _compare(ways, rows, mask=kind)
    _compare(ways, 8, mask="bias", groups=2)
    for rows, causal in itertools.product((8, 10), (True, False)):
        _compare(ways, rows, causal=causal, width=5, scale=0.3)  # values of another width: the plain form
        _compare(ways, rows, causal=causal, lead=(), scale=0.3)
        _compare(ways, rows, causal=causal, lead=(2, 3), groups=2)
        _compare(ways, rows, causal=causal, dtype=torch.float32, close=1e-5)
        _compare(ways, rows, causal=causal, dtype=torch.bfloat16, close=6e-2)


@pytest.mark.parametrize("ways", [1, 2, 3, 4])
def test_ring_attention_is_attention(ways):
    on_ranks(ways, _cases, ways)


def _sends(ways, rows, causal):
    return _compare(ways, rows, causal=causal, groups=2)


@pytest.mark.parametrize(
    ("ways", "rows", "causal"), [(2, 8, False), (3, 12, False), (3, 12, True), (4, 24, True), (4, 12, True)]
)
def test_what_a_ring_sends(ways, rows, causal):
    halves = causal and rows % (2 * ways) == 0
    q, kv = 2 * 4 * (rows // ways) * 8 * 8, 2 * 2 * (2 * (rows // ways) * 8) * 8
    wanted = ["send"] * (ways - 1) + ["send"] * (2 * ways - 1) + ["send"] * (4 if halves else 0)
    for seen in on_ranks(ways, _sends, ways, rows, causal):
        assert [kind for kind, _ in seen] == wanted
        assert sum(nbytes for _, nbytes in seen) == (3 * ways - 2) * kv + (
            (q + kv) + q + 2 * q + (q + kv) if halves else 0
        )


def _priced(ways, rows, causal, groups, width, dtype):
    """The sends that the rule prices, forward and backward, as (kind, bytes); rows are in halves, or in even chunks."""
    shapes = ((2, 4, rows, 8), (2, groups, rows, 8), (2, groups, rows, width), (2, 4, rows, width))
    *ins, out = (Tensor(shape, True, (), True, dtype.itemsize) for shape in shapes)
    target = torch.ops.aten.scaled_dot_product_attention.default
    call = Call(target, tuple(ins), {"is_causal": causal, "enable_gqa": groups < 4}, (out,))
    (option,) = (option for option in RULES[target].options(call, ways) if option.run == "ring")
    site = Site(call.ins, (option,), (ways,), call=call)
    inner = ALGORITHMS["ring"].inner(training=True)
    return [(each.kind, each.nbytes(site)) for each in inner for _ in range(each.times(site))]


def _sent(ways, *args):
    rows, causal, groups, width, dtype = args
    close = 1e-12 if dtype is torch.float64 else 6e-2
    return _compare(ways, rows, causal=causal, groups=groups, width=width, dtype=dtype, close=close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "causal", "groups", "width"), [(12, True, 2, 5), (12, False, 4, 8), (9, True, 1, 8)])
@pytest.mark.parametrize("ways", [1, 3])
def test_a_ring_sends_what_is_priced(ways, rows, causal, groups, width, dtype):
    """Values of another width than keys, one head for all; gradients of bfloat16 go round in float32."""
    wanted = sorted(_priced(ways, rows, causal, groups, width, dtype))
    for seen in on_ranks(ways, _sent, ways, rows, causal, groups, width, dtype):
        assert sorted(seen) == wanted


def _local(length, heads, width, dtype):
    """As models have it: [b, h, l, d] with the memory of [b, l, h, d]."""
    return torch.randn(4, length, heads, width, dtype=dtype).transpose(1, 2).requires_grad_()


def _taken(ways, causal, groups, width, masked, dtype):
    """Bytes that a forward and a backward take on this rank at most, and whether results and gradients lie in memory as
    queries and operands do."""
    mesh, length = _mesh(ways), 64
    parts = [_local(length, heads, size, dtype) for heads, size in ((8, 32), (groups, 32), (groups, width))]
    mask = [torch.ones(length * ways, length * ways, dtype=torch.bool)[:length]] * masked
    pull, made, found = _local(length, 8, width, dtype).detach(), [], []

    def forward():
        made.append(
            ring_attention(
                *parts, *mask, rows=length * ways, axes=(0,), mesh=mesh, is_causal=causal, enable_gqa=groups < 8
            )
        )

    for _ in range(3):  # what gloo has of the time before goes when its threads wake
        made.clear()
        found.append(
            (
                max(allocations(forward)),
                max(allocations(lambda: made.append(torch.autograd.grad(made[0], parts, pull)))),
            )
        )
    result, gradients = made
    lie = [dims_in_memory(x) == (0, 2, 1, 3) for x in (result.detach(), *(gradients if causal else gradients[:1]))]
    return *(min(each) for each in zip(*found, strict=True)), all(lie)


@pytest.mark.parametrize(
    ("ways", "causal", "groups", "width", "masked", "dtype"),
    [
        (2, True, 8, 32, False, torch.float32),
        (2, True, 2, 32, False, torch.bfloat16),
        (3, True, 8, 32, False, torch.bfloat16),
        (3, False, 2, 32, False, torch.float32),
        (2, False, 8, 32, True, torch.float32),
        (2, True, 8, 16, False, torch.float32),
    ],
)
def test_what_a_ring_takes_is_counted(ways, causal, groups, width, masked, dtype):
    """And its results lie in memory as those of the fused kernels, so that joining heads is no copy."""
    seen = on_ranks(ways, _taken, ways, causal, groups, width, masked, dtype)
    rows = 64 * ways
    shapes = ((4, 8, rows, 32), (4, groups, rows, 32), (4, groups, rows, width), (4, 8, rows, width))
    *ins, out = (Tensor(shape, True, (), True, dtype.itemsize) for shape in shapes)
    target = torch.ops.aten.scaled_dot_product_attention.default
    operands = (*ins, *[Tensor((rows, rows), False, (), False, 1)] * masked)
    call = Call(target, operands, {"is_causal": causal, "enable_gqa": groups < 8}, (out,))
    option = next(option for option in RULES[target].options(call, ways) if option.run == "ring")
    site = Site(call.ins, (option,), (ways,), call=call)
    forward, backward = ALGORITHMS["ring"].takes
    given = site.local_bytes(0, 1, 2)
    result = out.itemsize * 4 * 8 * 64 * width
    assert forward(site) + result + given * causal == pytest.approx(max(each[0] for each in seen), rel=0.05)
    assert backward(site) + given == pytest.approx(max(each[1] for each in seen), rel=0.07)
    assert all(each[2] for each in seen)


@pytest.mark.parametrize("ways", [2, 3, 4, 5])
def test_halves_give_every_rank_the_same_work_and_chunks_do_not(ways):
    def pairs(rank, rows):
        order = Order(rows, 0, _Alone(ways, rank), causal=True)
        full = order.length(rank)
        tiles = [tile for source in range(ways) for tile in order.tiles(source)]
        return sum(len(range(full)[a]) * len(range(full)[b]) * (0.5 if causal else 1.0) for a, b, causal in tiles)

    balanced = {pairs(rank, 2 * ways * 3) for rank in range(ways)}
    assert balanced == {(6 * ways) ** 2 / 2 / ways}
    chunks = [pairs(rank, ways * 3) for rank in range(ways)]
    assert max(chunks) == chunks[-1] == 9 * (ways - 0.5)


class _Alone:
    """A mesh seen from one rank, without torch.distributed."""

    def __init__(self, ways, rank):
        self.sizes, self.coord = (ways,), (rank,)


def _wrong():
    mesh = _mesh(2)
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(RunError, match="wanted 3"):
        ring_attention(q, q, q, rows=6, axes=(0,), mesh=mesh)
    with pytest.raises(RunError, match="one mesh axis"):
        ring_attention(q, q, q, rows=8, axes=(0, 1), mesh=mesh)


def test_wrong_rows_and_axes_are_refused():
    on_ranks(2, _wrong)
