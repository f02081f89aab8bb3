"""Mean losses as a quotient of a sum and a count.

The mean over ranks of each rank's mean is wrong where ranks have different numbers of valid labels. Sum and count are
partial sums; the quotient is taken of the reduced ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops
from passes.sink_flatten import flattened
from passes.tables import MEAN, NONE, SUM

aten = torch.ops.aten


def losses(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops, every change of sizes spelled `reshape`.
    does: cross-entropies become `ops.cross_entropy_sum` divided by `ops.count_valid`, or by `ops.weigh_valid` where
           classes have weights; those against probabilities become plain operators; other mean losses become a sum
           divided by the number of terms.
    gives: losses without a mean, on logits and labels that are not flattened. In float16, the sums and counts of a mean
           are in float32, because they may exceed float16's range."""
    return edit.rewrite(gm, LOSSES)


def _cross_entropy(node: fx.Node) -> fx.Node | None:
    """cross_entropy_loss without a mean: against class numbers as `_split_cross_entropy`, against probabilities as
    plain operators."""
    given = edit.args_of(node)
    if facts.is_float(given["target"]):
        return _of_probabilities(node, given)
    return _split_cross_entropy(node, given["self"], given, given["label_smoothing"])


def _nll(node: fx.Node) -> fx.Node | None:
    """nll_loss of a log_softmax over the classes, as a cross-entropy of the logits in the dtype of the log_softmax."""
    given = edit.args_of(node)
    log_probabilities = given["self"]
    rank = facts.rank(log_probabilities)
    if log_probabilities.target is aten.log_softmax.int and log_probabilities.args[1] % rank == min(1, rank - 1):
        logits = edit.cast(log_probabilities.args[0], facts.dtype(log_probabilities), like=node)
        return _split_cross_entropy(node, logits, given, 0.0)
    if given["reduction"] != MEAN:
        return None
    given = {**given, **{name: _summed(given[name], given, node) for name in ("self", "weight")}}
    return _over_valid(node, _reduced(node, given, SUM), given["target"], given)


def _split_cross_entropy(node: fx.Node, logits: fx.Node, given: dict[str, Any], smoothing: float) -> fx.Node:
    """A cross-entropy of logits against class numbers, as `ops.cross_entropy_sum` (a mean: divided by the valid labels)
    or `ops.cross_entropy_each`."""
    labels, reduction = given["target"], given["reduction"]
    given = {**given, "weight": _summed(given["weight"], given, node)}
    options = (given["ignore_index"], smoothing, *([] if given["weight"] is None else [given["weight"]]))
    if facts.rank(logits) > 2:  # [n, v, ...]: classes last
        logits = edit.call(node, aten.permute.default, logits, [0, *range(2, facts.rank(logits)), 1])
    if reduction == NONE:
        return edit.call(node, ops.cross_entropy_each, logits, labels, *options)
    logits, labels = _unflattened(logits, labels)
    total = edit.call(node, ops.cross_entropy_sum, _summed(logits, given, node), labels, *options)
    return total if reduction == SUM else _over_valid(node, total, labels, given)


def _over_valid(node: fx.Node, total: fx.Node, labels: fx.Node, given: dict[str, Any]) -> fx.Node:
    """`total` divided by the number of labels that are not ignored, or by the sum of the weights of their classes."""
    ignored, weight = given["ignore_index"], given["weight"]
    if weight is None:
        count = edit.call(node, ops.count_valid, labels, ignored, dtype=facts.dtype(total))
    else:
        count = edit.call(node, ops.weigh_valid, labels, weight, ignored)
    return edit.cast(edit.call(node, aten.div.Tensor, total, count), facts.dtype(node), like=node)


def _summed(x: Any, given: dict[str, Any], node: fx.Node) -> Any:
    """`x` (an operand of the loss `node`, or None) in the dtype in which a mean's terms are summed: float32 for
    float16."""
    return (
        edit.cast(x, torch.float32, like=node)
        if x is not None and given["reduction"] == MEAN and facts.dtype(x) == torch.float16
        else x
    )


def _of_probabilities(node: fx.Node, given: dict[str, Any]) -> fx.Node | None:
    """A cross-entropy against class probabilities as plain operators, as torch computes it. Its mean is over positions,
    with or without class weights."""
    logits, wanted, weight = given["self"], given["target"], given["weight"]
    dim = min(1, facts.rank(logits) - 1)
    classes = facts.shape(logits)[dim]
    if not isinstance(classes, int):
        return None
    if dim == facts.rank(logits) - 1 and given["reduction"] != NONE:
        logits, wanted = _unflattened(logits, wanted, 0)
        dim = facts.rank(logits) - 1
    logits, wanted, weight = (_summed(x, given, node) for x in (logits, wanted, weight))
    call = partial(edit.call, node)
    if given["label_smoothing"] > 0:
        wanted = call(
            aten.add.Scalar,
            call(aten.mul.Scalar, wanted, 1 - given["label_smoothing"]),
            given["label_smoothing"] / classes,
        )
    terms = call(aten.mul.Tensor, call(aten.log_softmax.int, logits, dim), wanted)
    if weight is not None:
        rank = facts.rank(logits)
        terms = call(
            aten.mul.Tensor,
            terms,
            weight
            if dim == rank - 1
            else call(aten.reshape.default, weight, [classes if d == dim else 1 for d in range(dim, rank)]),
        )
    if given["reduction"] == NONE:
        return call(aten.neg.default, call(aten.sum.dim_IntList, terms, [dim]))
    total = call(aten.neg.default, call(aten.sum.default, terms))
    if given["reduction"] == SUM:
        return total
    sizes = [edit.size(logits, d) for d in range(facts.rank(logits)) if d != dim]
    return edit.cast(call(aten.div.Tensor, total, edit.product(node, sizes)), facts.dtype(node), like=node)


def _unflattened(logits: fx.Node, labels: fx.Node, beside: int = 1) -> tuple[fx.Node, fx.Node]:
    """Logits and labels without the reshapes that merge batch and sequence, where their sizes then still agree; labels
    have `beside` dims fewer than logits."""
    wide = flattened(logits)
    source = labels.args[0] if labels.target is aten.reshape.default else None
    if (
        wide is not None
        and isinstance(source, fx.Node)
        and facts.shape(wide)[: facts.rank(wide) - beside] == facts.shape(source)
    ):
        return wide, source
    return logits, labels


def _mean(node: fx.Node) -> fx.Node | None:
    """A mean loss as its sum divided by the number of terms: one per element, or one per row, of the first operand."""
    given = edit.args_of(node)
    if given["reduction"] != MEAN:
        return None
    operand = edit.tensor_operands(node)[0]
    terms = _reduced(node, given, NONE)
    shape = facts.shape(terms)
    other = shape != facts.shape(operand)[: len(shape)]  # the other operands are larger
    if facts.dtype(terms) == torch.float16 and not other:
        # their sum would be in float16: the pass `means` takes it in float32
        return edit.call(node, aten.mean.default, terms)
    node.graph.erase_node(terms)
    if other:
        return None
    total = _reduced(node, given, SUM)
    count = edit.product(node, [edit.size(operand, dim) for dim in range(len(shape))])
    return edit.call(node, aten.div.Tensor, total, count)


def _reduced(node: fx.Node, given: dict[str, Any], reduction: int) -> fx.Node:
    """The loss `node` with another reduction."""
    args, kwargs = edit.given_by_name(node, {**given, "reduction": reduction})
    return edit.call(node, node.target, *args, **kwargs)


MEANS = (
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
    aten.cosine_embedding_loss.default, aten.hinge_embedding_loss.default,
    aten.huber_loss.default, aten.kl_div.default, aten.l1_loss.default, aten.margin_ranking_loss.default,
    aten.mse_loss.default, aten.multi_margin_loss.default,
    aten.multilabel_margin_loss.default, aten.poisson_nll_loss.default, aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default, aten.triplet_margin_loss.default,
)  # fmt: skip
"""Losses whose default is the mean of their terms."""

LOSSES: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    **dict.fromkeys(MEANS, _mean),
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss.default: _nll,
    aten.nll_loss_nd.default: _nll,
}
"""Losses -> a function that writes a call without a mean; None: the call stays."""
