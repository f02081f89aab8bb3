"""Covariances and correlations (`torch.cov`, `torch.corrcoef`) as matmuls of the centred observations. Used by
composed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten


def _covariance(node: fx.Node) -> fx.Node | None:
    """torch.cov of several real variables without weights."""
    given = edit.args_of(node)
    weighted = given.get("fweights") is not None or given.get("aweights") is not None
    return None if weighted or not _is_plain(given["self"]) else _products(given["self"], given["correction"], node)


def _correlation(node: fx.Node) -> fx.Node | None:
    """torch.corrcoef: the covariance divided by both standard deviations."""
    operand = edit.args_of(node)["self"]
    if not _is_plain(operand):
        return None
    found = _products(operand, 1, node)
    deviation = edit.call(node, aten.sqrt.default, edit.call(node, aten.diagonal.default, found))
    for dim in (1, 0):
        found = edit.call(node, aten.div.Tensor, found, edit.call(node, aten.unsqueeze.default, deviation, dim))
    return edit.call(node, aten.clamp.default, found, -1, 1)


def _is_plain(operand: fx.Node) -> bool:
    """Whether there are several variables in rows, of real numbers."""
    return facts.rank(operand) == 2 and facts.shape(operand)[0] != 1 and facts.dtype(operand).is_floating_point


def _products(operand: fx.Node, correction: int, node: fx.Node) -> fx.Node:
    """Products of the variables with each other, over as many observations as there are, less `correction`."""
    mean = edit.call(node, aten.mean.dim, operand, [1], True)
    left = edit.call(node, aten.sub.Tensor, operand, mean)
    product = edit.call(node, aten.matmul.default, left, edit.call(node, aten.transpose.int, left, 0, 1))
    count = edit.size(operand, 1)
    number = count - correction if isinstance(count, int) else edit.call(node, operator.sub, count, correction)
    return edit.call(node, aten.div.Tensor, product, number)


COVARIANCES: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    aten.cov.default: _covariance,
    aten.corrcoef.default: _correlation,
}
"""Operators that `passes.composed` replaces by these; calls with weights stay."""
