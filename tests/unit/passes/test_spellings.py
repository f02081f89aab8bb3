"""Operators that ATen has under several names have one behind `spellings`, and compute the same."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn import functional as F

from passes._torch import make_fx
from passes.composed import COMPOSITE, WRITTEN
from passes.saved import saved_positions
from tests.helpers.small_graphs import data, normalized
from tests.unit.passes.test_small import B, targets

aten = torch.ops.aten


def test_numbers_become_matrices():
    gm = normalized(lambda m, x, y: x * m.w.mean().reshape(1, 1) + x.sum().view(1, 1), data(4, 6))
    assert targets(gm).count("aten.reshape.default") == 2


@pytest.mark.parametrize("made", [lambda x: torch.empty(x.shape, dtype=x.dtype), lambda x: x.new_empty(x.shape)])
def test_what_is_not_filled_is_zeros(made):
    """Each microbatch makes its own part of these."""

    def function(m, x, y):
        halves = made(x)
        halves[:, :2], halves[:, 2:] = x[:, :2] @ m.w, x[:, 2:]
        return halves

    gm = normalized(function, data(4, 5, 6), dims={"x": {0: B}})
    assert "aten.zeros.default" in targets(gm) and "aten.empty.memory_format" not in targets(gm)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, y: x.tile(2, 1) @ m.w,
        lambda m, x, y: x[:, :1].tile((1, 1, 3)),
        lambda m, x, y: x.tile(2, 1, 1, 1),
        lambda m, x, y: torch.hstack([x, m.w[None].expand(x.shape[0], 6, 6)]),
        lambda m, x, y: torch.hstack([x.sum((1, 2)), m.w[0]]),
        lambda m, x, y: torch.vstack([m.w[0], x[0]]),
        lambda m, x, y: torch.dstack([x, x @ m.w]),
        lambda m, x, y: torch.dstack([m.w[0], m.w[1]]),
        lambda m, x, y: torch.dstack([x[0], 2 * x[0]]),
        lambda m, x, y: torch.column_stack([x[:, 0], x[:, 1, 1]]),
        lambda m, x, y: torch.row_stack([x.sum(), m.w[0, :1]]),
        lambda m, x, y: x.fliplr() @ m.w.mH,
        lambda m, x, y: x.adjoint() @ m.w[:5].H.flipud().mT,
        lambda m, x, y: torch.fft.fft(x, dim=1).mH.real @ +x,
        lambda m, x, y: torch.cross(m.w[:3], m.w[3:]).sum() + torch.cross(x[..., :3], x[..., 3:], dim=-1).sum(),
        lambda m, x, y: torch.ger(m.w[0], m.w[1]) * torch.vdot(x[0, 0], m.w[0]),
    ],
)
def test_rare_names_of_common_operators(function):
    gm = normalized(function, data(4, 5, 6), dims={"x": {0: B}})
    assert not {
        "tile",
        "hstack",
        "vstack",
        "dstack",
        "column_stack",
        "row_stack",
        "cross",
        "fliplr",
        "flipud",
        "mH",
        "adjoint",
        "matrix_H",
        "positive",
        "ger",
        "vdot",
    } & {name.split(".")[1] for name in targets(gm) if name.startswith("aten.")}


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, y: (
            torch.multiply(torch.subtract(x, torch.divide(x @ m.w, 3.0), alpha=2), torch.negative(x))
            .absolute()
            .arctan2(m.w[0])
        ),
        lambda m, x, y: torch.clip(x, -1, 1) + x.clip(m.w[0] - 1, m.w[0] + 1),
        lambda m, x, y: (
            x * torch.greater(x, 0) + x * torch.less_equal(x, m.w[0]) + x * torch.not_equal(x, 0).logical_not()
        ),
        lambda m, x, y: torch.special.softmax(x @ m.w, 1) + torch.special.erf(x) + torch.special.sinc(x),
        lambda m, x, y: x * (torch.arange(6) << 1) + x * (torch.arange(6) >> torch.arange(6)),
        lambda m, x, y: torch.moveaxis(x, 1, 2) @ m.w[:5] + torch.trapz(x, dx=0.5)[..., None].mean(),
        lambda m, x, y: x.ravel() * m.w.ravel()[0],
        lambda m, x, y: (
            torch.atleast_2d(m.w[0]) * x
            + torch.atleast_3d(m.w[0, :5]) * torch.atleast_3d(x)
            + (torch.atleast_3d(m.w) * torch.atleast_1d(m.w.sum())).sum()
        ),
        lambda m, x, y: torch.std_mean(x @ m.w)[0] + torch.var_mean(x, unbiased=False)[0] * m.w,
        lambda m, x, y: [
            part.sum() * i
            for i, part in enumerate((*torch.hsplit(x, 5), *torch.dsplit(x @ m.w, [1, 4]), *torch.vsplit(m.w, 2)))
        ],
        lambda m, x, y: [
            part.sum() * i
            for i, part in enumerate(
                (*(x @ m.w).tensor_split([1, 4], -1), *x.unsafe_chunk(2, 1), *x.unsafe_split_with_sizes([2, 4], 2))
            )
        ],
    ],
)
def test_second_names_of_common_operators(function):
    gm = normalized(function, data(4, 5, 6), dims={"x": {0: B}})
    assert not {str(op) for op in COMPOSITE} & set(targets(gm))
    assert not {
        "ravel",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "tensor_split",
        "unsafe_chunk",
        "hsplit",
        "dsplit",
        "vsplit",
    } & {name.split(".")[1] for name in targets(gm) if name.startswith("aten.")}


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, y: x.take_along_dim(x.argsort(-1), -1) @ m.w,
        lambda m, x, y: x.take_along_dim(torch.arange(6).flip(0)[None, None], -1) @ m.w,
        lambda m, x, y: m.w[None].take_along_dim(torch.zeros_like(x, dtype=torch.long), 1) * x,
        lambda m, x, y: m.w.take_along_dim(torch.tensor([7, 3])).sum() * x,
        lambda m, x, y: m.w.take(torch.tensor([[7], [-1]])).sum() * x,
        *(lambda m, x, y, k=k: (x[..., :5] @ m.w[:5, :5]).rot90(k, (1, 2)) for k in range(-1, 4)),
        lambda m, x, y: x.rot90(1, (2, 0)) * m.w[0, 0],
        lambda m, x, y: x @ torch.block_diag(m.w[:3, :2], m.w[3:, 2:]),
        lambda m, x, y: x @ torch.block_diag(m.w[:4, :3], m.w[0, :2], m.w.sum()).mT[:, :5],
        lambda m, x, y: [grid * x.sum() for grid in torch.meshgrid(m.w[0], m.w[1, :3], m.w[2, :2], indexing="xy")],
        lambda m, x, y: [grid * m.w.sum() for grid in torch.meshgrid(x[:, 0, 0], x[0, 0], indexing="ij")],
        lambda m, x, y: F.affine_grid((x @ m.w)[:, :2, :3], (x.shape[0], 1, 4, 7), align_corners=False),
        lambda m, x, y: F.affine_grid((x @ m.w)[:, :3, :4], (x.shape[0], 1, 4, 7, 3), align_corners=True),
        lambda m, x, y: torch.dist(x @ m.w, x) + torch.dist(x, m.w[0], 1),
        lambda m, x, y: x[..., :3] @ torch.diagflat(m.w[0, :2], 1),
        lambda m, x, y: torch.linalg.diagonal(x @ m.w) + torch.linalg.diagonal(x, offset=1, dim1=2, dim2=1).sum(),
        lambda m, x, y: torch.linalg.vecdot(x @ m.w, x, dim=1),
        lambda m, x, y: (x @ m.w).msort(),
        lambda m, x, y: torch.cov((x @ m.w).flatten(0, 1).T) + torch.cov(m.w, correction=0),
        lambda m, x, y: torch.corrcoef((x @ m.w).flatten(0, 1).T),
        lambda m, x, y: torch.diff(x @ m.w, dim=1, prepend=x[:, :1]).sum() + torch.trapezoid(x @ m.w, dim=1).sum(),
        lambda m, x, y: x @ torch.kron(m.w[:2], m.w[:3, :2]),
        lambda m, x, y: torch.fft.fftshift(x @ m.w, 1) + torch.fft.ifftshift(x, (1, 2)) * m.w[0],
        lambda m, x, y: (x @ m.w).narrow(-1, -2, 2).movedim(1, 2) * x.movedim((1, 2), (2, 1)).narrow(1, 1, 2),
        lambda m, x, y: (x @ m.w).std(1) + x.var() * m.w[0] + torch.std_mean(torch.special.expit(x).max(m.w[0]), 1)[1],
        lambda m, x, y: torch.special.logsumexp(torch.special.xlogy(x, x.abs() + m.w[0] ** 2), 1),
        lambda m, x, y: x.true_divide(2) * torch.special.log1p(m.w[0] ** 2) * ((x > 0) & (m.w[0] > 0) | (x < -1)),
    ],
)
def test_operators_that_are_made_of_common_ones(function):
    gm = normalized(
        function, data(4, 5, 6), dims=None if "take_along_dim" in function.__code__.co_names else {"x": {0: B}}
    )
    assert not {str(op) for op in (*COMPOSITE, *WRITTEN)} & set(targets(gm))


def test_what_has_no_form_in_common_operators_stays():
    gm = normalized(
        lambda m, x, y: (
            torch.fake_quantize_per_channel_affine(m.w.float(), torch.ones(6), torch.zeros(6), 0, -8, 7) * x[:, :1]
        ),
        data(4, 5, 6),
        dims={"x": {0: B}},
    )
    assert "aten.fake_quantize_per_channel_affine.default" in targets(gm)


def test_calls_that_differ_in_their_operands_alone_are_traced_once(monkeypatch):
    """A trace takes as long as a hundred other calls, and models turn matrices in every layer."""
    traces = []
    monkeypatch.setattr(sys.modules["passes.traced"], "make_fx", lambda run: traces.append(run) or make_fx(run))
    normalized(lambda m, x, y: ((x @ m.w).mT.mT @ m.w).mT.mT, data(4, 5, 6), dims={"x": {0: B}})
    assert len(traces) == 2


def test_covariances_with_weights_or_of_one_variable():
    gm = normalized(
        lambda m, x, y: (
            torch.cov(m.w, fweights=torch.arange(6))
            + torch.cov(m.w, correction=2, fweights=torch.arange(6), aweights=torch.arange(6) / 7) * x.sum()
            + torch.cov(m.w[0], aweights=torch.arange(6) / 7, correction=0)
            + torch.corrcoef(x[0, 0] * m.w[0])
        ),
        data(4, 5, 6),
    )
    assert not {"aten.cov.default", "aten.corrcoef.default"} & set(targets(gm))


@pytest.mark.parametrize(
    "mode, name",
    [("reflect", "reflection_pad"), ("replicate", "replication_pad"), ("constant", "pad"), ("circular", "pad")],
)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_pads_that_keep_their_operand_are_operators_of_their_own(mode, name, dims):
    amounts = [2, 1, 1, 0, 1, 2][: 2 * dims]
    gm = normalized(
        lambda m, x, y: F.pad(
            (x @ m.w).reshape(4, 5, *[1] * (dims - 1), 6).expand(4, 5, *[4] * (dims - 1), 6), amounts, mode
        ),
        data(4, 5, 6),
    )
    target = getattr(aten, name if name == "pad" else f"{name}{dims}d").default
    (node,) = [n for n in gm.graph.nodes if n.target is target]
    operand, kept = torch.rand(4, 5, *[4] * (dims - 1), 6, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        F.pad(operand, amounts, mode)
    assert saved_positions(node.target, [True]) == ((0,) if kept else ())
