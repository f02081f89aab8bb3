"""What operators take for themselves: the tables against every allocation of one call, of each operator that has a
rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes import ops
from tests.helpers.temporaries import all_ways, numbers_graded
from tests.unit.rules.samples import T, case, f, i, reseed
from tests.unit.rules.samples_linalg import PIVOTS, d
from tests.unit.rules.table import SAMPLES

aten = torch.ops.aten

BLOCKED = {
    aten.bmm.default: [case(f(8, 32, 32), f(8, 32, 64))],
    aten.conv1d.default: [case(f(64, 32, 64), f(32, 32, 3), None, [1], [1])],
    aten.conv1d.padding: [case(f(64, 32, 64), f(32, 32, 3), None, [1], "same")],
    aten.conv2d.default: [
        case(f(8, 32, 32, 32), f(32, 32, 3, 3), None, [1, 1], [1, 1]),
        case(f(8, 32, 32, 32), f(32, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 32),
        case(f(8, 64, 32, 32), f(32, 64, 1, 1)),
    ],
    aten.conv2d.padding: [case(f(8, 32, 32, 32), f(32, 32, size, size), None, [1, 1], "same") for size in (3, 4)],
    aten.conv3d.default: [case(f(8, 8, 16, 16, 16), f(16, 8, 3, 3, 3))],
    aten.conv3d.padding: [case(f(8, 8, 16, 16, 16), f(16, 8, 3, 3, 3), None, [1, 1, 1], "same")],
    aten.conv_transpose1d.default: [
        case(f(64, 32, 64), f(32, 32, 4), f(32), [2], [1]),
        case(f(64, 64, 64), f(64, 64, 3)),
    ],
    aten.conv_transpose2d.input: [case(f(8, 64, 16, 16), f(64, 32, 2, 2), f(32), [2, 2])],
    aten.conv_transpose3d.input: [case(f(4, 16, 8, 8, 8), f(16, 8, 2, 2, 2), f(8), [2, 2, 2])],
    aten.instance_norm.default: [case(f(8, 4, 64), f(4), f(4), None, None, True, 0.1, 1e-5, False)],
    aten.cosine_embedding_loss.default: [
        case(f(64, 64), f(64, 64), T((64,), "t"), 0.1, reduction) for reduction in (0, 1, 2)
    ],
    aten._upsample_bilinear2d_aa.vec: [case(f(8, 32, 16, 16), None, False, [2.0, 2.0])],
    aten._upsample_bicubic2d_aa.vec: [case(f(8, 32, 16, 16), None, False, [2.0, 2.0])],
}
"""Of sizes that blocks of channels divide, and that statistics are small beside, in the place of the samples of
rules."""

MORE = {
    aten.abs.default: [case(T((5, 4), "z"))],
    aten.binary_cross_entropy_with_logits.default: [
        case(f(5, 4), f(5, 4), None, None, 2),
        case(f(5, 4), T((5, 4), "t"), None, T((4,), "c"), 2),
    ],
    aten.fft_rfft.default: [case(f(5, 16, 8), None, 1)],
    aten.gru_cell.default: [case(f(60, 12), f(60, 20), f(60, 12), f(60, 20))],
    aten.index_reduce.default: [case(f(5, 4, 6), 1, i(4, 3), f(5, 3, 6), reduce) for reduce in ("amin", "prod")],
    aten.linalg_cond.default: [case(f(5, 3, 6))],
    aten.linalg_eigvals.default: [case(d(16, 16))],
    aten.linalg_norm.ord_str: [case(f(0, 4), "nuc")],
    aten.linalg_householder_product.default: [case(f(5, 6, 2), T((5, 2), "sig"))],
    **{target: [case(f(5, 64), -1, torch.float64)] for target in (aten.softmax.int, aten.log_softmax.int)},
    **{
        target: [case(f(5, 3, 9)), case(f(5, 9, 3))]
        for target in (aten.linalg_lu.default, aten.linalg_lu_factor.default)
    },
    aten.linalg_lu_solve.default: [
        case(d(5, 4, 4), PIVOTS, f(5, 4, 1)),
        case(d(5, 4, 4), PIVOTS, f(5, 1, 4), left=False),
    ],
    aten.lu_unpack.default: [case(f(5, 4, 12), PIVOTS), case(f(5, 12, 4), PIVOTS)],
    aten.kl_div.default: [case(f(5, 4), f(5, 4), reduction, log_target=True) for reduction in (0, 1, 2)],
    aten.mul.Tensor: [case(T((5, 4), "z"), T((5, 4), "z")), case(f(5, 1, 16), f(5, 14, 1))],
    aten.poisson_nll_loss.default: [case(T((5, 4), "p"), T((5, 4), "p"), False, False, 1e-8, 2)],
}
"""Beside them."""

ELSEWHERE = {
    **dict.fromkeys(
        (aten.gru.input, aten.lstm.input, aten.rnn_relu.input, aten.rnn_tanh.input),
        "gates, and workspaces of oneDNN; measured in whole models",
    ),
    **dict.fromkeys(
        (aten.einsum.default, aten.matmul.default), "copies of operands in order (passes/operand_order.py)"
    ),
    aten.scaled_dot_product_attention.default: "by the kernel; measured in whole models",
    ops.experts: "by what an expert is; measured in whole models",
}
"""Not as a table of single operators."""


AS_MUCH = {
    aten.instance_norm.default: "its kernel for other orders of memory works in place",
    **dict.fromkeys(
        (
            aten.div.Tensor_mode,
            aten.float_power.Tensor_Tensor,
            aten.index_put.default,
            aten.lerp.Tensor,
            aten.diag_embed.default,
        ),
        "products with it, or zeros like it, are made later",
    ),
}
"""Operators that take less of the gradient of a sum than of a whole one, which is not told apart."""


@pytest.mark.parametrize(
    "target",
    [target for target in SAMPLES if target not in ELSEWHERE],
    ids=lambda target: str(target).split(" at 0x")[0],
)
def test_what_an_operator_takes_is_counted(target: Any) -> None:
    """Of the gradient of a sum, too, one number that is seen at full size: kernels that read rows in memory make it
    whole, others do not."""
    reseed()  # a mask of nothing takes less
    wrong = []
    for one in (*BLOCKED.get(target, SAMPLES[target]), *MORE.get(target, ())):
        for number in numbers_graded(one) if target not in BLOCKED else numbers_graded(one)[-1:]:
            forward, backward, summed = all_ways(target, one, number)
            if summed is not None and target in AS_MUCH and summed.counted < summed.predicted:
                summed = None
            for way, both in (("forward", forward), ("backward", backward), ("of a sum", summed)):
                if both is not None and not both.close:
                    wrong.append((way, number, both, one.args))
    assert not wrong


@pytest.mark.parametrize("tokens", [4, 16, 32])
def test_gradients_of_experts_are_joined(tokens: int) -> None:
    """Few tokens for large experts: at the peak there are the gradients of the first layers, twice."""
    gated = "halves(lambda first, second: F.silu(first) * second)"
    layer = case(f(tokens, 64), i(4, tokens, 2), T((tokens, 2), "c"), f(4, 64, 256), f(4, 128, 64), gated)
    _, backward, _ = all_ways(ops.experts, layer, 3)
    assert backward is not None and backward.counted == pytest.approx(backward.predicted, rel=0.05)
