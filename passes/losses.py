"""Mean losses as (sum, count): the only form in which a split loss is exact.

A mean of means over ranks is wrong when ranks hold different numbers of valid labels. Sum and count are partial sums;
their quotient is taken after the reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops
from passes.sink_flatten import flattened

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2


def losses(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops, every change of sizes spelled `reshape`.
    does: cross-entropies become `ops.cross_entropy_sum` over `ops.count_valid`; other mean losses sum over number.
    gives: losses without a mean, on unflattened logits and labels; those with class weights stay as they are.
    """
    for node in edit.calls(gm):
        if node.target in LOSSES:
            with edit.before(node):
                new = LOSSES[node.target](node)
            if new is not None:
                edit.replace(node, new)
    return edit.finish(gm)


def _cross_entropy(node: fx.Node) -> fx.Node | None:
    given = edit.args_of(node)
    logits, labels = given["self"], given["target"]
    if given["weight"] is not None or facts.is_float(labels):
        return None
    return _split_cross_entropy(node, logits, labels, given, given["label_smoothing"])


def _nll(node: fx.Node) -> fx.Node | None:
    """nll_loss of a log_softmax over the classes is a cross-entropy."""
    given = edit.args_of(node)
    log_probabilities, labels = given["self"], given["target"]
    if given["weight"] is not None or log_probabilities.target is not aten.log_softmax.int:
        return None
    logits, dim = log_probabilities.args[0], log_probabilities.args[1]
    rank = len(facts.shape(logits))
    if dim % rank != min(1, rank - 1):
        return None
    return _split_cross_entropy(node, logits, labels, given, 0.0)


def _split_cross_entropy(
    node: fx.Node, logits: fx.Node, labels: fx.Node, given: dict[str, Any], smoothing: float
) -> fx.Node:
    ignored, reduction = given["ignore_index"], given["reduction"]
    graph = node.graph
    if len(facts.shape(logits)) > 2:  # [n, v, ...]: classes last
        logits = edit.call(graph, aten.movedim.int, (logits, 1, -1), like=node)
    if reduction == _NONE:
        return edit.call(graph, ops.cross_entropy_each, (logits, labels, ignored, smoothing), like=node)
    logits, labels = _unflattened(logits, labels)
    total = edit.call(graph, ops.cross_entropy_sum, (logits, labels, ignored, smoothing), like=node)
    if reduction == _SUM:
        return total
    dtype = {"dtype": facts.dtype(total)}
    count = edit.call(graph, ops.count_valid, (labels, ignored), dtype, like=node)
    return edit.call(graph, aten.div.Tensor, (total, count), like=node)


def _unflattened(logits: fx.Node, labels: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Both without the reshapes that merge batch and sequence, when their sizes then still agree."""
    wide = flattened(logits)
    source = labels.args[0] if labels.target is aten.reshape.default else None
    if wide is not None and isinstance(source, fx.Node) and facts.shape(wide)[:-1] == facts.shape(source):
        return wide, source
    return logits, labels


def _mean(node: fx.Node) -> fx.Node | None:
    """mean -> sum over the number of terms, for losses of one term per element, or per row, of the first operand."""
    given = edit.args_of(node)
    if given["reduction"] != _MEAN:
        return None
    operand = edit.tensor_operands(node)[0]
    terms = _reduced(node, given, _NONE)
    shape = facts.shape(terms)
    node.graph.erase_node(terms)
    if shape != facts.shape(operand)[:len(shape)]:  # the other operands are larger
        return None
    total = _reduced(node, given, _SUM)
    count = edit.product(node.graph, [edit.size(operand, dim) for dim in range(len(shape))], like=node)
    return edit.call(node.graph, aten.div.Tensor, (total, count), like=node)


def _reduced(node: fx.Node, given: dict[str, Any], reduction: int) -> fx.Node:
    """The same loss, its terms put together otherwise."""
    values = {**given, "reduction": reduction}
    named = {argument.name for argument in node.target._schema.arguments if argument.kwarg_only}  # type: ignore[union-attr]
    args = tuple(value for name, value in values.items() if name not in named)
    return edit.call(node.graph, node.target, args, {name: values[name] for name in named}, like=node)  # type: ignore[arg-type]


MEANS = (
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default, aten.cosine_embedding_loss.default, aten.hinge_embedding_loss.default,
    aten.huber_loss.default, aten.kl_div.default, aten.l1_loss.default, aten.margin_ranking_loss.default, aten.mse_loss.default, aten.multi_margin_loss.default,
    aten.multilabel_margin_loss.default, aten.poisson_nll_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default, aten.triplet_margin_loss.default,
)  # fmt: skip
"""Losses that are the mean of their terms."""

LOSSES: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    **dict.fromkeys(MEANS, _mean),
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss.default: _nll,
    aten.nll_loss_nd.default: _nll,
}
