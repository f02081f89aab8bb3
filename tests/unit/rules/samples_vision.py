"""Samples of rules for images."""

from __future__ import annotations

from tests.unit.rules.samples import Samples, T, case, f, i
from tests.unit.rules.samples_maths import IMAGE, SIGNAL, SOLID, aten, named_ops

VISION: Samples = {
    **named_ops(
        "max_pool1d.default",
        [
            case(SIGNAL, [2]),
            case(f(2, 3, 13), [3], [2], [1], [1], True),
            # the last window reaches behind an image that is not padded
            case(f(2, 3, 15), [2], [2], [0], [1], True),
        ],
    ),
    **named_ops("max_pool1d_with_indices.default", [case(SIGNAL, [2])]),
    **named_ops(
        "avg_pool1d.default", [case(SIGNAL, [2]), case(SIGNAL, [3], [2], [1], False, False), case(i(9, 5, 4, 8), [2])]
    ),
    **named_ops(
        "max_pool2d.default",
        [
            case(IMAGE, [2, 2]),
            case(f(4, 6, 6), [3, 3], [1, 1], [1, 1]),
            case(f(2, 3, 15, 12), [3, 3], [2, 2], [1], [1, 2], True),
        ],
    ),
    **named_ops(
        "avg_pool2d.default",
        [
            case(IMAGE, [2, 2]),
            case(f(4, 6, 6), [3, 3], [1, 1], [1, 1]),
            case(IMAGE, [3], [2], [1, 1], False, False),
            case(f(2, 3, 12, 12), [3, 3], [3, 1], [1, 0], False, False),
            case(i(9, 5, 4, 6, 6), [2, 2]),
        ],
    ),
    **named_ops("max_pool2d_with_indices.default", [case(IMAGE, [2, 2]), case(f(4, 6, 6), [3, 3], [1, 1], [1, 1])]),
    **named_ops("max_pool3d.default avg_pool3d.default max_pool3d_with_indices.default", [case(SOLID, [2, 2, 2])]),
    aten.max_unpool2d.default: [case(f(4, 5, 3, 2), T((4, 5, 3, 2), "k7"), [6, 4])],
    aten.max_unpool3d.default: [case(f(4, 5, 2, 3, 2), T((4, 5, 2, 3, 2), "k7"), [4, 6, 4], [2, 2, 2], [0, 0, 0])],
    **named_ops("adaptive_avg_pool1d.default adaptive_max_pool1d.default", [case(SIGNAL, [3])]),
    **named_ops("adaptive_avg_pool2d.default adaptive_max_pool2d.default", [case(IMAGE, [2, 3])]),
    **named_ops("adaptive_avg_pool3d.default adaptive_max_pool3d.default", [case(SOLID, [2, 2, 2])]),
    **named_ops("_upsample_nearest_exact1d.vec upsample_nearest1d.vec", [case(SIGNAL, [12], None)]),
    **named_ops("upsample_linear1d.vec", [case(SIGNAL, [12], False, None)]),
    **named_ops("upsample_nearest1d.default", [case(SIGNAL, [12])]),
    **named_ops("upsample_linear1d.default", [case(SIGNAL, [12], False)]),
    **named_ops(
        "_upsample_nearest_exact2d.vec upsample_nearest2d.vec",
        [case(IMAGE, None, [2.0, 2.0]), case(IMAGE, [9, 9], None)],
    ),
    **named_ops("upsample_nearest2d.default", [case(IMAGE, [12, 9])]),
    **named_ops(
        "upsample_bilinear2d.vec upsample_bicubic2d.vec _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec",
        [case(IMAGE, [9, 12], False, None)],
    ),
    **named_ops("upsample_bilinear2d.default upsample_bicubic2d.default", [case(IMAGE, [9, 12], True)]),
    **named_ops("_upsample_nearest_exact3d.vec upsample_nearest3d.vec", [case(SOLID, [5, 5, 5], None)]),
    **named_ops("upsample_trilinear3d.vec", [case(SOLID, [5, 5, 5], False, None)]),
    **named_ops("reflection_pad1d.default replication_pad1d.default", [case(SIGNAL, [1, 2])]),
    **named_ops("reflection_pad2d.default replication_pad2d.default", [case(IMAGE, [1, 2, 0, 1])]),
    **named_ops("reflection_pad3d.default replication_pad3d.default", [case(SOLID, [1, 2, 0, 1, 1, 1])]),
    aten.channel_shuffle.default: [case(IMAGE, 2)],
    aten.col2im.default: [
        case(f(5, 16, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2]),
        case(f(16, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2]),
    ],
    aten.im2col.default: [
        case(IMAGE, [2, 2], [1, 1], [0, 0], [2, 2]),
        case(f(4, 6, 6), [2, 2], [1, 1], [0, 0], [2, 2]),
    ],
    aten.grid_sampler.default: [case(IMAGE, T((5, 3, 4, 2), "u"), 0, 0, False)],
    aten.pixel_unshuffle.default: [case(f(5, 4, 8, 6), 2)],
    aten.prelu.default: [case(IMAGE, f(4)), case(f(5, 4), f(1)), case(f(5, 4), f())],
}
