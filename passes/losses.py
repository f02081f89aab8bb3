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
    does: cross-entropies become `ops.cross_entropy_sum` over `ops.count_valid`, or over `ops.weigh_valid` where classes
    have weights; those against probabilities become plain operators; other mean losses sum over number. gives: losses
    without a mean, on unflattened logits and labels; of float16 means of terms or sums in float32, for a sum, or a
    number of labels, may leave float16's range.
    """
    return edit.rewrite(gm, LOSSES)


def _cross_entropy(node: fx.Node) -> fx.Node | None:
    given = edit.args_of(node)
    if facts.is_float(given["target"]):
        return _of_probabilities(node, given)
    return _split_cross_entropy(node, given["self"], given, given["label_smoothing"])


def _nll(node: fx.Node) -> fx.Node | None:
    """nll_loss of a log_softmax over the classes is a cross-entropy, of logits in the dtype that the log_softmax is
    asked for."""
    given = edit.args_of(node)
    log_probabilities = given["self"]
    rank = len(facts.shape(log_probabilities))
    if log_probabilities.target is aten.log_softmax.int and log_probabilities.args[1] % rank == min(1, rank - 1):
        return _split_cross_entropy(
            node, _cast(log_probabilities.args[0], facts.dtype(log_probabilities), node), given, 0.0
        )
    if given["reduction"] != _MEAN:
        return None
    given = {**given, **{name: _summed(given[name], given, node) for name in ("self", "weight")}}
    return _over_valid(node, _reduced(node, given, _SUM), given["target"], given)


def _split_cross_entropy(node: fx.Node, logits: fx.Node, given: dict[str, Any], smoothing: float) -> fx.Node:
    labels, reduction, graph = given["target"], given["reduction"], node.graph
    given = {**given, "weight": _summed(given["weight"], given, node)}
    options = (given["ignore_index"], smoothing, *([] if given["weight"] is None else [given["weight"]]))
    if len(facts.shape(logits)) > 2:  # [n, v, ...]: classes last
        logits = edit.call(graph, aten.movedim.int, (logits, 1, -1), like=node)
    if reduction == _NONE:
        return edit.call(graph, ops.cross_entropy_each, (logits, labels, *options), like=node)
    logits, labels = _unflattened(logits, labels)
    total = edit.call(graph, ops.cross_entropy_sum, (_summed(logits, given, node), labels, *options), like=node)
    return total if reduction == _SUM else _over_valid(node, total, labels, given)


def _over_valid(node: fx.Node, total: fx.Node, labels: fx.Node, given: dict[str, Any]) -> fx.Node:
    """`total` divided by the number of valid labels, or by the sum of their weights."""
    graph, ignored, weight = node.graph, given["ignore_index"], given["weight"]
    if weight is None:
        count = edit.call(graph, ops.count_valid, (labels, ignored), {"dtype": facts.dtype(total)}, like=node)
    else:
        count = edit.call(graph, ops.weigh_valid, (labels, weight, ignored), like=node)
    return _cast(edit.call(graph, aten.div.Tensor, (total, count), like=node), facts.dtype(node), node)


def _summed(x: Any, given: dict[str, Any], node: fx.Node) -> Any:
    """`x`, None or an operand of the loss `node`, in the dtype in which the terms of a mean are added up: float32 for
    float16."""
    return (
        _cast(x, torch.float32, node)
        if x is not None and given["reduction"] == _MEAN and facts.dtype(x) == torch.float16
        else x
    )


def _cast(x: fx.Node, dtype: torch.dtype, node: fx.Node) -> fx.Node:
    return x if facts.dtype(x) == dtype else edit.call(node.graph, aten.to.dtype, (x, dtype), like=node)


def _of_probabilities(node: fx.Node, given: dict[str, Any]) -> fx.Node | None:
    """A cross-entropy against probabilities of classes: plain operators, as torch has it; its mean is over positions,
    with weights of classes or without."""
    logits, wanted, weight, graph = given["self"], given["target"], given["weight"], node.graph
    dim = min(1, len(facts.shape(logits)) - 1)
    classes = facts.shape(logits)[dim]
    if not isinstance(classes, int):
        return None
    if dim == len(facts.shape(logits)) - 1 and given["reduction"] != _NONE:
        logits, wanted = _unflattened(logits, wanted, 0)
        dim = len(facts.shape(logits)) - 1
    logits, wanted, weight = (_summed(x, given, node) for x in (logits, wanted, weight))

    def call(target: Any, *args: Any) -> fx.Node:
        return edit.call(graph, target, args, like=node)

    if given["label_smoothing"] > 0:
        wanted = call(
            aten.add.Scalar,
            call(aten.mul.Scalar, wanted, 1 - given["label_smoothing"]),
            given["label_smoothing"] / classes,
        )
    terms = call(aten.mul.Tensor, call(aten.log_softmax.int, logits, dim), wanted)
    if weight is not None:
        rank = len(facts.shape(logits))
        terms = call(
            aten.mul.Tensor,
            terms,
            weight
            if dim == rank - 1
            else call(aten.reshape.default, weight, [classes if d == dim else 1 for d in range(dim, rank)]),
        )
    if given["reduction"] == _NONE:
        return call(aten.neg.default, call(aten.sum.dim_IntList, terms, [dim]))
    total = call(aten.neg.default, call(aten.sum.default, terms))
    if given["reduction"] == _SUM:
        return total
    sizes = [edit.size(logits, d) for d in range(len(facts.shape(logits))) if d != dim]
    return _cast(call(aten.div.Tensor, total, edit.product(graph, sizes, like=node)), facts.dtype(node), node)


def _unflattened(logits: fx.Node, labels: fx.Node, beside: int = 1) -> tuple[fx.Node, fx.Node]:
    """Both without the reshapes that merge batch and sequence, when their sizes then still agree; labels lack as many
    dims as `beside` says."""
    wide = flattened(logits)
    source = labels.args[0] if labels.target is aten.reshape.default else None
    if (
        wide is not None
        and isinstance(source, fx.Node)
        and facts.shape(wide)[: len(facts.shape(wide)) - beside] == facts.shape(source)
    ):
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
    other = shape != facts.shape(operand)[: len(shape)]  # the other operands are larger
    if facts.dtype(terms) == torch.float16 and not other:
        # their sum would be in float16: the pass `means` takes it in float32
        return edit.call(node.graph, aten.mean.default, (terms,), like=node)
    node.graph.erase_node(terms)
    if other:
        return None
    total = _reduced(node, given, _SUM)
    count = edit.product(node.graph, [edit.size(operand, dim) for dim in range(len(shape))], like=node)
    return edit.call(node.graph, aten.div.Tensor, (total, count), like=node)


def _reduced(node: fx.Node, given: dict[str, Any], reduction: int) -> fx.Node:
    """The loss `node` with another reduction."""
    values = {**given, "reduction": reduction}
    named = {argument.name for argument in node.target._schema.arguments if argument.kwarg_only}  # type: ignore[union-attr]
    args = tuple(value for name, value in values.items() if name not in named)
    return edit.call(node.graph, node.target, args, {name: values[name] for name in named}, like=node)  # type: ignore[arg-type]


MEANS = (
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
    aten.cosine_embedding_loss.default, aten.hinge_embedding_loss.default,
    aten.huber_loss.default, aten.kl_div.default, aten.l1_loss.default, aten.margin_ranking_loss.default,
    aten.mse_loss.default, aten.multi_margin_loss.default,
    aten.multilabel_margin_loss.default, aten.poisson_nll_loss.default, aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default, aten.triplet_margin_loss.default,
)  # fmt: skip
"""Losses that are the mean of their terms."""

LOSSES: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    **dict.fromkeys(MEANS, _mean),
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss.default: _nll,
    aten.nll_loss_nd.default: _nll,
}
