"""Bytes of the backward and of fused chains, counted by hand for small models."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.problem.graph import Op
from autopar.problem.reading import read

B, S, D = 4, 8, 16
SIZE = B * S * D * 4


class Chain(nn.Module):
    """A residual: twice(gelu(x w)) + x w, whose sum feeds a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D, bias=False)
        self.norm = nn.LayerNorm(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.norm(F.gelu(h) * 2.0 + h).sum()


def ops() -> dict[str, Op]:
    with torch.device("meta"):
        model, x = Chain(), torch.empty(B, S, D)
    program = read(capture(model, (x,)).gm, {"b": B, "s": S}, training=True)
    return {getattr(op.target, "__name__", "").partition(".")[0]: op for op in program.ops.values() if op.role == "op"}


def test_a_chain_ends_in_a_norm_and_moves_only_what_comes_in_and_goes_out() -> None:
    found = ops()
    gelu, double, add, norm = (found[name] for name in ("gelu", "mul", "add", "layer_norm"))
    assert [op.leads for op in (gelu, double, add, norm)] == [False, False, False, True]
    parameters = 2 * D * 4
    whole = sum(op.bytes for op in (gelu, double, add, norm))
    assert whole == 9 * SIZE + parameters  # 2 + 2 + 3 + 2 passes
    assert sum(op.fused_bytes for op in (gelu, double, add, norm)) == 3 * SIZE + parameters  # h twice, the result


def test_sums_pass_gradients_on_and_values_read_twice_add_them_up() -> None:
    found = ops()
    assert found["add"].backward_bytes == 0
    assert found["gelu"].backward_bytes == 3 * SIZE + 3 * SIZE  # gradient in, h, gradient out; the sum of h's two gradients
    weight = D * D * 4
    assert found["linear"].backward_bytes == SIZE + SIZE + weight  # gradient in, x kept, the weight's gradient; x needs none


def test_fusing_never_moves_more() -> None:
    for op in ops().values():
        assert 0 <= op.fused_bytes <= op.bytes and 0 <= op.fused_backward_bytes <= op.backward_bytes
