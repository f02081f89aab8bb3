"""Sums and means over the rows that a mask selects, as sums over all rows with zeros for the other rows.

    F.cross_entropy(logits[mask], labels[mask]),  ((x - y) ** 2)[mask].mean(),  torch.masked_select(x, mask).sum()

The number of selected rows depends on data, and a graph has sizes of its inputs only. So row-wise computation on
selected rows is done on all rows, with zeros in the rows that are not selected. Only operators with finite derivatives
at zero are supported (no logarithm, root or division by rows): a zero gradient times an infinite derivative would be
nan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes._torch import free_unbacked_symbols
from passes.picked import places
from passes.tables import MEAN, NONE

aten = torch.ops.aten

_NARROW = (torch.float16, torch.bfloat16)

Known = dict[fx.Node, "Whole | None"]


@dataclass(frozen=True)
class Whole:
    """A value on all rows, `rows [m, ..., r, ...]`, that stands for the value on the rows selected by `mask [m, ...]`,
    `[n, r, ...]`."""

    rows: fx.Node
    mask: fx.Node

    @property
    def more(self) -> int:
        """The number of dims of `rows` beyond those of the selected rows."""
        return facts.rank(self.mask) - 1


def masked(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional operators.
    does: finds sums, means and losses over rows that a mask selects, of values that are computed row by row.
    gives: the same computed on all rows, without sizes that depend on values. Other uses of selected rows stay as they
           are."""
    return taken(gm, TAKEN)


def taken(gm: fx.GraphModule, table: Mapping[Any, Callable[[fx.Node, Known], fx.Node | None]]) -> fx.GraphModule:
    """`gm` with operators on selected rows replaced by what the function of `table` for their target returns; where it
    returns None, the operator stays."""
    known: Known = {}
    for node in edit.calls(gm):
        if node.target in table and any(map(is_picked, node.all_input_nodes)) and not is_picked(node):
            with edit.before(node):
                new = table[node.target](node, known)
            if new is not None:
                edit.replace(node, new)
    return edit.finish(gm) if known else gm


def is_picked(node: fx.Node) -> bool:
    """Whether the first size of the result of `node` depends on values of tensors, and no other size does."""
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.dim() > 0
        and bool(free_unbacked_symbols(value.shape[0]))
        and not free_unbacked_symbols(list(value.shape[1:]))
    )


def whole(node: fx.Node, known: Known) -> Whole | None:
    """`node`, a value on selected rows, computed on all rows at the insertion point; None where it is not a supported
    row-wise operator."""
    if node not in known:
        known[node] = None
        mask, source = _source(node)
        if mask is not None and source is not None:
            known[node] = Whole(zeroed(source, mask, node), mask)
        elif node.target in ROWWISE and is_picked(node):
            known[node] = ROWWISE[node.target](node, known)
    return known[node]


def _source(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The mask by which `node` selects rows, and the tensor that it selects from; (None, None) for other nodes."""
    if (chosen := edit.call_of(node, aten.masked_select.default)) is not None:
        source, mask = chosen.args
        return (mask, source) if facts.shape(source) == facts.shape(mask) else (None, None)  # type: ignore[arg-type, return-value]
    if edit.call_of(node, aten.index.Tensor) is None:
        return None, None
    mask = mask_of_places(node.args[1])  # type: ignore[arg-type]
    return (mask, node.args[0]) if mask is not None else (None, None)  # type: ignore[return-value]


def mask_of_places(given: Sequence[Any]) -> fx.Node | None:
    """The mask that `given`, indices of the leading dims, stand for: the mask itself, or the coordinates of its true
    elements; None for other indices."""
    indices = list(given)
    while indices and indices[-1] is None:
        indices.pop()
    if not indices or any(index is None for index in indices):
        return None
    if len(indices) == 1 and facts.dtype(indices[0]) == torch.bool:
        return indices[0]
    found = [places(index) for index in indices]
    if None in found or any((place[0], place[1]) != (found[0][0], dim) for dim, place in enumerate(found)):  # type: ignore[index]
        return None
    mask: fx.Node = found[0][0]  # type: ignore[index]
    return mask if facts.rank(mask) == len(indices) and facts.dtype(mask) == torch.bool else None


def zeroed(rows: fx.Node, mask: fx.Node, node: fx.Node, zero: float = 0) -> fx.Node:
    """`rows`, with `zero` in the rows that the mask does not select."""
    wide = widened(mask, rows, node)
    if facts.dtype(rows) == torch.bool:
        return edit.call(node, aten.logical_and.default, wide, rows)
    return edit.call(node, aten.where.ScalarOther, wide, rows, zero)


def widened(mask: fx.Node, rows: fx.Node, node: fx.Node) -> fx.Node:
    """`mask` with as many dims as `rows`."""
    for dim in range(facts.rank(mask), facts.rank(rows)):
        mask = edit.call(node, aten.unsqueeze.default, mask, dim)
    return mask


def _operands(node: fx.Node, known: Known, given: Sequence[Any]) -> tuple[list[Any], fx.Node] | None:
    """The arguments `given` of `node` with values on selected rows replaced by those on all rows, and their mask; other
    arguments are unchanged. None unless all are supported and have one mask."""
    found = [whole(item, known) if isinstance(item, fx.Node) and is_picked(item) else item for item in given]
    masks = dict.fromkeys(item.mask for item in found if isinstance(item, Whole))
    if None in [new for new, item in zip(found, given, strict=True) if item is not None] or len(masks) != 1:
        return None
    return [item.rows if isinstance(item, Whole) else item for item in found], next(iter(masks))


def _pointwise(node: fx.Node, known: Known) -> Whole | None:
    """A pointwise operator whose operands are selected rows of the same rank, or values of a lower rank, which are the
    same for all rows."""
    rank = facts.rank(node)
    for operand in edit.tensor_operands(node):
        if (facts.rank(operand) == rank) != is_picked(operand):
            return None
    if node.target is aten.div.Tensor and isinstance(node.args[1], fx.Node) and is_picked(node.args[1]):
        return None
    if (found := _operands(node, known, node.args)) is None:
        return None
    return Whole(edit.call(node, node.target, *found[0], **node.kwargs), found[1])


def _power(node: fx.Node, known: Known) -> Whole | None:
    """A power whose derivative at zero is finite."""
    exponent = node.args[1]
    return _pointwise(node, known) if isinstance(exponent, (int, float)) and exponent >= 1 else None


def _first(node: fx.Node, known: Known) -> Whole | None:
    """An operator on the last dims of its first operand, whose other operands do not depend on the mask."""
    if facts.rank(node.args[0]) < 2 or any(
        is_picked(other) for other in node.all_input_nodes if other is not node.args[0]
    ):
        return None
    if node.target is aten.matmul.default and facts.rank(node.args[1]) > 2:
        return None
    if node.target in NORMS and _divides_by_zero(node):
        return None
    if (found := _operands(node, known, node.args[:1])) is None:
        return None
    return Whole(
        edit.call(node, node.target, found[0][0], *node.args[1:], **node.kwargs),
        found[1],
    )


def _divides_by_zero(norm: fx.Node) -> bool:
    """Whether a norm of a row of equal numbers is nan, as one of zeros is: where nothing is added to its variance."""
    eps = edit.args_of(norm)["eps"]  # none: the dtype's own
    return eps is not None and eps < torch.finfo(torch.float32).tiny


def _along(node: fx.Node, known: Known, *, new: int = 0) -> Whole | None:
    """An operator along other dims than that of rows; `new` is 1 where its `dim` argument counts dims of the result."""
    given = edit.args_of(node)
    asked = given["dim"]
    dims = asked if isinstance(asked, (list, tuple)) else [asked]
    rank = facts.rank(node.args[0]) + new
    if None in dims or not dims or any(dim % rank == 0 for dim in dims):
        return None
    tensors = edit.tensor_operands(node)
    if not all(map(is_picked, tensors)) or (found := _operands(node, known, tensors)) is None:
        return None
    rows, mask = found
    moved = [dim % rank + facts.rank(mask) - 1 for dim in dims]
    by_name = dict(zip(tensors, rows, strict=True))
    values = {**given, "dim": moved if isinstance(asked, (list, tuple)) else moved[0]}
    args, kwargs = edit.given_by_name(
        node,
        {name: by_name.get(value, value) if isinstance(value, fx.Node) else value for name, value in values.items()},
    )
    return Whole(edit.call(node, node.target, *args, **kwargs), mask)


def _added(node: fx.Node, known: Known) -> Whole | None:
    """As `_along`, for an operator whose `dim` argument counts dims of the result (unsqueeze)."""
    return _along(node, known, new=1)


def _terms(node: fx.Node, known: Known) -> Whole | None:
    """A loss with one term per element, without its reduction."""
    given = edit.args_of(node)
    tensors = edit.tensor_operands(node)
    if not all(map(is_picked, tensors)) or len({facts.shape(x) for x in tensors}) > 1:
        return None
    if (found := _operands(node, known, tensors)) is None:
        return None
    by_name = dict(zip(tensors, found[0], strict=True))
    args, kwargs = edit.given_by_name(
        node,
        {
            name: by_name.get(value, value) if isinstance(value, fx.Node) else value
            for name, value in {**given, "reduction": NONE}.items()
        },
    )
    return Whole(edit.call(node, node.target, *args, **kwargs), found[1])


def _loss(node: fx.Node, known: Known) -> fx.Node | None:
    """A loss that is the sum or the mean of one term per element of the selected rows."""
    found = _terms(node, known)
    return None if found is None else _together(node, found, None, mean=edit.args_of(node)["reduction"] == MEAN)


def _of_classes(node: fx.Node, known: Known) -> fx.Node | None:
    """A classification loss of selected rows and labels: labels that are not selected become `ignore_index`."""
    given = edit.args_of(node)
    logits, labels = given["self"], given["target"]
    if (
        facts.is_float(labels)
        or (facts.rank(logits), facts.rank(labels)) != (2, 1)
        or (given.get("weight") is not None and is_picked(given["weight"]))
    ):
        return None
    if not (is_picked(logits) and is_picked(labels)) or (found := _operands(node, known, (logits, labels))) is None:
        return None
    (rows, chosen), mask = found
    chosen = zeroed(chosen, mask, node, given["ignore_index"])
    if facts.rank(mask) > 1:
        count = edit.product(node, [edit.size(chosen, dim) for dim in range(facts.rank(mask))])
        rows = edit.call(node, aten.reshape.default, rows, [count, edit.size(rows, facts.rank(rows) - 1)])
        chosen = edit.call(node, aten.reshape.default, chosen, [count])
    args, kwargs = edit.given_by_name(node, {**given, "self": rows, "target": chosen})
    return edit.call(node, node.target, *args, **kwargs)


def _sum(node: fx.Node, known: Known) -> fx.Node | None:
    """The sum of selected rows."""
    return _over(node, known, mean=False)


def _mean(node: fx.Node, known: Known) -> fx.Node | None:
    """The mean of selected rows."""
    return _over(node, known, mean=True)


def _over(node: fx.Node, known: Known, *, mean: bool) -> fx.Node | None:
    """The sum or the mean over the selected rows, and over further dims."""
    given = edit.args_of(node)
    found = whole(given["self"], known)
    if found is None or given.get("keepdim"):
        return None
    dims = given.get("dim") or None
    rank = facts.rank(given["self"])
    asked = None if dims is None else sorted(dim % rank for dim in dims)
    return _together(node, found, asked, mean=mean)


def _together(node: fx.Node, found: Whole, dims: list[int] | None, *, mean: bool) -> fx.Node:
    """The sum over all rows, along `dims` of the selected rows (which include the first; None: all dims); with `mean`
    divided by the number of selected elements. 16-bit rows are summed in float32."""
    rank, result = facts.rank(found.rows), facts.dtype(node)
    rest = [dim + found.more for dim in dims[1:]] if dims is not None else list(range(found.more + 1, rank))
    over = [*range(found.more + 1), *rest]
    wide = torch.float32 if result in _NARROW else result
    terms = zeroed(found.rows, found.mask, node)
    total = edit.call(node, aten.sum.dim_IntList, terms, over, dtype=wide)
    if mean:
        picked = edit.call(node, aten.sum.dim_IntList, found.mask, list(range(found.more + 1)), dtype=wide)
        beside = edit.product(node, [edit.size(found.rows, dim) for dim in rest])
        count = edit.call(node, aten.mul.Tensor, picked, beside) if beside != 1 else picked
        total = edit.call(node, aten.div.Tensor, total, count)
    return edit.cast(total, result, like=node)


FINITE_AT_ZERO = (
    aten.abs.default,
    aten.add.Tensor,
    aten.clamp.default,
    aten.clamp_max.default,
    aten.clamp_min.default,
    aten.cos.default,
    aten.detach.default,
    aten.div.Tensor,
    aten.elu.default,
    aten.eq.Scalar,
    aten.eq.Tensor,
    aten.exp.default,
    aten.full_like.default,
    aten.ge.Scalar,
    aten.gelu.default,
    aten.gt.Scalar,
    aten.hardtanh.default,
    aten.le.Scalar,
    aten.leaky_relu.default,
    aten.log_sigmoid.default,
    aten.logical_not.default,
    aten.lt.Scalar,
    aten.maximum.default,
    aten.minimum.default,
    aten.mul.Tensor,
    aten.ne.Scalar,
    aten.ne.Tensor,
    aten.neg.default,
    aten.ones_like.default,
    aten.relu.default,
    aten.rsub.Scalar,
    aten.sigmoid.default,
    aten.silu.default,
    aten.sin.default,
    aten.softplus.default,
    aten.square.default,
    aten.sub.Tensor,
    aten.tanh.default,
    aten.to.dtype,
    aten.zeros_like.default,
)
"""Pointwise operators whose derivatives are finite at zero: rows that are not selected may be set to zero before
them."""
ELEMENTS = (
    aten.binary_cross_entropy_with_logits.default,
    aten.huber_loss.default,
    aten.l1_loss.default,
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
)
"""Losses with one term per element."""

NORMS = (aten.layer_norm.default, aten.rms_norm.default)

ROWWISE: dict[Any, Callable[[fx.Node, Known], Whole | None]] = {
    **dict.fromkeys(FINITE_AT_ZERO, _pointwise),
    **dict.fromkeys((aten.linear.default, aten.matmul.default, *NORMS), _first),
    **dict.fromkeys(
        (
            aten.softmax.int,
            aten.log_softmax.int,
            aten.sum.dim_IntList,
            aten.mean.dim,
            aten.logsumexp.default,
            aten.argmax.default,
            aten.amax.default,
            aten.gather.default,
            aten.select.int,
            aten.slice.Tensor,
            aten.squeeze.dim,
        ),
        _along,
    ),
    **dict.fromkeys(ELEMENTS, _terms),
    aten.pow.Tensor_Scalar: _power,
    aten.unsqueeze.default: _added,
}
"""Operators that compute each row by itself -> their value on all rows."""

TAKEN: dict[Any, Callable[[fx.Node, Known], fx.Node | None]] = {
    **dict.fromkeys(ELEMENTS, _loss),
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), _sum),
    **dict.fromkeys((aten.mean.default, aten.mean.dim), _mean),
    **dict.fromkeys((aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default), _of_classes),
}
"""Operators that reduce selected rows to a number, or to one row -> the same from all rows."""
