"""Bytes that kernels keep for the backward in addition to operands and results (masks, statistics, indices, counts), as
formulas in the symbols of the sizes. Used by annotate_memory.

In a block that is run again, an operator with an entry here is always run again, even if nobody needs its result: its
backward needs these bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import sympy
import torch
from torch import fx

from passes import edit, facts, ops
from passes.facts import Size

aten = torch.ops.aten

STATISTIC_BYTES = 4
"""Attention and normalisation keep float32 statistics."""
COUNT_BYTES = 8
"""Indices and counts are int64."""
PIVOT_BYTES = 4
"""LAPACK's indices are int32."""


def _shape(node: fx.Node) -> tuple[Size, ...]:
    """Sizes of the first result."""
    return facts.shape(node, 0 if isinstance(facts.value(node), (tuple, list)) else None)


def _elements(itemsize: int) -> Callable[[fx.Node], Size]:
    """A function: `itemsize` bytes for each element of the result."""
    return lambda node: itemsize * facts.numel(node)


def _normalized(statistics: int) -> Callable[[fx.Node], Size]:
    """A function: bytes of so many statistics for each row that is normalised."""
    return lambda node: (
        statistics * STATISTIC_BYTES * prod(_shape(node)[: -len(edit.args_of(node)["normalized_shape"])])
    )


def _groups(node: fx.Node) -> Size:
    """Mean and deviation per sample and group."""
    return 2 * STATISTIC_BYTES * _shape(node)[0] * edit.args_of(node)["num_groups"]


def _channels_of_samples(node: fx.Node) -> Size:
    """Mean and deviation per sample and channel; and copies per sample of the weight and of running statistics, because
    the kernel treats sample and channel as one dim of channels."""
    given = edit.args_of(node)
    copies = sum(given[name] is not None for name in ("weight", "running_mean", "running_var"))
    return (2 * bool(given["use_input_stats"]) + copies) * STATISTIC_BYTES * _shape(node)[0] * _shape(node)[1]


def _attention(node: fx.Node) -> Size:
    """The logarithm of the sum of exponentials per query row."""
    return STATISTIC_BYTES * prod(_shape(node)[:-1])


def _bags(node: fx.Node) -> Size:
    """For each index, the bag that it is in; for each bag its offset, its size and a position; for maxima a position
    for each number of a bag."""
    chosen, (*bags, numbers) = edit.tensor_operands(node)[1], _shape(node)
    maxima = node.args[MODES[node.target] :][:1] in ((MAXIMUM,), ("max",))
    return COUNT_BYTES * (facts.numel(chosen) + (2 + (numbers if maxima else 1)) * prod(bags))


MODES = {aten.embedding_bag.padding_idx: 4, ops.bag: 3, ops.ragged_bags: 4}
"""The position of the argument that says what is made of the rows of a bag."""
MAXIMUM = 2
"""ATen's number for their maximum."""


def _triplets(node: fx.Node) -> Size:
    """The differences, their norms, and the clamped values."""
    count, first = (3 if edit.args_of(node)["swap"] else 2), edit.tensor_operands(node)[0]
    return count * facts.nbytes(first) + (count + 1) * (facts.nbytes(first) // facts.shape(first)[-1])


def _first(node: fx.Node) -> Size:
    """Bytes of the first operand."""
    return facts.nbytes(edit.tensor_operands(node)[0])


def _second(node: fx.Node) -> Size:
    """Bytes of the second operand."""
    return facts.nbytes(edit.tensor_operands(node)[1])


def _pivots(node: fx.Node) -> Size:
    """The LU factors of each matrix, and a pivot per row."""
    matrices = edit.tensor_operands(node)[0]
    return facts.nbytes(matrices) + PIVOT_BYTES * prod(facts.shape(matrices)[:-1])


def _logarithms(node: fx.Node) -> Size:
    """The determinants and their signs."""
    return _pivots(node) + facts.nbytes(node) + facts.numel(node)


def _power(node: fx.Node) -> Size:
    """All intermediate products; for a negative power also the inverse."""
    exponent = edit.args_of(node)["n"]
    products = max(0, abs(exponent).bit_length() + abs(exponent).bit_count() - 2)
    return (max(0, products - 1) + (exponent < 0)) * _first(node)


def _least(one: Size, other: Size) -> Size:
    """The smaller of two sizes."""
    return min(one, other) if isinstance(one, int) and isinstance(other, int) else sympy.Min(one, other)


def _vectors(matrices: fx.Node, rows: int, columns: int) -> Size:
    """Left and right singular vectors of the matrices in dims `rows` and `columns`."""
    sizes = facts.shape(matrices)
    others = prod(size for dim, size in enumerate(sizes) if dim not in (rows % len(sizes), columns % len(sizes)))
    return (
        facts.dtype(matrices).itemsize * others * _least(sizes[rows], sizes[columns]) * (sizes[rows] + sizes[columns])
    )


def _singular_vectors(node: fx.Node) -> Size:
    """As `_vectors`, of matrices in the last two dims."""
    return _vectors(edit.tensor_operands(node)[0], -2, -1)


def _condition(node: fx.Node) -> Size:
    """Singular vectors and values; for norms that sum the values also their reciprocals and both sums. 0 for norms
    without a gradient in torch."""
    order = edit.args_of(node)["p"]
    if order is not None and order not in SPECTRAL:
        return 0
    result = facts.nbytes(node)
    values = result * _least(*facts.shape(edit.tensor_operands(node)[0])[-2:])
    return _singular_vectors(node) + values + (values + 2 * result if order == "nuc" else 0)


def matrix_dims(given: Mapping[str, Any], rank: int) -> tuple[int, int] | None:
    """The two dims of the matrices of which a norm is taken; None for norms of vectors (of all elements, or along one
    dim)."""
    dims, order = given["dim"], given["ord"]
    if dims is None:
        return (0, 1) if rank == 2 and order is not None else None
    return (dims[0] % rank, dims[1] % rank) if len(dims) == 2 and order not in (None, "fro") else None


SPECTRAL = (2, -2, "nuc")
"""Norms of matrices that are computed from singular values."""


def _matrix_norm(node: fx.Node) -> Size:
    """The result (unless it is the sum of singular values), and sums of rows or columns, or singular values with their
    vectors."""
    given, operand = edit.args_of(node), edit.tensor_operands(node)[0]
    sizes, order, result = facts.shape(operand), given["ord"], facts.nbytes(node)
    dims = matrix_dims(given, len(sizes))
    if dims is None:
        return result
    if order not in SPECTRAL:
        return result + facts.dtype(operand).itemsize * prod(
            size for dim, size in enumerate(sizes) if dim != dims[abs(order) != 1]
        )
    others = prod(size for dim, size in enumerate(sizes) if dim not in dims)
    values = facts.dtype(operand).itemsize * others * _least(*[sizes[dim] for dim in dims])
    return values + _vectors(operand, *dims) + (0 if order == "nuc" else result)


def _quantile(node: fx.Node) -> Size:
    """The sorted values and their positions; for each result two positions and the weight between both values."""
    (operand,) = edit.tensor_operands(node)
    return (
        facts.nbytes(operand)
        + COUNT_BYTES * facts.numel(operand)
        + facts.nbytes(node)
        + 2 * COUNT_BYTES * facts.numel(node)
    )


def _frames(node: fx.Node) -> Size:
    """The frames, where a window is applied; else the padded signal, where it is padded."""
    given, (signal, *window) = edit.args_of(node), edit.tensor_operands(node)
    if window:
        counted = facts.shape(node) if facts.dtype(node).is_complex else facts.shape(node)[:-1]
        return facts.dtype(signal).itemsize * prod(counted[:-2]) * counted[-1] * given["n_fft"]
    return (
        facts.nbytes(signal) // facts.shape(signal)[-1] * (facts.shape(signal)[-1] + given["n_fft"] // 2 * 2)
        if given.get("center")
        else 0
    )


def _envelope(node: fx.Node) -> Size:
    """The sum of the squared windows; also the window, where none is given."""
    given, (frames, *window) = edit.args_of(node), edit.tensor_operands(node)
    size, hop = given["n_fft"], given["hop_length"] or given["n_fft"] // 4
    return facts.dtype(node).itemsize * (size + hop * (facts.shape(frames)[-1] - 1) + (0 if window else size))


def _recurrent(each: int) -> Callable[[fx.Node], Size]:
    """`each` numbers per position, layer and element of the state."""
    return lambda node: (
        each * edit.args_of(node)["num_layers"] * facts.tensors(node)[0].element_size() * prod(_shape(node))
    )


def _gates(each: int) -> Callable[[fx.Node], Size]:
    """`each` numbers per element of the state, for a cell."""
    return lambda node: each * facts.tensors(node)[0].element_size() * prod(_shape(node))


def _paths(node: fx.Node) -> Size:
    """Per sample and step, one number for each target and for each place between and around them."""
    scores, targets = edit.tensor_operands(node)[:2]
    steps, samples, _ = facts.shape(scores)
    return facts.dtype(scores).itemsize * steps * samples * (2 * facts.shape(targets)[1] + 1)


def _along(node: fx.Node) -> int:
    """The dim of the result along which an operator works; by default the first."""
    return int(edit.args_of(node)["dim"] or 0)


BESIDE: dict[Any, Callable[[fx.Node], Size]] = {
    aten._weight_norm.default: _second,
    aten.dropout.default: _elements(1),  # the mask (autopar/runtime/algorithms/dropout.py)
    aten.embedding_bag.padding_idx: _bags,
    aten.group_norm.default: _groups,
    aten.gru.input: _recurrent(4),
    aten.gru_cell.default: _gates(6),
    aten.instance_norm.default: _channels_of_samples,
    aten.layer_norm.default: _normalized(2),
    aten.log_sigmoid.default: facts.nbytes,
    aten.lstm.input: _recurrent(6),
    aten.lstm_cell.default: _gates(5),
    # of what is clamped, and two masks
    aten.hinge_embedding_loss.default: lambda node: _first(node) + 2 * facts.numel(edit.tensor_operands(node)[0]),
    aten.l1_loss.default: _first,  # the differences
    # the differences, before it clamps them in place, and the targets' signs turned
    aten.margin_ranking_loss.default: lambda node: 2 * _first(node),
    aten.max_pool1d.default: _elements(COUNT_BYTES),
    aten.max_pool2d.default: _elements(COUNT_BYTES),
    aten.max_pool3d.default: _elements(COUNT_BYTES),
    aten.multilabel_margin_loss.default: _first,
    aten.pairwise_distance.default: _first,
    aten.triplet_margin_loss.default: _triplets,
    aten.native_layer_norm.default: _normalized(2),
    aten.nll_loss.default: lambda node: STATISTIC_BYTES,
    aten.nll_loss_nd.default: lambda node: STATISTIC_BYTES,
    aten.cross_entropy_loss.default: _first,
    aten.rms_norm.default: _normalized(1),
    aten.rnn_relu.input: _recurrent(1),
    aten.rnn_tanh.input: _recurrent(1),
    # which index each one is
    aten.repeat_interleave.self_Tensor: lambda node: COUNT_BYTES * _shape(node)[_along(node)],
    aten.rrelu.default: facts.nbytes,
    aten.scaled_dot_product_attention.default: _attention,
    **dict.fromkeys(
        (
            aten.det.default,
            aten.linalg_det.default,
            aten.linalg_slogdet.default,
            aten.linalg_solve.default,
            aten.slogdet.default,
        ),
        _pivots,
    ),
    **dict.fromkeys(
        (
            aten.linalg_matrix_norm.default,
            aten.linalg_matrix_norm.str_ord,
            aten.linalg_norm.default,
            aten.linalg_norm.ord_str,
        ),
        _matrix_norm,
    ),
    **dict.fromkeys((aten.linalg_matrix_power.default, aten.matrix_power.default), _power),
    **dict.fromkeys((aten.nanquantile.scalar, aten.quantile.scalar), _quantile),
    **dict.fromkeys((aten.stft.center, aten.stft.default), _frames),
    aten.istft.default: _envelope,
    **dict.fromkeys((aten.linalg_cond.default, aten.linalg_cond.p_str), _condition),
    aten.linalg_eigvals.default: lambda node: 2 * _first(node),  # eigenvectors, which are complex
    aten.linalg_eigvalsh.default: _first,  # eigenvectors
    aten.linalg_svdvals.default: _singular_vectors,
    aten.logdet.default: _logarithms,
    aten.nanmean.default: _elements(COUNT_BYTES),
    ops.ctc_each: _paths,
    ops.bag: _bags,
    ops.ragged_bags: _bags,
}


def _similar(node: fx.Node, grads: Sequence[bool]) -> Size:
    """Per operand with a gradient: the normalised operand at the broadcast sizes, and two norms per row."""
    sizes = facts.shape(edit.tensor_operands(node)[0])
    dim = sizes[edit.args_of(node)["dim"]] if sizes else 1  # a scalar is a vector of one
    return sum(grads) * facts.nbytes(node) * (dim + 2)


def _alike(node: fx.Node, grads: Sequence[bool]) -> Size:
    """Cosine embedding loss: for each row two masks, the cosine before it is clamped, the product of the vectors and
    that of their lengths, and the squared length of each vector that is needed for the gradient of the other."""
    first, second, target = edit.tensor_operands(node)
    rows, itemsize = facts.numel(target), facts.dtype(first).itemsize
    squares = sum(
        facts.numel(other) // facts.shape(other)[-1]
        for other, wanted in ((second, grads[0]), (first, grads[1]))
        if wanted
    )
    return rows * (2 + 3 * itemsize) + squares * itemsize


def _events(node: fx.Node, grads: Sequence[bool]) -> Size:
    """Poisson loss: the exponentials, or the logarithms. For the gradient of the counts the logarithms again, and for
    Stirling's formula two products and a mask."""
    given, count = edit.args_of(node), facts.numel(edit.tensor_operands(node)[0])
    logarithms, stirling = int(grads[1]), int(grads[1] and given["full"])
    return _first(node) * (1 + logarithms + 2 * stirling) + count * stirling


def _divergent(node: fx.Node, grads: Sequence[bool]) -> Size:
    """For targets given as logarithms, their exponentials and the products with these."""
    return sum(grads) * _first(node) if edit.args_of(node)["log_target"] else 0


BY_GRADIENTS: dict[Any, Callable[[fx.Node, Sequence[bool]], Size]] = {
    aten.cosine_embedding_loss.default: _alike,
    aten.cosine_similarity.default: _similar,
    aten.kl_div.default: _divergent,
    aten.poisson_nll_loss.default: _events,
}
"""Operators for which it depends on which operands have gradients."""


def beside(node: fx.Node, grads: Sequence[bool]) -> Size:
    """Bytes that the backward of a call keeps in addition to operands and results; `grads` says which operands have a
    gradient."""
    if node.target in BY_GRADIENTS:
        return BY_GRADIENTS[node.target](node, grads)
    row = BESIDE.get(node.target)
    return row(node) if row else 0
