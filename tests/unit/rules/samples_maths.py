"""Samples of contractions, reductions, losses and images."""

from __future__ import annotations

import torch

from passes import ops
from tests.unit.rules.samples import Samples, T, case, f, i

aten = torch.ops.aten
P = T((5, 4), "p")
U = T((5, 4), "t")


def weights(gates: int, inputs: int, hidden: int, ways: int = 1, biased: bool = True) -> list[T]:
    """Parameters of a recurrent layer."""
    one = [f(gates * hidden, inputs), f(gates * hidden, hidden), *([f(gates * hidden)] * 2 if biased else [])]
    return one * ways


CONTRACTIONS: Samples = {
    aten.addmv.default: [case(f(5), f(5, 4), f(4)), case(f(1), f(5, 4), f(4), beta=2)],
    aten.bmm.default: [case(f(5, 3, 4), f(5, 4, 6))],
    aten.cdist.default: [case(f(5, 3), f(4, 3)), case(f(3, 5, 3), f(3, 4, 3))],
    aten.conv1d.default: [
        case(f(5, 4, 7), f(6, 4, 3)),
        case(f(5, 4, 7), f(6, 4, 3), f(6), [2], [1]),
        case(f(4, 12), f(6, 4, 3), None, [1], [2], [2]),
        case(f(2, 2, 13), f(4, 1, 5), f(4), [1], [2], [1], 2),
        case(f(2, 4, 9), f(4, 1, 4), f(4), [1], [3], [1], 4),
        case(f(2, 8, 9), f(4, 2, 3), None, [1], [0], [1], 4),
    ],
    aten.conv1d.padding: [
        case(f(5, 4, 7), f(6, 4, 3), None, [1], "same"),
        case(f(5, 4, 8), f(6, 4, 2), None, [1], "same"),
    ],
    aten.conv2d.default: [
        case(f(5, 4, 6, 6), f(8, 4, 3, 3), None, [1, 1], [1, 1]),
        case(f(4, 6, 6), f(8, 4, 3, 3), f(8)),
        case(f(5, 4, 6, 6), f(8, 2, 3, 3), f(8), [1, 1], [0, 0], [1, 1], 2),
        case(f(2, 3, 15, 12), f(4, 3, 7, 5), f(4), [2, 1], [3, 2]),
        case(f(2, 3, 12, 8), f(4, 3, 3, 1), None, [1, 2], [2, 0], [2, 1]),
    ],
    aten.conv2d.padding: [
        case(f(5, 4, 6, 6), f(6, 4, 3, 3), f(6), [1, 1], "same"),
        case(f(2, 4, 12, 8), f(6, 4, 3, 5), None, [1, 1], "valid"),
    ],
    aten.conv3d.default: [case(f(5, 4, 3, 3, 3), f(6, 4, 2, 2, 2))],
    aten.conv3d.padding: [case(f(4, 2, 3, 3, 3), f(4, 2, 2, 2, 2), None, [1, 1, 1], "valid")],
    aten.conv_transpose1d.default: [case(f(5, 4, 7), f(4, 6, 3)), case(f(5, 4, 7), f(4, 6, 3), f(6))],
    aten.conv_transpose2d.input: [
        case(f(5, 4, 4, 4), f(4, 6, 2, 2), f(6), [2, 2]),
        case(f(5, 4, 4, 4), f(4, 3, 2, 2), None, [1, 1], [0, 0], [0, 0], 2),
        case(f(5, 4, 4, 4), f(4, 1, 2, 2), f(4), [2, 2], [0, 0], [0, 0], 4),
        case(f(5, 4, 4, 4), f(4, 2, 2, 2), f(8), [2, 2], [0, 0], [0, 0], 4),
    ],
    aten.conv_transpose3d.input: [case(f(4, 2, 3, 3, 3), f(2, 4, 2, 2, 2))],
    aten.dot.default: [case(f(7), f(7))],
    aten.einsum.default: [
        case("bij,bjk->bik", [f(5, 3, 4), f(5, 4, 6)]),
        case("...d,hd->...h", [f(3, 5, 4), f(6, 4)]),
        case("ii->i", [f(5, 5)]),
        case("ij,jk", [f(5, 4), f(4, 3)]),
        case("bhqd,bhkd->bhqk", [f(4, 1, 3, 2), f(4, 5, 6, 2)]),
        case("i,j->ij", [f(5), f(4)]),
        case("bid,bjd->b", [f(5, 3, 2), f(5, 4, 2)]),
        case("...ij,...jk", [f(3, 5, 4), f(3, 4, 6)]),
        case("b...i,b...i->b...", [f(1, 5, 1), f(6, 5, 4)]),
    ],
    aten.embedding.default: [
        case(f(257, 3), i(257, 4, 5)),
        case(f(8, 5), i(8, 6)),
        case(f(8, 5), i(8, 6, 5), 2),
        case(f(5, 4), i(5, 8, 3), -1, True),
    ],
    aten.gru.input: [
        case(f(5, 4, 3), f(1, 5, 2), weights(3, 3, 2), True, 1, 0.0, True, False, True),
        case(f(4, 5, 3), f(2, 5, 2), weights(3, 3, 2, 2, False), False, 1, 0.0, True, True, False),
    ],
    aten.lstm.input: [case(f(5, 4, 3), [f(1, 5, 2), f(1, 5, 2)], weights(4, 3, 2), True, 1, 0.0, True, False, True)],
    aten.rnn_relu.input: [case(f(5, 4, 3), f(1, 5, 2), weights(1, 3, 2), True, 1, 0.0, True, False, True)],
    aten.rnn_tanh.input: [case(f(4, 5, 3), f(1, 5, 2), weights(1, 3, 2), True, 1, 0.0, True, False, False)],
    aten.rnn_relu_cell.default: [
        case(f(5, 3), f(5, 2), *weights(1, 3, 2)),
        case(f(5, 3), f(5, 2), *weights(1, 3, 2, biased=False)),
    ],
    aten.rnn_tanh_cell.default: [case(f(5, 3), f(5, 2), *weights(1, 3, 2))],
    aten.gru_cell.default: [case(f(5, 3), f(5, 2), *weights(3, 3, 2))],
    aten.lstm_cell.default: [
        case(f(5, 3), [f(5, 2), f(5, 2)], *weights(4, 3, 2)),
        case(f(4, 3), [f(4, 2), f(4, 2)], *weights(4, 3, 2, biased=False)),
    ],
    aten.linear.default: [
        case(f(3, 5, 4), f(4)),
        case(f(3, 5, 4), f(6, 4)),
        case(f(5, 4), f(6, 4), f(6)),
        case(f(4), f(6, 4)),
        case(f(2, 5, 1), f(257, 1)),
        case(f(3, 5, 4), f(6, 4), f(6)),
    ],
    aten.matmul.default: [
        case(f(5, 4), f(4, 6)),
        case(f(4), f(4)),
        case(f(4), f(3, 4, 6)),
        case(f(3, 5, 4), f(4)),
        case(f(4), f(4, 6)),
        case(f(3, 5, 4), f(4, 6)),
        case(f(5, 1, 3, 4), f(2, 4, 6)),
        case(f(5, 4), f(3, 4, 6)),
        case(f(5, 4), f(4)),
    ],
    aten.mv.default: [case(f(5, 4), f(4))],
    aten.outer.default: [case(f(5), f(4))],
    aten.scaled_dot_product_attention.default: [
        case(f(4, 6, 5, 3), f(4, 6, 7, 3), f(4, 6, 7, 2)),
        case(f(4, 6, 5, 3), f(4, 6, 5, 3), f(4, 6, 5, 3), is_causal=True),
        case(f(4, 8, 5, 3), f(4, 4, 5, 3), f(4, 4, 5, 3), is_causal=True, enable_gqa=True),
        case(f(4, 6, 5, 3), f(4, 6, 5, 3), f(4, 6, 5, 3), f(4, 1, 1, 5)),
        case(f(4, 6, 5, 3), f(4, 6, 5, 3), f(4, 6, 5, 3), f(1, 6, 5, 5)),
        case(f(4, 6, 5, 3), f(4, 6, 5, 3), f(4, 6, 5, 3), T((5, 5), "c")),
        case(f(4, 6, 5, 3), f(4, 6, 5, 3), f(4, 6, 5, 3), f(4, 6, 5, 5)),
        case(f(4, 6, 5, 3), f(4, 6, 5, 3), f(4, 6, 5, 3), f(6, 5, 5)),
        case(f(4, 5, 3), f(4, 5, 3), f(4, 5, 3), f(4, 5, 5)),
        case(f(4, 8, 5, 3), f(4, 4, 5, 3), f(4, 4, 5, 3), f(4, 1, 5, 5), enable_gqa=True),
        case(f(4, 6, 5, 3), f(4, 2, 5, 3), f(4, 2, 5, 3), is_causal=True, enable_gqa=True),
        case(f(4, 8, 5, 3), f(4, 1, 5, 3), f(4, 1, 5, 3), f(4, 8, 5, 5), enable_gqa=True),
        case(f(5, 3), f(4, 3), f(4, 2)),
        case(f(2, 4, 6, 3), f(4, 6, 3), f(4, 6, 3)),
        case(f(4, 6, 3), f(2, 4, 6, 3), f(2, 4, 6, 3)),
        case(f(1, 6, 5, 3), f(1, 6, 5, 3), f(4, 6, 5, 2)),
        case(f(4, 1, 5, 3), f(1, 6, 7, 3), f(1, 1, 7, 2)),
        case(f(4, 6, 5, 3), f(4, 6, 1, 3), f(4, 6, 1, 2)),
        case(f(4, 6, 1, 3), f(4, 6, 7, 3), f(4, 6, 7, 2), f(7)),
        case(f(4, 6, 5, 3), f(4, 6, 7, 3), f(4, 6, 7, 2), f(6, 5, 1)),
        case(f(2, 3, 4, 5, 3), f(2, 3, 4, 5, 3), f(2, 3, 4, 5, 3), is_causal=True),
        case(f(4, 6, 5, 3), f(4, 6, 7, 3), f(4, 6, 7, 2), is_causal=True),
    ],
    aten.embedding_bag.padding_idx: [
        case(f(7, 4), i(7, 9), torch.tensor([0, 2, 5]), False, mode, False, None, False, None) for mode in (0, 1, 2)
    ],
    ops.ragged_bags: [case(f(7, 4), i(7, 9), torch.tensor([0, 2, 5]), None, mode) for mode in ("sum", "mean", "max")]
    + [case(f(7, 4), i(7, 9), torch.tensor([0, 2, 5, 9]), f(9), "sum", 1, True)],
    ops.bag: [
        case(f(6, 5), i(6, 8, 4, 2), f(8, 4, 2)),
        case(f(6, 8), i(6, 7, 3), f(7, 3), "sum", 2),
        case(f(6, 8), i(6, 8, 3)),
        case(f(5, 4), i(5, 8, 3), None, "mean", 2),
        case(f(6, 8), i(6, 8, 3), None, "max"),
    ],
    ops.count_each: [case(i(6, 9), 6)],
    ops.statistic: [case(f(1, 4, 1, 1), 6, f(4)), case(f(1, 4), 6, f(4))],
    ops.experts: [
        case(
            f(8, 4, 3),
            i(6, 8, 4, 2),
            f(8, 4, 2),
            f(6, 3, 8),
            f(6, 4, 5),
            "halves(lambda first, second: F.silu(first) * second)",
        ),
        case(f(8, 3), i(6, 8, 2), f(8, 2), f(6, 3, 4), f(6, 4, 5), "lambda x: F.gelu(x)"),
        case(
            f(8, 3),
            i(6, 8, 2),
            f(8, 2),
            f(6, 3, 8),
            f(6, 4, 5),
            "halves(lambda first, second: F.silu(second) + first)",
            f(6, 8),
        ),
        case(
            f(8, 4, 3),
            i(6, 8, 4, 2),
            f(8, 4, 2),
            f(6, 3, 8),
            f(6, 4, 5),
            "pairs(lambda even, odd: (y0 := torch.clamp(even, None, 0.5)) * y0 * odd)",
            f(6, 8),
        ),
    ],
    ops.affine: [case(f(5, 4), f(4, 6), f(6)), case(f(3, 5, 4), f(4, 6), f(6)), case(f(2, 5, 1), f(1, 257), f(257))],
    ops.grouped_matmul: [case(f(7, 4), f(3, 4, 5), torch.tensor([2, 4, 6]))],
}

LOSSES: Samples = {
    aten.binary_cross_entropy.default: [case(T((5, 4), "sig"), U, None, r) for r in (0, 1, 2)],
    aten.binary_cross_entropy_with_logits.default: [case(f(5, 4), U, None, None, r) for r in (0, 1, 2)]
    + [case(f(5, 4), U, T((5, 1), "c"), T((4,), "c"), r) for r in (0, 2)],
    aten.cross_entropy_loss.default: [
        case(f(5, 7), i(7, 5), None, 2),
        case(f(5, 7, 4), i(7, 5, 4), None, 1),
        case(f(5, 7, 4), i(7, 5, 4), None, 0),
        case(f(5, 7), T((5, 7), "t"), None, 2),
        case(f(7), i(7), None, 2),
    ],
    aten.cosine_embedding_loss.default: [case(f(5, 4), f(5, 4), T((5,), "t"), 0.1, r) for r in (0, 1, 2)]
    + [case(f(4), f(4), T((), "t"), 0.1, 2), case(f(5, 4), f(1, 4), T((5,), "t"), 0.1, 0)],
    aten.hinge_embedding_loss.default: [case(f(5, 4), U, 1.0, r) for r in (0, 1, 2)],
    aten.margin_ranking_loss.default: [case(f(5, 4), f(5, 4), U, 0.1, r) for r in (0, 1, 2)],
    aten.multi_margin_loss.default: [
        case(f(5, 4), i(4, 5), 1, 1.0, T((4,), "c"), 2),
        *(case(f(5, 5), i(5, 5), 1, 1.0, w, r) for r in (0, 1, 2) for w in (None, T((5,), "c"))),
    ],
    aten.multilabel_margin_loss.default: [*(case(f(5, 4), i(4, 5, 4), r) for r in (0, 1, 2)), case(f(4), i(4, 4), 2)],
    aten.poisson_nll_loss.default: [case(f(5, 4), T((5, 4), "t"), True, False, 1e-8, r) for r in (0, 1, 2)],
    aten.triplet_margin_loss.default: [
        case(f(5, 4), f(5, 4), f(5, 4), 1.0, 2.0, 1e-6, swap, r) for r in (0, 1, 2) for swap in (False, True)
    ]
    + [case(f(3, 5, 4), f(3, 5, 4), f(3, 5, 4), 1.0, 2.0, 1e-6, False, r) for r in (0, 2)]
    + [case(f(5, 4), f(1, 4), f(5, 1), 1.0, 2.0, 1e-6, False, 0)],
    aten.huber_loss.default: [case(f(5, 4), f(5, 4), r) for r in (0, 1, 2)],
    aten.kl_div.default: [case(f(5, 4), P, r) for r in (0, 1, 2)],
    aten.l1_loss.default: [case(f(5, 4), f(5, 4), r) for r in (0, 1, 2)],
    aten.mse_loss.default: [case(f(5, 4), f(5, 4), r) for r in (0, 1, 2)] + [case(f(5, 4), f(4), r) for r in (0, 2)],
    aten.nll_loss.default: [case(f(5, 7), i(7, 5), None, 2), case(f(5, 7), i(7, 5))],
    aten.nll_loss_nd.default: [
        case(f(5, 7, 4), i(7, 5, 4), None, 2),
        case(f(5, 7), i(7, 5), T((7,), "c")),
        case(f(5, 7, 4), i(7, 5, 4), T((7,), "c"), 2),
    ],
    aten.smooth_l1_loss.default: [case(f(5, 4), f(5, 4), r) for r in (0, 1, 2)],
    aten.soft_margin_loss.default: [case(f(5, 4), U, r) for r in (0, 1, 2)],
    ops.count_valid: [case(i(5, 5, 4), 3, torch.float64)],
    ops.cross_entropy_each: [case(f(5, 4, 7), i(7, 5, 4), 2, 0.0), case(f(5, 4, 7), i(7, 5, 4), 2, 0.1, T((7,), "c"))],
    ops.ctc_each: [
        case(f(7, 5, 4), i(3, 5, 2), T((5,), "k7"), T((5,), "k2"), 3, False),
        case(f(7, 4, 4), i(3, 4, 2), T((4,), "k6"), T((4,), "k2"), 3, True),
    ],
    ops.cross_entropy_sum: [
        case(f(5, 4, 7), i(7, 5, 4), 2, 0.0),
        case(f(5, 257), i(257, 5), -100, 0.1),
        case(f(5, 4, 7), i(7, 5, 4), 2, 0.1, T((7,), "c")),
    ],
    ops.weigh_valid: [case(i(5, 5, 4), T((5,), "c"), 3)],
}

AXIS = [case(f(5, 4, 6), -1), case(f(5, 4), 0)]
DIM = [case(f(5, 4, 6), 1), case(f(5, 4, 6), -1, True)]
DIMS = [case(f(5, 4, 6), [1]), case(f(5, 4, 6), [-1, 0], True), case(f(5, 4, 6), []), case(f(5, 4, 6), [], True)]
ALL = [case(f(5, 4)), case(f())]
MOST = torch.arange(120).reshape(5, 4, 6) > 0
"""True but for the first one."""


def named_ops(names: str, cases: list) -> Samples:
    found = {}
    for name in names.split():
        packet, overload = name.split(".")
        found[getattr(getattr(aten, packet), overload)] = cases
    return found


REDUCTIONS: Samples = {
    **named_ops("any.dim prod.dim_int max.dim min.dim median.dim nanmedian.dim mode.default", DIM),
    aten.all.default: [case(f()), case(MOST)],
    aten.all.dim: [case(MOST, 1), case(MOST, -1, True)],
    aten.all.dims: [*(case(MOST, dims, keep) for dims in ([1], [-1, 0], []) for keep in (False, True))],
    **named_ops("amax.default amin.default any.dims", DIMS),
    **named_ops("logsumexp.default", DIMS[:2]),
    **named_ops(
        "sum.dim_IntList",
        [*DIMS, case(f(5, 4), None), case(f(5, 4), [0], dtype=torch.float32), case(f(), [0])],
    ),
    **named_ops("argmax.default argmin.default", [*DIM, case(f(5, 4))]),
    **named_ops(
        "std.correction var.correction std_mean.correction var_mean.correction",
        [case(f(5, 4, 6), [1]), case(f(5, 4, 6), [-1], correction=0, keepdim=True), case(f(5, 4))],
    ),
    **named_ops(
        "any.default max.default min.default median.default prod.default sum.default nansum.default "
        "count_nonzero.default",
        ALL,
    ),
    **named_ops("norm.Scalar", [case(f(5, 4))]),
    **named_ops("linalg_vector_norm.default", [case(f(5, 4, 6), 2, [1], True), case(f(5, 4)), case(f(5, 4), 1, [-1])]),
    **named_ops("norm.ScalarOpt_dim", [case(f(5, 4, 6), 2, [1], True), case(f(5, 4, 6), None, [-1])]),
    **named_ops("aminmax.default", [case(f(5, 4), dim=1), case(f(5, 4))]),
    **named_ops("count_nonzero.dim_IntList", [case(i(2, 5, 4), [1])]),
    **named_ops("kthvalue.default", [case(f(5, 4), 2), case(f(5, 4), 1, 0, True)]),
    **named_ops(
        "softmax.int log_softmax.int cumsum.default cumprod.default cummax.default cummin.default "
        "logcumsumexp.default argsort.default",
        AXIS,
    ),
    **named_ops("sort.default", [case(f(5, 4, 6)), case(f(5, 4), 0, True)]),
    **named_ops("sort.stable argsort.stable", [case(f(5, 4, 6), stable=True, dim=1)]),
    **named_ops("topk.default", [case(f(5, 4, 6), 2), case(f(5, 4), 3, 0)]),
    **named_ops("glu.default", [case(f(5, 4, 6)), case(f(5, 4), 1)]),
    **named_ops(
        "fft_fft.default fft_ifft.default fft_rfft.default fft_ihfft.default",
        [case(f(5, 4, 6)), case(f(5, 4), None, 1), case(f(5, 4), 6, 0)],
    ),
    **named_ops("fft_irfft.default fft_hfft.default", [case(T((5, 4), "z")), case(T((5, 4, 6), "z"), 9, 1)]),
    **named_ops(
        "fft_fft2.default fft_ifft2.default fft_ifftn.default fft_rfft2.default fft_rfftn.default",
        [case(f(5, 4, 6), None, [1, 2]), case(f(5, 4, 6), [3, 8], [0, -1]), case(f(5, 4, 6))],
    ),
    **named_ops(
        "fft_irfft2.default fft_irfftn.default",
        [case(T((5, 4, 6), "z"), None, [1, 2]), case(T((5, 4, 6), "z"), [3, 8], [0, -1])],
    ),
    **named_ops("fft_fftn.default", [case(f(5, 4, 6), None, [1, 2]), case(f(5, 4, 6), [3, 4]), case(f(5, 4, 6))]),
    **named_ops(
        "_conj.default conj.default conj_physical.default imag.default real.default resolve_conj.default",
        [case(T((5, 4), "z"))],
    ),
    **named_ops("complex.default", [case(f(5, 4), f(5, 4)), case(f(5, 1), f(5, 4))]),
    **named_ops(
        "layer_norm.default", [case(f(3, 5, 4), [4], f(4), f(4)), case(f(5, 4), [4]), case(f(5, 4, 6), [4, 6], f(4, 6))]
    ),
    **named_ops("native_layer_norm.default", [case(f(3, 5, 4), [4], f(4), f(4), 1e-5)]),
    **named_ops(
        "_weight_norm.default",
        [
            case(f(6, 4, 5), f(1, 1, 5), 2),
            case(f(6, 4, 5), f(6, 1, 1), 0),
            case(f(6, 4), f(6, 1)),
            case(f(6, 4), f(), -1),
        ],
    ),
    **named_ops("rms_norm.default", [case(f(3, 5, 4), [4], f(4)), case(f(5, 4), [4])]),
    **named_ops("group_norm.default", [case(f(5, 4, 6), 2, f(4), f(4)), case(f(5, 4), 2)]),
    **named_ops(
        "instance_norm.default",
        [
            case(f(5, 4, 6), f(4), f(4), None, None, True, 0.1, 1e-5, False),
            *(
                case(f(5, 4, 6), f(4), f(4), T((4,), "c"), torch.ones(4).double(), own, 0.1, 1e-5, False)
                for own in (False, True)
            ),
        ],
    ),
    **named_ops(
        "linalg_norm.default",
        [case(f(5, 4, 6), None, [1], True), case(f(5, 4, 6), 1, [-1]), case(f(5, 4, 6), 2, [-2, -1]), case(f(5, 4))],
    ),
    **named_ops("linalg_norm.ord_str", [case(f(5, 4, 6), "fro", [1, 2]), case(f(5, 4), "nuc")]),
    **named_ops("linalg_matrix_norm.default", [case(f(5, 4, 6), 2), case(f(5, 4, 6), 1, [0, 2], True)]),
    **named_ops("linalg_matrix_norm.str_ord", [case(f(5, 4, 6)), case(f(5, 4, 6), "nuc", [0, 2], True)]),
    **named_ops("nanmean.default", [case(f(5, 4, 6), [1]), case(f(5, 4), [-1], True), case(f(5, 4))]),
    **named_ops(
        "quantile.scalar nanquantile.scalar",
        [case(f(5, 4, 6), 0.3, 1), case(f(5, 4), 0.5, -1, True), case(f(5, 4), 0.9)],
    ),
    **named_ops(
        "stft.default",
        [
            case(f(5, 24), 8, 4, 8, T((8,), "c"), return_complex=True),
            case(f(24), 8, return_complex=True),
            case(f(5, 24), 8, 4, return_complex=False),
        ],
    ),
    **named_ops("stft.center", [case(f(5, 24), 8, 4, 8, T((8,), "c"), return_complex=True)]),
    **named_ops(
        "istft.default",
        [case(T((5, 5, 7), "z"), 8, 4, 8), case(T((5, 7), "z"), 8, 4, 8, torch.hann_window(8, dtype=torch.float64))],
    ),
    **named_ops(
        "linalg_cross.default",
        [case(f(5, 4, 3), f(5, 4, 3)), case(f(5, 3, 4), f(1, 3, 4), dim=1), case(f(1, 3, 4), f(1, 3, 4), dim=1)],
    ),
    **named_ops(
        "pairwise_distance.default",
        [
            case(f(5, 4, 6), f(5, 4, 6)),
            case(f(5, 4), f(1, 4), 1.0, 1e-6, True),
            case(f(5, 4), f(4)),
            case(f(5, 4), f(5, 1)),
            case(f(5, 1, 4), f(5, 1, 4)),
            case(f(), f()),
        ],
    ),
    **named_ops(
        "cosine_similarity.default",
        [
            case(f(5, 4, 6), f(5, 4, 6), 1),
            case(f(5, 1, 6), f(4, 6), -1),
            case(f(5, 4, 6), f(4, 1), 1),
            case(f(5, 4), f(1, 4), 0),
            case(f(1, 4, 6), f(1, 4, 6), 1),
            case(f(), f(), 0),
        ],
    ),
}

IMAGE, SIGNAL, SOLID = f(5, 4, 6, 6), f(5, 4, 8), f(5, 4, 4, 4, 4)
