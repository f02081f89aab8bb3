"""Samples of views, factories and indexing."""

from __future__ import annotations

import torch

from passes import ops
from tests.unit.rules.samples import Samples, T, case, f, i

aten = torch.ops.aten
B = T((5, 4), "b")

VIEWS: Samples = {
    aten.cat.default: [
        case([f(4, 6), f(4, 12)], -1),
        case([f(5, 3), f(2, 3), f(1, 3)]),
        case([f(5, 3)], 1),
        case([f(0), f(5, 4)], 1),
    ],
    aten.chunk.default: [case(f(5, 12), 3, -1), case(f(5, 4), 3, 1), case(f(5, 7), 3, 1)],
    aten.constant_pad_nd.default: [
        case(f(5, 4, 6), [1, 2]),
        case(f(5, 4, 6), [1, 0, 0, 2]),
        case(f(5, 4, 6), [1, -1, 0, 0], 2.0),
    ],
    aten.expand.default: [case(f(5, 1), [5, 6]), case(f(4), [3, 5, -1]), case(f(1, 4, 1), [6, 4, 1])],
    aten.flip.default: [case(f(5, 4, 6), [1]), case(f(5, 4), [-1, 0])],
    aten.pad.default: [
        case(f(5, 4, 6), [1, 2]),
        case(f(5, 4, 6), [1, -1, 0, 0], "constant", 3.0),
        case(f(5, 4, 6), [2, 1], "reflect"),
        case(f(5, 4, 6), [2, 1], "circular"),
    ],
    aten.permute.default: [case(f(5, 4, 6), [2, 0, 1]), case(f(5, 4, 6), [-1, 0, -2])],
    aten.pixel_shuffle.default: [case(f(5, 12, 4, 6), 2)],
    aten.repeat.default: [case(f(5, 4), [2, 1, 3]), case(f(5, 1), [1, 4])],
    aten.reshape.default: [
        case(f(5, 4, 12), [5, 4, 4, 3]),
        case(f(5, 4, 12), [20, 12]),
        case(f(6, 4), [4, 6]),
        case(f(5, 1, 4), [5, 4]),
        case(f(24, 6), [4, 36]),
        case(f(4, 3, 2, 8), [4, 3, 16]),
        case(f(), [1, 1]),
    ],
    aten.roll.default: [case(f(5, 4), [1], [1]), case(f(5, 4), [2]), case(f(5, 4, 6), [1, 2], [0, -1])],
    aten.select.int: [case(f(5, 4, 6), 1, 2), case(f(5, 4, 6), -1, -1)],
    aten.slice.Tensor: [case(f(5, 4, 6), 1, 1, 3), case(f(5, 8), -1, 0, 2**63 - 1, 2), case(f(5, 4))],
    aten.split.Tensor: [case(f(5, 8), 3, 1)],
    aten.split_with_sizes.default: [
        case(f(5, 12), [4, 4, 4], -1),
        case(f(24, 5), [12, 12]),
        case(f(4, 24), [12, 12], 1),
        case(f(5, 10), [4, 6], 1),
    ],
    aten.squeeze.dim: [case(f(5, 1, 4), 1), case(f(2, 4, 3), 0)],
    aten.squeeze.dims: [case(f(5, 1, 4, 1), [1, -1]), case(f(2, 4, 1), [0, 2]), case(f(5, 1, 4), [])],
    aten.stack.default: [case([f(5, 4), f(5, 4)], 1), case([f(5), f(5), f(5)], -1)],
    aten.t.default: [case(f(5, 4)), case(f(5))],
    aten.transpose.int: [case(f(5, 4, 6), 1, 2), case(f(5, 4, 6), -1, 0), case(f(), 0, -1)],
    aten.tril.default: [case(f(3, 5, 4)), case(f(5, 5), 1)],
    aten.triu.default: [case(f(3, 5, 4), -1)],
    aten.unbind.int: [case(f(5, 3, 4), 1), case(f(3, 5))],
    aten.unfold.default: [case(f(5, 9), 1, 3, 2)],
    aten.unsqueeze.default: [case(f(5, 4), 1), case(f(5, 4), -1), case(f(5, 4), -3)],
    ops.as_complex: [case(f(5, 4, 2)), case(f(4, 2))],
    aten.view_as_real.default: [case(T((5, 4), "z")), case(T((4,), "z"))],
}

FACTORIES: Samples = {
    aten.arange.default: [case(5)],
    aten.arange.start: [case(1, 6)],
    aten.arange.start_step: [case(1, 9, 2)],
    aten.eye.default: [case(5)],
    aten.eye.m: [case(5, 4)],
    aten.full.default: [case([5, 4], 2.0)],
    aten.hamming_window.default: [case(6)],
    aten.hann_window.default: [case(6)],
    aten.linspace.default: [case(0, 1, 5)],
    aten.logspace.default: [case(0, 1, 5)],
    aten.ones.default: [case([5])],
    aten.rand.default: [case([5])],
    aten.randint.default: [case(7, [5])],
    aten.randint.low: [case(1, 7, [5])],
    aten.randn.default: [case([5])],
    aten.randperm.default: [case(5)],
    aten.scalar_tensor.default: [case(2.0)],
    aten.tril_indices.default: [case(3, 3)],
    aten.triu_indices.default: [case(3, 3)],
    aten.zeros.default: [case([5, 4])],
}

INDEXING: Samples = {
    aten.bincount.default: [case(i(6, 9))],
    aten.bucketize.Tensor: [case(T((5, 4), "c"), T((6,), "s"))],
    aten.gather.default: [
        case(f(5, 4, 6), 1, i(4, 5, 3, 6)),
        case(f(5, 7), -1, i(7, 3, 2)),
        case(f(5, 4), 0, i(5, 5, 4)),
        case(f(), 0, i(1)),
    ],
    aten.histc.default: [case(T((9,), "c"), 4, 0, 1)],
    aten.index.Tensor: [
        case(f(5, 4), [i(5, 6)]),
        case(f(5, 4, 6), [None, i(4, 3, 5)]),
        case(f(5, 4, 6), [i(5, 4, 1), i(4, 3)]),
        case(f(5, 4, 6), [i(5, 3), None, i(6, 3)]),
        case(f(5, 4), [B]),
        case(f(5, 4), [i(5), None]),
        case(f(4, 4), [None, T((4,), "perm4")]),
        case(f(6, 4), [i(6, 6)]),
        case(f(5, 4), [None, i(4, 1)]),
        case(f(5, 4), [i(5, 3, 1)]),
        case(f(5, 4, 6), [None, i(4, 1, 6), i(6, 1)]),
        case(f(5, 4), [i(5, 1), i(4, 1)]),
        case(f(5, 4), [T((5,), "n2"), i(4, 2)]),
    ],
    aten.index_add.default: [case(f(5, 4), 0, i(5, 6), f(6, 4)), case(f(5, 4, 6), 1, i(4, 3), f(5, 3, 6), alpha=2)],
    aten.index_copy.default: [case(f(5, 4), 0, T((3,), "perm5"), f(3, 4))],
    aten.index_fill.int_Scalar: [case(f(5, 4), 1, i(4, 2), 3.0), case(f(), 0, i(1, 1), 3.0)],
    aten.index_put.default: [
        case(f(5, 4), [i(5, 6)], f(6, 4), True),
        case(f(5, 4, 6), [None, T((2,), "perm4")], f(5, 2, 6)),
        case(f(5, 4), [T((3,), "perm5")], f()),
        case(f(5, 4), [B], f()),
        case(f(5, 4), [i(5, 6)], f(1, 4), True),
        case(f(5, 4), [None, i(4, 1)], f(5, 1)),
        case(f(5, 4), [T((3, 1), "perm5")], f(3, 1, 4)),
        case(f(5, 4, 6), [i(5, 3, 1), i(4, 2)], f(3, 2, 6), True),
        case(f(5, 4, 6), [i(5, 3), None, i(6, 3)], f(3, 4), True),
    ],
    aten.index_reduce.default: [
        case(f(5, 4, 6), 1, i(4, 3), f(5, 3, 6), "mean", include_self=False),
        case(f(5, 4), 0, i(5, 6), f(6, 4), "amax"),
    ],
    aten.index_select.default: [case(f(5, 4, 6), 1, i(4, 7)), case(f(5, 4), -2, i(5, 6)), case(f(), 0, i(1, 1))],
    aten.isin.Tensor_Tensor: [case(i(9, 5, 4), i(9, 3)), case(i(9, 5, 4), i(9, 2, 3))],
    aten.masked_scatter.default: [case(f(5, 4), B, f(20))],
    aten.multinomial.default: [case(T((5, 4), "p"), 2, True), case(T((9,), "p"), 3, True)],
    aten.one_hot.default: [case(i(6, 5, 4), 6)],
    aten.repeat_interleave.self_Tensor: [
        case(f(5, 4, 6), torch.tensor([1, 0, 3, 2]), 1),
        case(f(5, 4), torch.tensor([2, 1, 1, 1, 3]), 0, output_size=8),
        case(f(2, 3), torch.tensor([1, 0, 3, 2, 1, 1])),
    ],
    aten.segment_reduce.default: [
        case(f(5, 4), "mean", lengths=torch.tensor([2, 0, 3])),
        case(f(4, 5, 6), "max", lengths=torch.tensor([[2, 3]] * 4), axis=1),
    ],
    aten.scatter.src: [
        case(f(5, 4), 0, T((5, 4), "perm5"), f(5, 4)),
        case(f(5, 4), 0, T((3, 4), "perm5"), f(3, 4)),
        case(f(5, 4, 6), -1, T((5, 2, 6), "perm5"), f(5, 2, 6)),
    ],
    aten.scatter.value: [case(f(5, 4), 1, i(4, 5, 2), 2.0), case(f(), 0, i(1), 2.0)],
    aten.scatter_add.default: [case(f(5, 4, 6), 1, i(4, 5, 7, 6), f(5, 7, 6)), case(f(5, 4), 0, i(5, 3, 4), f(3, 4))],
    aten.scatter_reduce.two: [
        case(f(5, 4), 1, i(4, 5, 3), f(5, 3), "amax"),
        case(f(5, 4), 1, i(4, 5, 3), f(5, 3), "sum"),
    ],
    aten.searchsorted.Tensor: [
        case(T((6,), "s"), T((5, 4), "c")),
        case(T((5, 6), "s"), T((5, 3), "c")),
        case(T((4,), "s"), T((), "c")),
        case(T((6,), "s"), T((5, 4), "c"), sorter=torch.arange(6)),
        case(T((5, 6), "s"), T((5, 3), "c"), sorter=torch.arange(6).repeat(5, 1)),
    ],
    aten.select_scatter.default: [case(f(5, 4, 6), f(5, 6), 1, 2)],
    aten.slice_scatter.default: [case(f(5, 4, 6), f(5, 2, 6), 1, 1, 3)],
    ops.fill_rows: [case(f(6, 5, 4), T((6, 5), "n2"), f(6, 2, 4))],
    ops.picked_places: [case(torch.eye(6).bool(), 1), case(torch.arange(6) % 3 == 0, 2)],
}

STILL = (
    aten.multinomial.default,
    aten.rand.default,
    aten.randint.default,
    aten.randint.low,
    aten.randn.default,
    aten.randperm.default,
)
"""Their values are random or undefined: only shapes can be compared."""
