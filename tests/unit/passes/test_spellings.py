"""Operators that ATen has under several names have one behind `spellings`, and compute the same."""

from __future__ import annotations

import pytest
import torch

from tests.unit.passes.test_small import B, data, normalized, targets


@pytest.mark.parametrize("function", [
    lambda m, x, y: x.tile(2, 1) @ m.w, lambda m, x, y: x[:, :1].tile((1, 1, 3)), lambda m, x, y: x.tile(2, 1, 1, 1),
    lambda m, x, y: torch.hstack([x, m.w[None].expand(x.shape[0], 6, 6)]), lambda m, x, y: torch.hstack([x.sum((1, 2)), m.w[0]]), lambda m, x, y: torch.vstack([m.w[0], x[0]]),
    lambda m, x, y: torch.dstack([x, x @ m.w]), lambda m, x, y: torch.dstack([m.w[0], m.w[1]]), lambda m, x, y: torch.dstack([x[0], 2 * x[0]]),
    lambda m, x, y: torch.column_stack([x[:, 0], x[:, 1, 1]]), lambda m, x, y: torch.row_stack([x.sum(), m.w[0, :1]]),
    lambda m, x, y: x.fliplr() @ m.w.mH, lambda m, x, y: x.adjoint() @ m.w[:5].H.flipud().mT, lambda m, x, y: torch.fft.fft(x, dim=1).mH.real @ +x,
    lambda m, x, y: torch.cross(m.w[:3], m.w[3:]).sum() + torch.cross(x[..., :3], x[..., 3:], dim=-1).sum(),
    lambda m, x, y: torch.ger(m.w[0], m.w[1]) * torch.vdot(x[0, 0], m.w[0]),
])
def test_rare_names_of_common_operators(function):
    gm = normalized(function, data(4, 5, 6), dims={"x": {0: B}})
    assert not {"tile", "hstack", "vstack", "dstack", "column_stack", "row_stack", "cross", "fliplr", "flipud", "mH", "adjoint", "matrix_H", "positive", "ger", "vdot"} & {
        name.split(".")[1] for name in targets(gm) if name.startswith("aten.")}
