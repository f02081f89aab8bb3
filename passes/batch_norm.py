"""Batch norm as sums over the batch, so that where the batch is split the partial sums are reduced to the statistics of
the whole batch; and the running statistics of instance norms."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops
from passes.inplace import check_root

aten = torch.ops.aten


def batch_norm(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: buffers as placeholders, provenance.
    does: writes batch norm as sums, a reciprocal square root and products. New running statistics become mutated
           outputs; a norm that is called again continues from those of its last call. Statistics are computed at least
           in float32, as torch's kernels do. Instance norms in training keep their operator; their update of running
           statistics, which the schema does not show, is written behind it.
    gives: no batch_norm. In evaluation it is a product and a sum with statistics [c, 1, 1] that broadcast. In training
           its means are `ops.statistic`, which also says what replaces them in evaluation."""
    written: set[object] = set()
    for node in edit.calls(gm, aten.batch_norm.default):
        given = edit.args_of(node)
        _check_once(gm, node, given, written)
        with edit.before(node):
            edit.replace(node, _training(gm, node, given) if _uses_batch(given) else _evaluation(node, given))
    for node in edit.calls(gm, aten.instance_norm.default):
        given = edit.args_of(node)
        if given["use_input_stats"] and given["running_mean"] is not None:
            with edit.before(node):
                _instances(gm, node, given)
                edit.replace(
                    node,
                    edit.call(
                        node,
                        aten.instance_norm.default,
                        *(None if name.startswith("running") else value for name, value in given.items()),
                    ),
                )
    gm.recompile()
    return gm


def _check_once(gm: fx.GraphModule, node: fx.Node, given: dict[str, Any], written: set[object]) -> None:
    """Raise ValueError where two training norms update the same view of a buffer. In evaluation the second would have
    to use what the first wrote, which is not implemented."""
    view = given["running_mean"]
    if (
        not given["training"]
        or view is None
        or _is_buffer(gm, view)
        or not any(result.alias_info for result in view.target._schema.returns)
    ):
        return
    if (key := (view.target, view.args)) in written:
        raise ValueError(
            f"{facts.where(node)} is the second norm whose running statistics are this part of a buffer ({view.name}); "
            "give each norm buffers of its own"
        )
    written.add(key)


def _uses_batch(given: dict[str, Any]) -> bool:
    """Whether a norm takes the statistics of the batch, as in training."""
    return bool(given["training"]) or given["running_mean"] is None


def _training(gm: fx.GraphModule, node: fx.Node, given: dict[str, Any]) -> fx.Node:
    """With n elements per channel: mean = sum(x)/n, var = sum((x - mean)^2)/n, (x - mean) * rsqrt(var + eps) * w +
    b."""
    x: fx.Node = given["input"]
    dims = [dim for dim in range(facts.rank(x)) if dim != 1]
    count = edit.product(node, [edit.size(x, dim) for dim in dims])
    mean = _mean(gm, node, _sum(node, x, dims), count, given, "running_mean")
    centred = edit.call(node, aten.sub.Tensor, x, edit.cast(mean, facts.dtype(x), like=node))
    # its squares may leave float16's range
    spread = edit.call(node, aten.to.dtype, centred, torch.float32) if facts.dtype(x) == torch.float16 else centred
    squares = _sum(node, edit.call(node, aten.mul.Tensor, spread, spread), dims)
    variance = _mean(gm, node, squares, count, given, "running_var")
    # here, since stages of pipelines cannot begin between what reads a buffer and its new value
    if given["running_mean"] is not None and given["training"]:
        fewer = count - 1 if isinstance(count, int) else edit.call(node, operator.sub, count, 1)
        # of what is summed over ranks already
        total = edit.call(node, aten.mul.Tensor, edit.call(node, aten.detach.default, variance), count)
        unbiased = edit.call(node, aten.div.Tensor, total, fewer)
        _track(gm, node, given["running_mean"], mean, given["momentum"])
        _track(gm, node, given["running_var"], unbiased, given["momentum"])
    scale = edit.call(node, aten.rsqrt.default, edit.call(node, aten.add.Tensor, variance, given["eps"]))
    return _affine(node, edit.call(node, aten.mul.Tensor, centred, edit.cast(scale, facts.dtype(x), like=node)), given)


def _instances(gm: fx.GraphModule, node: fx.Node, given: dict[str, Any]) -> None:
    """The new running statistics of an instance norm: the mean and the unbiased variance of each sample, averaged over
    samples."""
    x = edit.call(node, aten.detach.default, given["input"])
    dims = list(range(2, facts.rank(x)))
    count = edit.product(node, [edit.size(x, dim) for dim in dims])
    mean = edit.call(node, aten.div.Tensor, _sum(node, x, dims), count)
    centred = edit.call(node, aten.sub.Tensor, x, mean)
    fewer = count - 1 if isinstance(count, int) else edit.call(node, operator.sub, count, 1)
    squares = _sum(node, edit.call(node, aten.mul.Tensor, centred, centred), dims)
    unbiased = edit.call(node, aten.div.Tensor, squares, fewer)
    for running, of_samples in (("running_mean", mean), ("running_var", unbiased)):
        _track(
            gm,
            node,
            given[running],
            edit.call(node, aten.div.Tensor, _sum(node, of_samples, [0]), edit.size(x, 0)),
            given["momentum"],
        )


def _sum(node: fx.Node, value: fx.Node, dims: list[int]) -> fx.Node:
    """The sum of `value` over `dims`, which are kept with size 1."""
    wide = torch.promote_types(facts.dtype(value), torch.float32)
    kwargs = {} if wide == facts.dtype(value) else {"dtype": wide}
    return edit.call(node, aten.sum.dim_IntList, value, dims, True, **kwargs)


def _mean(
    gm: fx.GraphModule, node: fx.Node, total: fx.Node, count: Any, given: dict[str, Any], running: str
) -> fx.Node:
    """`total / count`. Where running statistics replace it in evaluation (`running` is a buffer), as
    `ops.statistic`."""
    if given[running] is None or not given["training"]:
        return edit.call(node, aten.div.Tensor, total, count)
    return edit.call(
        node,
        ops.statistic,
        total,
        count,
        edit.buffer_of(gm, given[running]) if _is_buffer(gm, given[running]) else given[running],
    )


def _is_buffer(gm: fx.GraphModule, running: fx.Node) -> bool:
    """Whether `running` is a buffer or the new value of one; not a tensor computed from buffers in forward."""
    held = edit.same_memory(running)[-1]
    return held.op == "placeholder" or held in edit.mutated(gm)


def _evaluation(node: fx.Node, given: dict[str, Any]) -> fx.Node:
    """(x - running_mean) * rsqrt(running_var + eps) * w + b, every statistic as [c, 1, ...]."""
    mean, var = _per_channel(node, given["running_mean"], given), _per_channel(node, given["running_var"], given)
    scale = edit.call(node, aten.rsqrt.default, edit.call(node, aten.add.Tensor, var, given["eps"]))
    centred = edit.call(node, aten.sub.Tensor, given["input"], mean)
    return _affine(node, edit.call(node, aten.mul.Tensor, centred, scale), given)


def _affine(node: fx.Node, value: fx.Node, given: dict[str, Any]) -> fx.Node:
    """`value * w + b`, in the dtype of the norm's input, which may be narrower than those of weights and statistics."""
    if given["weight"] is not None:
        value = edit.call(node, aten.mul.Tensor, value, _per_channel(node, given["weight"], given))
    if given["bias"] is not None:
        value = edit.call(node, aten.add.Tensor, value, _per_channel(node, given["bias"], given))
    return edit.cast(value, facts.dtype(given["input"]), like=node)


def _per_channel(node: fx.Node, value: fx.Node, given: dict[str, Any]) -> fx.Node:
    """`value [c]` as [c, 1, ...], which broadcasts against the input [n, c, ...]."""
    trailing = facts.rank(given["input"]) - 2
    return edit.call(node, aten.reshape.default, value, [-1] + [1] * trailing) if trailing else value


def _track(gm: fx.GraphModule, node: fx.Node, running: fx.Node, batch: fx.Node, momentum: float) -> None:
    """Update running statistics: (1 - momentum) * running + momentum * batch, without gradient. Where `running` is not
    a whole buffer (`stats[domain]`), it is written as any other in-place change."""
    fresh = edit.call(node, aten.detach.default, edit.call(node, aten.reshape.default, batch, [-1]))
    old = edit.call(node, aten.mul.Tensor, running, 1.0 - momentum)
    new = edit.call(node, aten.add.Tensor, old, edit.call(node, aten.mul.Tensor, fresh, momentum))
    new = edit.cast(new, facts.dtype(running), like=node)
    if not _is_buffer(gm, running):
        edit.call(node, aten.copy_.default, running, new)
        return
    buffer = edit.buffer_of(gm, running)
    check_root(node, buffer)
    edit.mutate_buffer(gm, buffer, new, behind=new)
    for old in edit.same_memory(running):
        edit.redirect_later(old, new, behind=new)
