"""Convolutions and pools of cut images on real ranks against the whole, in float64, gradients too, and what they
send."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.errors import RunError
from autopar.layout import chunk
from autopar.rules import RULES
from autopar.rules.algorithms import ALGORITHMS
from autopar.rules.halo import paddings, window
from autopar.rules.language import Call, Tensor
from autopar.rules.oracle import call_of
from autopar.rules.site import Site
from autopar.runtime import Mesh, count
from autopar.runtime.algorithms import halo
from autopar.runtime.cuts import own
from autopar.window_rows import Window
from tests.helpers.ranks import on_ranks

aten = torch.ops.aten
CLOSE = 1e-12


def _compare(sizes, target, args, dims, *, image_grad=True):
    """`target` with dim `dims[a]` of its first argument cut on axis a; the sends, as (axis, bytes), None where a rank
    has no output."""
    mesh = Mesh(sizes, tuple("xyz"[: len(sizes)]), "cpu")
    torch.manual_seed(0)
    whole = [
        torch.randn(a, dtype=torch.float64, requires_grad=image_grad or i > 0) if isinstance(a, tuple) else a
        for i, a in enumerate(args)
    ]
    wanted = target(*whole)
    if any(
        chunk(wanted.shape[d], n, rank) == (wanted.shape[d],) * 2
        for d, n in zip(dims, sizes, strict=True)
        for rank in range(n)
    ):
        return None  # a rank without outputs: no option, and refused
    pull = torch.randn_like(wanted)
    wanted.backward(pull)
    call, layout = call_of(target, whole, {}), tuple(f"S{d}" for d in dims)
    parts = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in whole]
    image = parts[0] = own(parts[0].detach(), layout, sizes, mesh.coord).contiguous().requires_grad_(image_grad)
    with count() as seen:
        for axis, dim in enumerate(dims):
            read = window(call, dim)
            fill = float("-inf") if "max" in str(target) else 0.0
            parts[0] = halo(
                parts[0],
                dim=dim,
                axis=axis,
                size=whole[0].shape[dim],
                outs=wanted.shape[dim],
                reach=read.reach,
                stride=read.stride,
                padding=read.padding,
                fill=fill,
                mesh=mesh,
            )
        at = [a.name for a in target._schema.arguments].index("padding")
        got = target(*parts[:at], paddings(call, dims), *parts[at + 1 :])
        got.backward(own(pull, layout, sizes, mesh.coord))
    torch.testing.assert_close(got, own(wanted, layout, sizes, mesh.coord), rtol=CLOSE, atol=CLOSE)
    if image_grad:
        torch.testing.assert_close(image.grad, own(whole[0].grad, layout, sizes, mesh.coord), rtol=CLOSE, atol=CLOSE)
    for part, full in zip(parts[1:], whole[1:], strict=True):
        if isinstance(part, torch.Tensor):
            torch.distributed.all_reduce(part.grad)
            torch.testing.assert_close(part.grad, full.grad, rtol=CLOSE, atol=CLOSE)
    return [(item.axis, item.bytes) for item in seen if item.kind == "send"]


def _outs(size, kernel, stride, padding, dilation):
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _convolutions(ways, lengths):
    ran = 0
    for size, kernel, stride, dilation, padded in itertools.product(
        lengths, (1, 3, 5, 7), (1, 2), (1, 2), (False, True)
    ):
        padding = dilation * (kernel - 1) // 2 if padded else 0
        if _outs(size, kernel, stride, padding, dilation) < 1:
            continue
        ran += None is not _compare(
            (ways,), aten.conv1d.default, [(2, 3, size), (4, 3, kernel), (4,), [stride], [padding], [dilation]], (2,)
        )
        if size == 13:
            _compare(
                (ways,),
                aten.conv2d.default,
                [(2, 3, 5, size), (4, 3, 3, kernel), (4,), [1, stride], [1, padding], [1, dilation]],
                (3,),
            )
            _compare(
                (ways,),
                aten.conv2d.default,
                [(4, size, 6), (6, 2, kernel, 2), None, [stride, 2], [padding, 0], [dilation, 1], 2],
                (1,),
            )
    return ran


def _pools(ways):
    ran = 0
    for size, kernel, stride, ceil in itertools.product((12, 13, 19), (2, 3), (1, 2, 3), (False, True)):
        for padding in (0, 1):
            ran += None is not _compare(
                (ways,),
                aten.max_pool2d.default,
                [(2, 3, size, 6), [kernel, 2], [stride, 2], [padding, 1], [1, 1], ceil],
                (2,),
            )
            if not ceil:
                _compare(
                    (ways,),
                    aten.avg_pool2d.default,
                    [(2, 3, size, 6), [kernel, 2], [stride, 2], [padding, 1], ceil, True],
                    (2,),
                )
        _compare((ways,), aten.avg_pool1d.default, [(2, 3, size), [kernel], [stride], [0], False, False], (2,))
    _compare((ways,), aten.max_pool1d.default, [(3, 17), [3], [1], [1], [2]], (1,))
    _compare((ways,), aten.avg_pool2d.default, [(2, 3, 12, 6), [3, 3], [1, 1], [1, 1], False, False, 5], (2,))
    return ran


def _two_dims(*sizes):
    """Both dims of the images cut: corners come from the rank across."""
    for kernel, stride, shape in itertools.product((1, 3, 5), (1, 2), ((12, 16), (13, 11))):
        padding = kernel // 2
        _compare(
            sizes,
            aten.conv2d.default,
            [(2, 3, *shape), (4, 3, kernel, kernel), (4,), [stride] * 2, [padding] * 2, [1, 1]],
            (2, 3),
        )
        _compare(sizes, aten.max_pool2d.default, [(2, 3, *shape), [3, 3], [stride] * 2, [1, 1], [1, 1], True], (3, 2))


@pytest.mark.parametrize("lengths", [(13,), pytest.param((12, 17, 24), marks=pytest.mark.slow)])
@pytest.mark.parametrize("ways", [1, 2, 3, 4])
def test_a_convolution_of_a_cut_signal_or_image_is_that_of_the_whole(ways, lengths):
    assert min(on_ranks(ways, _convolutions, ways, lengths)) >= 15 * len(lengths)


@pytest.mark.parametrize("ways", [2, 3, 4])
def test_a_pool_of_a_cut_image_is_that_of_the_whole(ways):
    assert min(on_ranks(ways, _pools, ways)) > 40


def test_both_dims_of_an_image_may_be_cut():
    on_ranks(4, _two_dims, 2, 2)


def _sends(ways, args, image_grad):
    return _compare((ways,), aten.conv2d.default, args, (2,), image_grad=image_grad)


@pytest.mark.parametrize(
    ("ways", "kernel", "stride", "padding", "rows"),
    [
        (2, 3, 1, 1, 1),
        (4, 3, 1, 1, 2),
        (4, 7, 2, 3, 5),
        (4, 7, 1, 3, 6),
        (4, 1, 1, 0, 0),
        (4, 2, 2, 0, 0),
        (3, 3, 2, 1, 1),
    ],
)
def test_ranks_send_the_rows_that_windows_read_and_their_gradients_back(ways, kernel, stride, padding, rows):
    """Of 24 rows, stride 1 and 3 of the kernel: one row up and one down; the input has no gradient, nothing goes
    back."""
    args = [(2, 3, 24, 6), (4, 3, kernel, 3), None, [stride, 1], [padding, 1]]
    for image_grad in (True, False):
        for seen in on_ranks(ways, _sends, ways, args, image_grad):
            assert seen == [(0, rows * 2 * 3 * 6 * 8)] * (0 if not rows else 2 if image_grad else 1)


def _priced(sizes, args, dims, image_grad):
    """The sends that the rule prices, forward and backward, as (axis, bytes)."""
    image, weight = (Tensor(shape, grad, (), True, 8) for shape, grad in zip(args[:2], (image_grad, True), strict=True))
    out = Tensor((image.shape[0], weight.shape[0], *image.shape[2:]), True, (), True, 8)
    call = Call(aten.conv2d.default, (image, weight, *args[2:]), {}, (out,))
    options = [
        option
        for dim, ways in zip(dims, sizes, strict=True)
        for option in RULES[call.target].options(call, ways)
        if option.run == "halo" and option.ins[0].value == f"S{dim}"
    ]
    sites = [Site(call.ins, options, sizes, axis, call) for axis in range(len(sizes))]
    inner = ALGORITHMS["halo"].inner(training=True)
    return [(site.axis, each.nbytes(site)) for site in sites for each in inner for _ in range(each.times(site))]


def _sent(sizes, args, dims, image_grad):
    return _compare(sizes, aten.conv2d.default, args, dims, image_grad=image_grad)


@pytest.mark.parametrize("image_grad", [True, False])
@pytest.mark.parametrize("dims", [(2, 3), (3, 2)])
@pytest.mark.parametrize("kernel", [3, 1])
def test_halos_of_both_dims_send_what_is_priced(dims, kernel, image_grad):
    """The second axis sends the corners, which the first one brought, too."""
    pads = [kernel // 2, kernel // 2]
    args = [(2, 3, 8, 12), (4, 3, kernel, kernel), None, [1, 1], pads]
    wanted = sorted(_priced((2, 2), args, dims, image_grad))
    assert len(wanted) == (0 if kernel == 1 else 4 if image_grad else 2)
    for seen in on_ranks(4, _sent, (2, 2), args, dims, image_grad):
        assert sorted(seen) == wanted


@pytest.mark.parametrize("ways", [1, 2, 3, 4, 5])
def test_windows_by_enumeration(ways):
    """What each rank reads, needs and shares, against every row of every output."""
    for size, kernel, stride, dilation, padding in itertools.product(
        (5, 12, 17), (1, 2, 3, 5), (1, 2, 3), (1, 2), (0, 1, 2)
    ):
        reach = dilation * (kernel - 1) + 1
        outs = _outs(size, kernel, stride, padding, dilation)
        window = Window(size, outs, reach, stride, padding)
        if outs < ways:
            continue
        rows = [
            {o * stride - padding + i for o in range(*chunk(outs, ways, rank)) for i in range(reach)}
            for rank in range(ways)
        ]
        if any(not r for r in rows):
            continue
        bounds = [(min(r), max(r) + 1) for r in rows]
        assert bounds == [window.reads(ways, rank) for rank in range(ways)]
        inside = [set(range(lo, hi)) & set(range(size)) for lo, hi in bounds]
        held = [set(range(*chunk(size, ways, rank))) for rank in range(ways)]
        assert inside == [set(range(*window.needs(ways, rank))) for rank in range(ways)]
        for rank, (lo, hi) in enumerate(bounds):
            before, behind = window.pads(ways, rank)
            assert before + len(inside[rank]) + behind == hi - lo and before == len([r for r in range(lo, hi) if r < 0])
            assert [set(range(*window.shared(ways, peer, rank))) for peer in range(ways)] == [
                inside[rank] & h for h in held
            ]
        sent = [[len(inside[to] & held[at]) if at != to else 0 for to in range(ways)] for at in range(ways)]
        assert window.most_sent(ways) == max(map(sum, sent)) and window.most_received(ways) == max(
            map(sum, zip(*sent, strict=True))
        )
        assert window.borders_only(ways) == all(
            not n for at, row in enumerate(sent) for to, n in enumerate(row) if abs(at - to) > 1
        )


def _wrong():
    mesh = Mesh((2,), ("x",), "cpu")
    with pytest.raises(RunError, match="has 4 rows along dim 2, wanted 3"):
        halo(torch.randn(1, 2, 4, 8), dim=2, axis=0, size=6, outs=6, reach=3, padding=1, mesh=mesh)
    if mesh.coord[0] == 1:
        with pytest.raises(RunError, match="rank 1 of 2 has none of 1 outputs"):
            halo(torch.randn(1, 2, 3, 8), dim=2, axis=0, size=6, outs=1, reach=6, mesh=mesh)


def test_wrong_rows_and_ranks_without_outputs_are_refused():
    on_ranks(2, _wrong)
