"""Operators on images and signals: pooling, resizing, pixel shuffles, patches, grid sampling."""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.arguments import Spec, named, rule
from autopar.rules.halo import borders
from autopar.rules.language import Call
from autopar.rules.rule import Rule

aten = torch.ops.aten


def positions_whole(spatial: int) -> Spec:
    """Samples and channels split; the last `spatial` dims do not (resizing, and pools, which `rules.halo` can cut
    there)."""

    def spec(call: Call) -> str:
        left, right = (" ".join(f"{w}{i}!" for i in range(spatial)) for w in "hp")
        return rule([f"... {left}"], [f"... {right}" for _ in call.outs])

    return spec


def unpooled(spatial: int) -> Spec:
    """max_unpool: values put back where a pool took them from; as `positions_whole`."""

    def spec(call: Call) -> str:
        left, right = (" ".join(f"{w}{i}!" for i in range(spatial)) for w in "hp")
        return rule([f"... {left}", f"... {left}"], [f"... {right}"])

    return spec


def prelu(call: Call) -> str:
    """One slope for all channels, or one per channel (dim 1)."""
    if call.ins[1].shape and call.ins[1].shape[0] != 1:
        rest = " ".join("c" if i == 1 else f"d{i}" for i in range(len(call.ins[0].shape)))
        return rule([rest, "c"], [rest])
    return rule(["...", "1" if call.ins[1].shape else ""], ["..."])


def patches(samples: int) -> Spec:
    """im2col and col2im: samples split. There is a dim of samples if the operand has `samples` dims."""

    def spec(call: Call) -> str:
        lead = ["b"] if len(call.ins[0].shape) == samples else []
        left, right = (
            [*lead, *(f"{name}{i}!" for i in range(len(t.shape) - len(lead)))]
            for name, t in (("y", call.ins[0]), ("z", call.outs[0]))
        )
        return rule([" ".join(left)], [" ".join(right)])

    return spec


def _of_floats(call: Call) -> str:
    """Means and interpolations are linear, but those of integers are rounded."""
    return "all" if call.ins[0].floating else ""


NONLINEAR = {
    1: "adaptive_max_pool1d.default max_pool1d_with_indices.default lp_pool1d_.default",
    2: "max_pool2d_with_indices.default adaptive_max_pool2d.default",
    3: "max_pool3d_with_indices.default adaptive_max_pool3d.default",
}
LINEAR = {
    1: "adaptive_avg_pool1d.default _upsample_nearest_exact1d.vec upsample_linear1d.vec upsample_nearest1d.vec "
    "reflection_pad1d.default replication_pad1d.default upsample_nearest1d.default upsample_linear1d.default",
    2: "adaptive_avg_pool2d.default _upsample_nearest_exact2d.vec upsample_bicubic2d.vec upsample_bilinear2d.vec "
    "upsample_nearest2d.vec _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec upsample_bilinear2d.default "
    "upsample_nearest2d.default upsample_bicubic2d.default reflection_pad2d.default replication_pad2d.default",
    3: "adaptive_avg_pool3d.default _upsample_nearest_exact3d.vec upsample_nearest3d.vec upsample_trilinear3d.vec "
    "reflection_pad3d.default replication_pad3d.default",
}

POOLS = {
    n: {
        op: linear
        for linear, names in (("", f"max_pool{n}d.default"), (_of_floats, f"avg_pool{n}d.default"))
        for op in named(names)
    }
    for n in (1, 2, 3)
}

RULES: dict[Any, Rule] = {
    **{
        op: Rule(positions_whole(n), linear=linear, together=borders)
        for n, ops in POOLS.items()
        for op, linear in ops.items()
    },
    **{op: Rule(positions_whole(n)) for n, names in NONLINEAR.items() for op in named(names)},
    **{op: Rule(positions_whole(n), linear=_of_floats) for n, names in LINEAR.items() for op in named(names)},
    aten.channel_shuffle.default: Rule("b c! ... -> b c! ...", linear="all"),
    aten.col2im.default: Rule(patches(3), linear="all"),
    aten.grid_sampler.default: Rule(lambda call: _grid_sampler(call), linear="first"),
    aten.im2col.default: Rule(patches(4), linear="all"),
    **{
        op: Rule(unpooled(n), linear="first")
        for n, op in ((2, aten.max_unpool2d.default), (3, aten.max_unpool3d.default))
    },
    aten.pixel_unshuffle.default: Rule("... c (h r!) (w q!) -> ... (c r! q!) h w", linear="all"),
    aten.prelu.default: Rule(prelu),
}


def _grid_sampler(call: Call) -> str:
    """Each output position may read any position of the image: those of the grid split, those of the image do not."""
    n = len(call.ins[0].shape) - 2
    image, grid = (" ".join(f"{w}{i}{m}" for i in range(n)) for w, m in (("h", "!"), ("p", "")))
    return f"b c {image}, b {grid} two! -> b c {grid}"
