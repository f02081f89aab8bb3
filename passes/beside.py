"""What kernels keep for the backward beside operands and results: masks, statistics, indices, counts. In bytes, as formulas in the symbols of the sizes.

An operator with a row here is not left out where a block is run again, although nobody needs its result: its backward needs what running it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops
from passes.facts import Size

aten = torch.ops.aten

STATISTIC_BYTES = 4
"""Attention and normalisation keep float32 statistics."""
COUNT_BYTES = 8
"""Indices and counts are int64."""


def _shape(node: fx.Node) -> tuple[Size, ...]:
    """Sizes of the first result."""
    return facts.shape(node, 0 if isinstance(facts.value(node), (tuple, list)) else None)


def _elements(itemsize: int) -> Callable[[fx.Node], Size]:
    """One for each element of the result."""
    return lambda node: itemsize * facts.numel(node)


def _normalized(statistics: int) -> Callable[[fx.Node], Size]:
    """Of each row that is normalized."""
    return lambda node: statistics * STATISTIC_BYTES * prod(_shape(node)[: -len(edit.args_of(node)["normalized_shape"])])


def _groups(node: fx.Node) -> Size:
    """Mean and deviation of each group of each sample."""
    return 2 * STATISTIC_BYTES * _shape(node)[0] * edit.args_of(node)["num_groups"]


def _channels(node: fx.Node) -> Size:
    """Mean and deviation of each channel."""
    return 2 * STATISTIC_BYTES * _shape(node)[1]


def _channels_of_samples(node: fx.Node) -> Size:
    return _channels(node) * _shape(node)[0]


def _attention(node: fx.Node) -> Size:
    """The logarithm of the sum of each row."""
    return STATISTIC_BYTES * prod(_shape(node)[:-1])


def _bags(node: fx.Node) -> Size:
    """Of each row in a bag whose it is; of each bag where its rows are, how many, and a maximum."""
    chosen = edit.tensor_operands(node)[1]
    return COUNT_BYTES * (facts.numel(chosen) + 3 * prod(_shape(node)[:-1]))


def _triplets(node: fx.Node) -> Size:
    """The differences, their norms, and what is clamped."""
    count, first = (3 if edit.args_of(node)["swap"] else 2), edit.tensor_operands(node)[0]
    return count * facts.nbytes(first) + (count + 1) * (facts.nbytes(first) // facts.shape(first)[-1])


def _first(node: fx.Node) -> Size:
    """As much as the first operand."""
    return facts.nbytes(edit.tensor_operands(node)[0])


def _second(node: fx.Node) -> Size:
    """As much as the second operand."""
    return facts.nbytes(edit.tensor_operands(node)[1])


def _recurrent(each: int) -> Callable[[fx.Node], Size]:
    """Gates and states of each layer at each position."""
    return lambda node: each * edit.args_of(node)["num_layers"] * facts.tensors(node)[0].element_size() * prod(_shape(node))


BESIDE: dict[Any, Callable[[fx.Node], Size]] = {
    aten._weight_norm.default: _second,
    aten.batch_norm.default: _channels,
    aten.dropout.default: _elements(1),  # the mask (autopar/runtime/algorithms/dropout.py)
    aten.embedding_bag.padding_idx: _bags,
    aten.group_norm.default: _groups,
    aten.gru.input: _recurrent(4),
    aten.instance_norm.default: _channels_of_samples,
    aten.layer_norm.default: _normalized(2),
    aten.log_sigmoid.default: facts.nbytes,
    aten.lstm.input: _recurrent(6),
    aten.hinge_embedding_loss.default: lambda node: _first(node) + 2 * facts.numel(edit.tensor_operands(node)[0]),  # of what is clamped, and two masks
    aten.l1_loss.default: _first,  # the differences
    aten.margin_ranking_loss.default: lambda node: 2 * _first(node),  # the differences, before it clamps them in place, and the targets' signs turned
    aten.max_pool1d.default: _elements(COUNT_BYTES),
    aten.max_pool2d.default: _elements(COUNT_BYTES),
    aten.max_pool3d.default: _elements(COUNT_BYTES),
    aten.multilabel_margin_loss.default: _first,
    aten.pairwise_distance.default: _first,
    aten.poisson_nll_loss.default: _first,  # the exponentials, or the logarithms
    aten.triplet_margin_loss.default: _triplets,
    aten.native_layer_norm.default: _normalized(2),
    aten.nll_loss.default: lambda node: STATISTIC_BYTES,
    aten.nll_loss_nd.default: lambda node: STATISTIC_BYTES,
    aten.cross_entropy_loss.default: _first,
    aten.rms_norm.default: _normalized(1),
    aten.rnn_relu.input: _recurrent(1),
    aten.rnn_tanh.input: _recurrent(1),
    aten.rrelu.default: facts.nbytes,
    aten.scaled_dot_product_attention.default: _attention,
    ops.bag: _bags,
    ops.ragged_bags: _bags,
}


def _similar(node: fx.Node, grads: Sequence[bool]) -> Size:
    """Of each operand that has a gradient what it is divided by its norm to, as wide as both, and two norms of each row."""
    dim = facts.shape(edit.tensor_operands(node)[0])[edit.args_of(node)["dim"]]
    return sum(grads) * facts.nbytes(node) * (dim + 2)


def _divergent(node: fx.Node, grads: Sequence[bool]) -> Size:
    """Of targets that are logarithms the exponentials, and their products."""
    return sum(grads) * _first(node) if edit.args_of(node)["log_target"] else 0


BY_GRADIENTS: dict[Any, Callable[[fx.Node, Sequence[bool]], Size]] = {aten.cosine_similarity.default: _similar, aten.kl_div.default: _divergent}
"""Those of which it depends on the operands that have gradients."""


def beside(node: fx.Node, grads: Sequence[bool]) -> Size:
    """Bytes that the backward of a call keeps beside operands and results; `grads`: whether each operand has a gradient."""
    if node.target in BY_GRADIENTS:
        return BY_GRADIENTS[node.target](node, grads)
    row = BESIDE.get(node.target)
    return row(node) if row else 0
