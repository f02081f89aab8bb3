"""Convolutions and pools with a spatial dim cut: when that is possible, and what ranks send to each other
(autopar.runtime.algorithms.halo).

Input and output are cut by the same axis. Each rank receives the rows (the halo) that its outputs read from its
neighbours, and pads at the ends of the image."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from autopar.layout import chunk, dim_of
from autopar.rules.arguments import given
from autopar.rules.language import Call, Together
from autopar.rules.reshapes import quotient
from autopar.rules.site import InnerCollective, Inside, Site
from autopar.window_rows import Window

IMAGE = 0
NAME = "halo"


def borders(call: Call, ways: int) -> Together:
    """The spatial dims that an axis of `ways` ranks may cut, with their algorithm: those whose windows read only from
    the neighbouring ranks. None of an empty image, and none where padding is "same" with an odd sum, which cannot be
    written as numbers for the dims that stay whole."""
    if 0 in call.ins[IMAGE].sizes:
        return ()
    cut = [d for d in spatial(call) if _exact(call, d) and window(call, d).borders_only(ways)]
    if not call.ins[IMAGE].floating or (
        given(call)["padding"] == "same" and any((window(call, d).reach - 1) % 2 for d in spatial(call))
    ):
        return ()
    first = spatial(call)[0]
    return tuple(((f"h{d - first}", f"p{d - first}"), NAME) for d in cut)


def spatial(call: Call) -> range:
    """The dims of the image over which windows move."""
    rank = len(call.ins[IMAGE].shape)
    return range(rank - int(call.target._schema.name.removesuffix("d")[-1]), rank)  # conv2d, max_pool2d


def window(call: Call, dim: int) -> Window:
    """Which rows of dim `dim` of the image each output row of a convolution or pool reads, at the planned sizes."""
    arguments, at = given(call), dim - len(call.ins[IMAGE].shape)
    kernel = int(call.ins[1].shape[at]) if "weight" in arguments else _each(arguments["kernel_size"], at)
    reach = _each(arguments.get("dilation", 1), at) * (kernel - 1) + 1
    stride = kernel if arguments["stride"] in ([], ()) else _each(arguments["stride"], at)
    return Window(call.ins[IMAGE].sizes[at], call.outs[0].sizes[at], reach, stride, padding(call, dim))


def padding(call: Call, dim: int) -> int:
    """Rows of padding before dim `dim`; "same" with an odd sum has the smaller half there."""
    arguments, at = given(call), dim - len(call.ins[IMAGE].shape)
    if arguments["padding"] == "same":
        return _each(arguments["dilation"], at) * (int(call.ins[1].shape[at]) - 1) // 2
    return 0 if arguments["padding"] == "valid" else _each(arguments["padding"], at)


def paddings(call: Call, cut: Collection[int]) -> list[int]:
    """Padding per spatial dim that the operator itself does: 0 for the dims in `cut`, which the runtime pads."""
    return [0 if d in cut else padding(call, d) for d in spatial(call)]


def _each(value: Any, at: int) -> int:
    """The value for dim `at`, counted from the end, of an argument with one value for each dim or one for all."""
    return int(value[at if len(value) > 1 else 0]) if isinstance(value, (list, tuple)) else int(value)


def _exact(call: Call, dim: int) -> bool:
    """Whether explicit padding gives the same numbers as the operator's own, whatever the symbolic sizes. Means do not
    if they exclude padding, or rows behind the padding that ceil_mode adds."""
    arguments, read, size = given(call), window(call, dim), call.ins[IMAGE].shape[dim]
    if "count_include_pad" not in arguments or arguments.get("divisor_override"):
        return True
    if read.padding and not arguments["count_include_pad"]:
        return False
    if isinstance(size, int):
        return read.end <= read.size + read.padding
    # windows end with the padding
    return not arguments["ceil_mode"] or quotient(size + 2 * read.padding - read.reach, read.stride) is not None


def _on(site: Site, axis: int) -> tuple[int, Window]:
    """The dim that the halo on `axis` cuts, and its window."""
    assert site.call is not None, "a halo of a call that is not there"
    dim = dim_of(site.options[axis].ins[IMAGE].value)
    return dim, window(site.call, dim)


def _here(site: Site) -> tuple[int, Window]:
    """`_on` for the axis of the site."""
    return _on(site, site.axis)


def _longest(site: Site, axis: int) -> tuple[int, int]:
    """The dim that the halo on `axis` cuts, and how many of its rows the first rank reads; no rank reads more."""
    dim, read = _on(site, axis)
    return dim, read.length(chunk(read.outs, site.sizes[axis], 0)[1])


def _row_bytes(site: Site) -> float:
    """Bytes of one row on one rank. The halos of earlier axes have been received by then, so a row includes their rows
    (the corners)."""
    image = site.operands[IMAGE]
    grown = dict(_longest(site, axis) for axis, option in enumerate(site.options[: site.axis]) if option.run == NAME)
    others = [d for d in range(len(image.shape)) if d != _here(site)[0]]
    return math.prod(grown[d] if d in grown else site.local(IMAGE, d) for d in others) * image.itemsize


def _sent_bytes(site: Site) -> float:
    """Bytes that a rank sends in the forward, at most."""
    return _here(site)[1].most_sent(site.ways) * _row_bytes(site)


def _returned_bytes(site: Site) -> float:
    """Bytes of gradients that a rank sends back in the backward, at most: those of the rows that it received."""
    return _here(site)[1].most_received(site.ways) * _row_bytes(site)


def _sends(site: Site) -> int:
    return int(_here(site)[1].most_sent(site.ways) > 0)


def _returns(site: Site) -> int:
    return _sends(site) if site.operands[IMAGE].grad else 0


def _copy_bytes(site: Site) -> float:
    """Bytes of the image with its halo, a copy that the backward keeps; counted for the last axis whose halo makes a
    copy."""
    making = [
        axis
        for axis, option in enumerate(site.options)
        if option.run == NAME and not _on(site, axis)[1].plain(site.sizes[axis])
    ]
    return _longest(site, site.axis)[1] * _row_bytes(site) if making[-1:] == [site.axis] else 0.0


def _moved_bytes(site: Site) -> float:
    """Bytes to write and read the copy."""
    return 2 * _copy_bytes(site)


FORWARD = (InnerCollective("send", _sent_bytes, _sends),)
BACKWARD = (InnerCollective("send", _returned_bytes, _returns, last=True),)
INSIDE = Inside(_copy_bytes, _moved_bytes)
