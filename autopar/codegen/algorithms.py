"""Operators whose split form is not the plain operator on shards: calls of runtime algorithms.

A row per algorithm of `autopar.rules.algorithms`, and one per operator that is written in its own way: dropout (its
mask must agree on replicas and differ between shards), layers of experts (of which an argument is a function).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from autopar.codegen import sizes
from autopar.codegen.expressions import Written, write
from autopar.errors import PlanError
from autopar.layout import cutters, dim_of, is_shard, show
from autopar.plan import NodePlan
from autopar.problem.graph import Op
from autopar.problem.pairs import LayoutPair
from autopar.rules import halo as windows
from autopar.rules import tiles
from autopar.rules.arguments import given
from passes import facts, ops
from passes.switches import SWITCHES, place_of

if TYPE_CHECKING:
    from autopar.codegen.context import Context

aten = torch.ops.aten
IMPORTED = (
    "causal_rows",
    "dropout",
    "expert_rows",
    "experts_on_ranks",
    "halo",
    "halves",
    "in_training",
    "own_groups",
    "own_heads",
    "pairs",
    "placed",
    "ring_attention",
    "seeded",
    "tiled_embedding",
    "tiled_linear",
    "tiled_matmul",
    "vocab_bag",
    "vocab_cross_entropy_sum",
    "vocab_embedding",
)
"""Names that an emitted file may import for its algorithms: no variable may hide them."""


def algorithm_text(op: Op, node: NodePlan, call: Written, context: Context) -> str | None:
    """The call of the runtime algorithm that `op` needs under this plan, or None where the plain operator is right."""
    axes = tuple(a for a, run in enumerate(node.runs) if run and run not in OPERAND_TEXTS)
    names = list(dict.fromkeys(run for run in node.runs if run and run not in OPERAND_TEXTS))
    writers = list(dict.fromkeys(ALGORITHM_TEXTS[name] for name in names))
    if len(writers) > 1:
        raise ValueError(f"{op.name}: algorithms {names} on one operator")
    if writers:
        return writers[0](op, node, call, axes, context)
    if op.target in OWN_TEXTS:
        return OWN_TEXTS[op.target](op, node, call, context)
    return None


def operand_texts(op: Op, node: NodePlan, call: Written, context: Context) -> Written:
    """The call with operands replaced by what the algorithms of OPERAND_TEXTS choose of them."""
    for name in dict.fromkeys(run for run in node.runs if run in OPERAND_TEXTS):
        call = OPERAND_TEXTS[name](op, node, call, context)
    return call


def _own_heads(op: Op, node: NodePlan, call: Written, context: Context) -> Written:
    context.algorithms["own_heads"] = None
    query, key = op.call.ins[:2]
    dim = len(query.shape) - 3
    axes, within = (cutters(LayoutPair.of(text).value, dim) for text in node.ins[:2])
    rest = f"heads={query.shape[dim]}, groups={key.shape[dim]}, axes={axes}, within={within}, mesh=MESH"
    taken = tuple(f"own_heads({text}, {rest})" for text in call.args[1:3])
    return replace(call, args=(call.args[0], *taken, *call.args[3:]))


def _embedding(op: Op, node: NodePlan, call: Written, axes: tuple[int, ...], context: Context) -> str:
    context.algorithms["vocab_embedding"] = None
    padding = f", {call.args[2]}" if len(call.args) > 2 else ""
    return (
        f"vocab_embedding({call.args[1]}, {call.args[0]}{padding}, vocab={op.call.ins[0].shape[0]}, axes={axes}, "
        "mesh=MESH)"
    )


def _bag(op: Op, node: NodePlan, call: Written, axes: tuple[int, ...], context: Context) -> str:
    context.algorithms["vocab_bag"] = None
    return f"vocab_bag({', '.join(call.args)}, vocab={op.call.ins[0].shape[0]}, axes={axes}, mesh=MESH)"


def _cross_entropy(op: Op, node: NodePlan, call: Written, axes: tuple[int, ...], context: Context) -> str:
    context.algorithms["vocab_cross_entropy_sum"] = None
    return f"vocab_cross_entropy_sum({', '.join(call.args)}, vocab={op.call.ins[0].shape[-1]}, axes={axes}, mesh=MESH)"


def _causal_rows(op: Op, node: NodePlan, call: Written, axes: tuple[int, ...], context: Context) -> str:
    if _dropout_p(call) != "0.0":
        raise PlanError(f"{op.name} ({op.where}): attention with dropout cannot be split over query rows")
    context.algorithms["causal_rows"] = None
    named = "".join(f", {k}={v}" for k, v in call.kwargs.items() if k in ("scale", "enable_gqa"))
    rows = sizes.text(op.call.ins[0].shape[-2])
    return f"causal_rows({', '.join(call.args[:3])}, rows={rows}, axes={axes}, mesh=MESH{named})"


def _experts(op: Op, node: NodePlan, call: Written, axes: tuple[int, ...], context: Context) -> str:
    context.algorithms["experts_on_ranks"] = None
    context.use(ops.expert_rows)
    hidden, chosen, gates, up, down, _, *bias = call.args
    dispatch = tuple(a for a in axes if node.runs[a] == "expert_dispatch")
    return (
        "experts_on_ranks(lambda rows, ends: "
        f"expert_rows({', '.join(['rows', up, down, 'ends', _inner(op, context), *bias])}), {hidden}, {chosen}, "
        f"{gates}, experts={op.call.ins[3].shape[0]}, axes={axes}, dispatch={dispatch}, mesh=MESH)"
    )


def _plain_experts(op: Op, node: NodePlan, call: Written, context: Context) -> str:
    context.use(ops.experts)
    return f"experts({', '.join([*call.args[: ops.INNER], _inner(op, context), *call.args[ops.BIAS :]])})"


def _inner(op: Op, context: Context) -> str:
    """What is between the layers of an expert, as the function that its text writes."""
    text = str(op.call.args[ops.INNER])
    for name in (ops.halves, ops.pairs):
        if text.startswith(f"{name.__name__}("):
            context.use(name)
    return text


def _own_groups(op: Op, node: NodePlan, call: Written, axes: tuple[int, ...], context: Context) -> str:
    context.algorithms["own_groups"] = None
    context.use(ops.grouped_matmul)
    rows, weights, ends = call.args
    return (
        f"own_groups(lambda rows, ends: grouped_matmul(rows, {weights}, ends), {rows}, {ends}, "
        f"groups={op.call.ins[1].shape[0]}, axes={axes}, mesh=MESH)"
    )


def _ring(op: Op, node: NodePlan, call: Written, axes: tuple[int, ...], context: Context) -> str:
    context.algorithms["ring_attention"] = None
    named = dict(zip(("attn_mask", "dropout_p", "is_causal"), call.args[3:], strict=False)) | call.kwargs
    kept = "".join(
        f", {k}={v}"
        for k, v in named.items()
        if (k, v) not in (("attn_mask", "None"), ("is_causal", "False")) and k != "dropout_p"
    )
    rows = sizes.text(op.call.ins[0].shape[-2])
    return f"ring_attention({', '.join(call.args[:3])}{kept}, rows={rows}, axes={axes}, mesh=MESH)"


def _tiled(op: Op, node: NodePlan, call: Written, axes: tuple[int, ...], context: Context) -> str:
    name = "tiled_linear" if op.target in tiles.BY_OUTPUTS else "tiled_matmul"
    context.algorithms[name] = None
    (axis,) = axes
    named = "".join(f", {key}={text}" for key, text in call.kwargs.items())
    return f"{name}({', '.join(call.args)}{named}, tiles={tiles.tiles(node.runs[axis])}, axes={axes}, mesh=MESH)"


def _tiled_lookup(op: Op, node: NodePlan, call: Written, axes: tuple[int, ...], context: Context) -> str:
    context.algorithms["tiled_embedding"] = None
    (axis,) = axes
    padding = f", {call.args[2]}" if len(call.args) > 2 else ""
    return (
        f"tiled_embedding({call.args[1]}, {call.args[0]}{padding}, tiles={tiles.tiles(node.runs[axis])}, axes={axes}, "
        "mesh=MESH)"
    )


def _halo(op: Op, node: NodePlan, call: Written, axes: tuple[int, ...], context: Context) -> str:
    """The operator on images with borders, padded along the dims that are cut."""
    context.algorithms["halo"] = None
    context.use(op.target)
    image, layout = call.args[0], LayoutPair.of(node.ins[0]).value
    whole, result = op.call.ins[0].shape, op.call.outs[0].shape
    cut = {dim_of(layout[axis]): axis for axis in axes}
    for dim, axis in cut.items():
        read = windows.window(op.call, dim)
        named = {"stride": read.stride, "padding": read.padding} if read.stride != 1 or read.padding else {}
        fill = ', fill=float("-inf")' if "max_pool" in str(op.target) and read.padding else ""
        image = (
            f"halo({image}, dim={dim}, axis={axis}, size={sizes.text(whole[dim])}, outs={sizes.text(result[dim])}, "
            f"reach={read.reach}{''.join(f', {k}={v}' for k, v in named.items())}{fill}, mesh=MESH)"
        )
    return write(*_padded(op, replace(call, args=(image, *call.args[1:])), cut))


def _padded(op: Op, call: Written, cut: Collection[int]) -> tuple[Any, Written]:
    """The operator and call with no padding along the dims in `cut`, which `halo` pads; "same" padding is written as
    numbers."""
    arguments, names = given(op.call), [a.name for a in op.target._schema.arguments]
    if arguments["padding"] == "valid":
        return op.target, call
    text = str(windows.paddings(op.call, cut))
    if "padding" in call.kwargs:
        call = replace(call, kwargs={**call.kwargs, "padding": text})
    elif (at := names.index("padding")) < len(call.args):
        call = replace(call, args=(*call.args[:at], text, *call.args[at + 1 :]))
    return (op.target.overloadpacket.default if arguments["padding"] == "same" else op.target), call


def _dropout_p(call: Written) -> str:
    return call.args[4] if len(call.args) > 4 else call.kwargs.get("dropout_p", "0.0")


def _dropout(op: Op, node: NodePlan, call: Written, context: Context) -> str:
    context.algorithms["dropout"] = None
    return f"dropout({call.args[0]}, {call.args[1]}, {_draw(op, node, context)})"


def _draw(op: Op, node: NodePlan, context: Context) -> str:
    """Arguments of a random operator (runtime.rng): the layout, which says which ranks draw the same; a key that does
    not depend on the plan; and `once` where all microbatches draw the same."""
    run = context.program.runs.get(op.scope)
    name = f"{run.whole}/{op.node.name}" if run is not None and run.whole else op.name
    once = context.plan.microbatches > 1 and not is_shard(context.micro((op.name, 0)))
    return f'"{show(LayoutPair.of(node.outs[0]).value)}", key="{name}"{", once=True" if once else ""}, mesh=MESH'


def _statistic(op: Op, node: NodePlan, call: Written, context: Context) -> str:
    context.algorithms["in_training"] = None
    total, count, running = call.args
    own, other = op.out_dtypes[0], facts.dtype(op.node.args[2])  # type: ignore[arg-type]  # a buffer, which is a node
    cast = f".to({own})" if own != other else ""
    parts = math.prod(
        size for size, entry in zip(context.sizes, LayoutPair.of(node.outs[0]).value, strict=True) if entry == "P"
    )
    # in evaluation each rank takes its share of the running statistic, so that the sum over ranks is right
    share = f" / {parts}" if parts > 1 else ""
    return f"in_training({total} / {count}, {running}.reshape({', '.join(call.outs[0])}){cast}{share})"


def _noised(op: Op, node: NodePlan, call: Written, context: Context) -> str:
    context.algorithms["in_training"] = None
    x, noise, keep = call.args
    return f"in_training({x}{f' / {keep}' if float(keep) != 1 else ''} * {noise}, {x})"


def switched(op: Op, call: Written, context: Context) -> Written:
    """The call with its training switch (`passes.switches`) turned off where the module evaluates."""
    switch = SWITCHES.get(op.target)
    if switch is None or not switch.is_on(given(op.call)):
        return call
    context.algorithms["in_training"] = None
    name, value = switch.name, given(op.call)[switch.name]
    text, place = f"in_training({value}, {type(value)()})", place_of(op.target, name)
    if name in call.kwargs:
        return replace(call, kwargs={**call.kwargs, name: text})
    return replace(call, args=(*call.args[:place], text, *call.args[place + 1 :]))


def seeded_text(op: Op, node: NodePlan, text: str, context: Context) -> str:
    """`text` drawing its random numbers by the module's seed, where the operator draws any.

    Dropout has an algorithm of its own.
    """
    if not op.draws:
        return text
    context.algorithms["seeded"] = None
    return f"seeded(lambda: {text}, {_draw(op, node, context)})"


ALGORITHM_TEXTS: dict[str, Callable[[Op, NodePlan, Written, tuple[int, ...], Context], str]] = {
    "bag": _bag,
    "causal_rows": _causal_rows,
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "expert_dispatch": _experts,
    "halo": _halo,
    "own_experts": _experts,
    "own_groups": _own_groups,
    "ring": _ring,
    **{
        f"{name}{count}": write
        for name, write in (("tiles", _tiled), ("lookup_tiles", _tiled_lookup))
        for count in tiles.COUNTS
    },
}

OPERAND_TEXTS: dict[str, Callable[[Op, NodePlan, Written, Context], Written]] = {
    "own_heads": _own_heads,
}
"""Algorithms that only choose parts of operands: the operator itself, or another algorithm, runs on these."""

OWN_TEXTS: dict[object, Callable[[Op, NodePlan, Written, Context], str]] = {
    aten.dropout.default: _dropout,
    ops.experts: _plain_experts,
    ops.noised: _noised,
    ops.statistic: _statistic,
}
"""Operators with a text of their own where no algorithm splits them."""
