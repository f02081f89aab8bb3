"""Convolutions and pools with a spatial dim cut: when it can be, and what ranks send (autopar.runtime.algorithms.halo).

Input and output are cut by one axis; each rank gets the rows of its neighbours that its outputs read, and pads where
the image ends.
"""

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
    """The spatial dims of a convolution or pool that an axis of `ways` ranks may cut: those whose windows reach no
    farther than the ranks beside. "same" with an odd sum of paddings cannot be written with numbers for the dims that
    stay whole."""
    cut = [d for d in spatial(call) if _exact(call, d) and window(call, d).borders_only(ways)]
    if not call.ins[IMAGE].floating or (
        given(call)["padding"] == "same" and any((window(call, d).reach - 1) % 2 for d in spatial(call))
    ):
        return ()
    first = spatial(call)[0]
    return tuple(((f"h{d - first}", f"p{d - first}"), NAME) for d in cut)


def spatial(call: Call) -> range:
    """The dims of the image that windows go over."""
    rank, arguments = len(call.ins[IMAGE].shape), given(call)
    if "weight" in arguments:
        return range(rank - len(call.ins[1].shape) + 2, rank)
    return range(rank - int(call.target._schema.name.removesuffix("d")[-1]), rank)  # max_pool2d


def window(call: Call, dim: int) -> Window:
    """Which rows of dim `dim` of its image a convolution or pool reads, at the planned sizes."""
    arguments, at = given(call), dim - len(call.ins[IMAGE].shape)
    kernel = int(call.ins[1].shape[at]) if "weight" in arguments else _each(arguments["kernel_size"], at)
    reach = _each(arguments.get("dilation", 1), at) * (kernel - 1) + 1
    stride = kernel if arguments["stride"] in ([], ()) else _each(arguments["stride"], at)
    return Window(call.ins[IMAGE].sizes[at], call.outs[0].sizes[at], reach, stride, padding(call, dim))


def padding(call: Call, dim: int) -> int:
    """Rows of padding in front of dim `dim` ("same" has the smaller half there)."""
    arguments, at = given(call), dim - len(call.ins[IMAGE].shape)
    if arguments["padding"] == "same":
        return _each(arguments["dilation"], at) * (int(call.ins[1].shape[at]) - 1) // 2
    return 0 if arguments["padding"] == "valid" else _each(arguments["padding"], at)


def paddings(call: Call, cut: Collection[int]) -> list[int]:
    """Padding per spatial dim that is left to the operator where the dims `cut` are padded by hand."""
    return [0 if d in cut else padding(call, d) for d in spatial(call)]


def _each(value: Any, at: int) -> int:
    """The number for dim `at`, counted from the back, of an argument that may have one for all dims."""
    return int(value[at if len(value) > 1 else 0]) if isinstance(value, (list, tuple)) else int(value)


def _exact(call: Call, dim: int) -> bool:
    """Whether padding by hand gives what the operator's own gives, whatever the symbols: means do not count rows behind
    the padding, or any padding."""
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
    """The dim that a halo on `axis` cuts, and its window."""
    assert site.call is not None, "a halo of a call that is not there"
    dim = dim_of(site.options[axis].ins[IMAGE].value)
    return dim, window(site.call, dim)


def _here(site: Site) -> tuple[int, Window]:
    """The same on the axis of the site."""
    return _on(site, site.axis)


def _longest(site: Site, axis: int) -> tuple[int, int]:
    """The dim that a halo on `axis` cuts, and how many rows the first rank, none has more, reads of it."""
    dim, read = _on(site, axis)
    return dim, read.length(chunk(read.outs, site.sizes[axis], 0)[1])


def _row_bytes(site: Site) -> float:
    """Bytes of one row on one rank: borders of earlier axes are there already, so corners are sent with it."""
    image = site.operands[IMAGE]
    grown = dict(_longest(site, axis) for axis, option in enumerate(site.options[: site.axis]) if option.run == NAME)
    others = [d for d in range(len(image.shape)) if d != _here(site)[0]]
    return math.prod(grown[d] if d in grown else site.local(IMAGE, d) for d in others) * image.itemsize


def _sent_bytes(site: Site) -> float:
    return _here(site)[1].most_sent(site.ways) * _row_bytes(site)


def _returned_bytes(site: Site) -> float:
    """Gradients go back to where rows came from."""
    return _here(site)[1].most_received(site.ways) * _row_bytes(site)


def _sends(site: Site) -> int:
    return int(_here(site)[1].most_sent(site.ways) > 0)


def _returns(site: Site) -> int:
    return _sends(site) if site.operands[IMAGE].grad else 0


def _copy_bytes(site: Site) -> float:
    """The image with its borders, which is what the backward keeps: counted on the last axis that makes one."""
    making = [
        axis
        for axis, option in enumerate(site.options)
        if option.run == NAME and not _on(site, axis)[1].plain(site.sizes[axis])
    ]
    return _longest(site, site.axis)[1] * _row_bytes(site) if making[-1:] == [site.axis] else 0.0


def _moved_bytes(site: Site) -> float:
    """The copy is written and read."""
    return 2 * _copy_bytes(site)


FORWARD = (InnerCollective("send", _sent_bytes, _sends),)
BACKWARD = (InnerCollective("send", _returned_bytes, _returns, last=True),)
INSIDE = Inside(_copy_bytes, _moved_bytes)
