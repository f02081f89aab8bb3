"""Operators that pad their first operand and keep the padded copy: convolutions and Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import sympy
import torch
from torch import fx

from passes import edit, facts
from passes.facts import Size

aten = torch.ops.aten


def _evenly(node: fx.Node) -> Mapping[int, Size]:
    """A convolution of padding "same": a row where the sum of both paddings of a dim is odd, because kernels pad both
    sides alike (Convolution.cpp, _convolution_same)."""
    given, kernel = edit.args_of(node), facts.shape(edit.tensor_operands(node)[1])[2:]
    dilation = given["dilation"] if len(given["dilation"]) == len(kernel) else given["dilation"] * len(kernel)
    rows = [each * (size - 1) % 2 for each, size in zip(dilation, kernel, strict=True)]
    return {dim - len(rows): more for dim, more in enumerate(rows) if more} if given["padding"] == "same" else {}


def _to_sizes(node: fx.Node) -> Mapping[int, Size]:
    """A Fourier transform of given sizes: zeros up to these. Dims that are cut to their size are smaller in the copy;
    where no dim grows there is none."""
    given = edit.args_of(node)
    wanted, sizes = given["n"] if "n" in given else given["s"], facts.shape(edit.tensor_operands(node)[0])
    if wanted is None:
        return {}
    wanted, dims = ([wanted], [given["dim"]]) if "n" in given else (wanted, given["dim"])
    dims = range(-len(wanted), 0) if dims is None else dims
    found = {dim: _more(size, sizes[dim]) for dim, size in zip(dims, wanted, strict=True)}
    return found if any(not isinstance(more, int) or more > 0 for more in found.values()) else {}


def _more(wanted: int | fx.Node, size: Size) -> Size:
    """By how much a number, or what a node says, is larger than a size; of formulas 0 where it is smaller."""
    number = facts.as_size(facts.value(wanted), wanted.graph.owning_module) if isinstance(wanted, fx.Node) else wanted
    if isinstance(size, int) and isinstance(number, int):
        return number - size
    return sympy.Max(0, number - size)


PADDED: dict[Any, Callable[[fx.Node], Mapping[int, Size]]] = {
    **dict.fromkeys((aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding), _evenly),
    **dict.fromkeys(
        (
            aten.fft_fft.default,
            aten.fft_ifft.default,
            aten.fft_ihfft.default,
            aten.fft_rfft.default,
            aten.fft_rfft2.default,
            aten.fft_rfftn.default,
        ),
        _to_sizes,
    ),
}
"""Operator -> the rows that it adds to dims of its first operand."""


def added_bytes(node: fx.Node) -> Size:
    """By how many bytes the copy that a call keeps is larger than its first operand; 0 where it pads nothing."""
    more = PADDED[node.target](node) if node.target in PADDED else {}
    if not more:
        return 0
    operand = edit.tensor_operands(node)[0]
    sizes = facts.shape(operand)
    grown = {dim % len(sizes): rows for dim, rows in more.items()}
    return (prod(size + grown.get(dim, 0) for dim, size in enumerate(sizes)) - prod(sizes)) * facts.dtype(
        operand
    ).itemsize
