"""Operators whose split form is not the plain operator on shards: calls of runtime algorithms.

A row per algorithm of `autopar.rules.algorithms`, and one per operator that is written in its own way: dropout (its
mask must agree on replicas and differ between shards), layers of experts (of which an argument is a function).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sympy
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
from autopar.rules.local import groups_at, with_groups
from autopar.window_rows import Window
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


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """The call of `op` as `node` of the plan runs it: `plain` is the operator itself on local shards; `context` notes
    what the file imports."""

    op: Op
    node: NodePlan
    plain: Written
    context: Context

    @property
    def runs(self) -> tuple[str, ...]:
        """For each mesh axis the algorithm by which the operator is split on it; empty for none."""
        return tuple("" if run in OPERAND_TEXTS else run for run in self.node.runs)

    @property
    def axes(self) -> tuple[int, ...]:
        """The mesh axes on which an algorithm splits the operator."""
        return tuple(axis for axis, run in enumerate(self.runs) if run)

    def on_axes(self, name: str, *arguments: str) -> str:
        """The call of the runtime algorithm `name` on these axes."""
        return self.by(name, *arguments, f"axes={self.axes}", "mesh=MESH")

    def by(self, name: str, *arguments: str) -> str:
        """The call of `name`, a function of the runtime, which the file imports."""
        self.context.algorithms[name] = None
        return f"{name}({', '.join(arguments)})"


def algorithm_text(call: PlannedCall) -> str | None:
    """The call of the runtime algorithm that an operator needs under this plan, or None where the plain operator is
    right."""
    names = list(dict.fromkeys(run for run in call.runs if run))
    writers = list(dict.fromkeys(ALGORITHM_TEXTS[name] for name in names))
    if len(writers) > 1:
        raise ValueError(f"{call.op.name}: algorithms {names} on one operator")
    if writers:
        return writers[0](call)
    return OWN_TEXTS[call.op.target](call) if call.op.target in OWN_TEXTS else None


def operands_chosen(call: PlannedCall) -> PlannedCall:
    """The call with operands replaced by what the algorithms of OPERAND_TEXTS choose of them."""
    for name in dict.fromkeys(run for run in call.node.runs if run in OPERAND_TEXTS):
        call = replace(call, plain=OPERAND_TEXTS[name](call))
    return call


def with_local_groups(call: PlannedCall) -> PlannedCall:
    """The call of a convolution with as many groups as there are on this rank; other calls as they are."""
    op, plain = call.op, call.plain
    if groups_at(op.target) is None or (groups := given(op.call)["groups"]) == 1:
        return call
    channels = 1 - len(op.call.ins[1].shape)
    whole, here = op.call.outs[0].shape[channels], plain.outs[0][channels]
    if here == sizes.text(whole):
        return call
    each = sympy.cancel(whole / sympy.sympify(groups))
    text = str(int(here) // int(each)) if here.isdecimal() else here if each == 1 else f"({here}) // {each}"
    args, kwargs = with_groups(op.target, plain.args, plain.kwargs, text)
    return replace(call, plain=replace(plain, args=args, kwargs=kwargs))


def _own_heads(call: PlannedCall) -> Written:
    query, key = call.op.call.ins[:2]
    dim, plain = len(query.shape) - 3, call.plain
    axes, within = (cutters(LayoutPair.of(text).value, dim) for text in call.node.ins[:2])
    rest = (f"heads={query.shape[dim]}", f"groups={key.shape[dim]}", f"axes={axes}", f"within={within}", "mesh=MESH")
    taken = tuple(call.by("own_heads", text, *rest) for text in plain.args[1:3])
    return replace(plain, args=(plain.args[0], *taken, *plain.args[3:]))


def _embedding(call: PlannedCall) -> str:
    return call.on_axes("vocab_embedding", *_lookup(call), f"vocab={call.op.call.ins[0].shape[0]}")


def _lookup(call: PlannedCall) -> tuple[str, ...]:
    """The arguments of a lookup by an algorithm: ids, the weight and, if it is given, the number of the padding row."""
    return (call.plain.args[1], call.plain.args[0], *call.plain.args[2:3])


def _bag(call: PlannedCall) -> str:
    return call.on_axes("vocab_bag", *call.plain.args, f"vocab={call.op.call.ins[0].shape[0]}")


def _cross_entropy(call: PlannedCall) -> str:
    return call.on_axes("vocab_cross_entropy_sum", *call.plain.args, f"vocab={call.op.call.ins[0].shape[-1]}")


def _causal_rows(call: PlannedCall) -> str:
    if _dropout_p(call.plain) != "0.0":
        raise PlanError(f"{call.op.name} ({call.op.where}): attention with dropout cannot be split over query rows")
    named = (f"{key}={text}" for key, text in call.plain.kwargs.items() if key in ("scale", "enable_gqa"))
    return call.on_axes("causal_rows", *call.plain.args[:3], *named, _rows(call))


def _rows(call: PlannedCall) -> str:
    """How many rows of queries there are on all ranks together, as an argument."""
    return f"rows={sizes.text(call.op.call.ins[0].shape[-2])}"


def _experts(call: PlannedCall) -> str:
    call.context.use(ops.expert_rows)
    hidden, chosen, gates, up, down, _, *bias = call.plain.args
    dispatch = tuple(axis for axis in call.axes if call.runs[axis] == "expert_dispatch")
    return call.by(
        "experts_on_ranks",
        f"lambda rows, ends: expert_rows({', '.join(['rows', up, down, 'ends', _inner(call), *bias])})",
        *(hidden, chosen, gates, f"experts={call.op.call.ins[3].shape[0]}"),
        *(f"axes={call.axes}", f"dispatch={dispatch}", "mesh=MESH"),
    )


def _plain_experts(call: PlannedCall) -> str:
    call.context.use(ops.experts)
    args = call.plain.args
    return f"experts({', '.join([*args[: ops.INNER], _inner(call), *args[ops.BIAS :]])})"


def _inner(call: PlannedCall) -> str:
    """What is between the layers of an expert, as the function that its text writes."""
    text = str(call.op.call.args[ops.INNER])
    for name in (ops.halves, ops.pairs):
        if text.startswith(f"{name.__name__}("):
            call.context.use(name)
    return text


def _own_groups(call: PlannedCall) -> str:
    call.context.use(ops.grouped_matmul)
    rows, weights, ends = call.plain.args
    each = f"lambda rows, ends: grouped_matmul(rows, {weights}, ends)"
    return call.on_axes("own_groups", each, rows, ends, f"groups={call.op.call.ins[1].shape[0]}")


def _ring(call: PlannedCall) -> str:
    named = dict(zip(("attn_mask", "dropout_p", "is_causal"), call.plain.args[3:], strict=False)) | call.plain.kwargs
    kept = (
        f"{key}={text}"
        for key, text in named.items()
        if (key, text) not in (("attn_mask", "None"), ("is_causal", "False")) and key != "dropout_p"
    )
    return call.on_axes("ring_attention", *call.plain.args[:3], *kept, _rows(call))


def _tiled(call: PlannedCall) -> str:
    name = "tiled_linear" if call.op.target in tiles.BY_OUTPUTS else "tiled_matmul"
    named = (f"{key}={text}" for key, text in call.plain.kwargs.items())
    return call.on_axes(name, *call.plain.args, *named, _tiles(call))


def _tiled_lookup(call: PlannedCall) -> str:
    return call.on_axes("tiled_embedding", *_lookup(call), _tiles(call))


def _tiles(call: PlannedCall) -> str:
    """In how many tiles the weight is gathered, as an argument."""
    (axis,) = call.axes
    return f"tiles={tiles.tiles(call.runs[axis])}"


def _halo(call: PlannedCall) -> str:
    """The operator on images with borders, padded along the dims that are cut."""
    op, image, layout = call.op, call.plain.args[0], LayoutPair.of(call.node.ins[0]).value
    call.context.use(op.target)
    whole, result = op.call.ins[0].shape, op.call.outs[0].shape
    cut = {dim_of(layout[axis]): axis for axis in call.axes}
    for dim, axis in cut.items():
        read = windows.window(op.call, dim)
        image = call.by(
            "halo",
            *(image, f"dim={dim}", f"axis={axis}", f"size={sizes.text(whole[dim])}"),
            *(f"outs={sizes.text(result[dim])}", f"reach={read.reach}"),
            *((f"stride={read.stride}", f"padding={read.padding}") if read.stride != 1 or read.padding else ()),
            *(('fill=float("-inf")',) if _largest_outside(op, read) else ()),
            "mesh=MESH",
        )
    return write(*_padded(op, replace(call.plain, args=(image, *call.plain.args[1:])), cut))


def _largest_outside(op: Op, read: Window) -> bool:
    """Whether windows whose largest row counts reach outside of the image: by padding, or behind it by ceil_mode."""
    return "max_pool" in str(op.target) and bool(read.padding or given(op.call)["ceil_mode"])


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


def _dropout(call: PlannedCall) -> str:
    return call.by("dropout", *call.plain.args[:2], *_draw(call))


def _draw(call: PlannedCall) -> tuple[str, ...]:
    """Arguments of a random operator (runtime.rng): the layout, which says which ranks draw the same; a key that does
    not depend on the plan; and `once` where all microbatches draw the same."""
    op, context = call.op, call.context
    run = context.program.runs.get(op.scope)
    name = f"{run.whole}/{op.node.name}" if run is not None and run.whole else op.name
    once = context.plan.microbatches > 1 and not is_shard(context.micro((op.name, 0)))
    layout = show(op.drawn(LayoutPair.of(call.node.outs[0]).value))
    return (f'"{layout}"', f'key="{name}"', *(("once=True",) if once else ()), "mesh=MESH")


def _statistic(call: PlannedCall) -> str:
    op, (total, count, running) = call.op, call.plain.args
    own, other = op.out_dtypes[0], facts.dtype(op.node.args[2])  # type: ignore[arg-type]  # a buffer, which is a node
    cast = f".to({own})" if own != other else ""
    layout = LayoutPair.of(call.node.outs[0]).value
    parts = math.prod(size for size, entry in zip(call.context.sizes, layout, strict=True) if entry == "P")
    # in evaluation each rank takes its share of the running statistic, so that the sum over ranks is right
    share = f" / {parts}" if parts > 1 else ""
    known = f"{running}.reshape({', '.join(call.plain.outs[0])}){cast}{share}"
    return call.by("in_training", f"{total} / {count}", known)


def _noised(call: PlannedCall) -> str:
    x, noise, keep = call.plain.args
    return call.by("in_training", f"{x}{f' / {keep}' if float(keep) != 1 else ''} * {noise}", x)


def switched(call: PlannedCall) -> Written:
    """The plain call with its training switch (`passes.switches`) turned off where the module evaluates."""
    op, plain = call.op, call.plain
    switch = SWITCHES.get(op.target)
    if switch is None or not switch.is_on(given(op.call)):
        return plain
    name, value = switch.name, given(op.call)[switch.name]
    text, place = call.by("in_training", str(value), str(type(value)())), place_of(op.target, name)
    if name in plain.kwargs:
        return replace(plain, kwargs={**plain.kwargs, name: text})
    return replace(plain, args=(*plain.args[:place], text, *plain.args[place + 1 :]))


def seeded_text(call: PlannedCall, text: str) -> str:
    """`text` drawing its random numbers by the module's seed, where the operator draws any.

    Dropout has an algorithm of its own.
    """
    return call.by("seeded", f"lambda: {text}", *_draw(call)) if call.op.draws else text


ALGORITHM_TEXTS: dict[str, Callable[[PlannedCall], str]] = {
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

OPERAND_TEXTS: dict[str, Callable[[PlannedCall], Written]] = {
    "own_heads": _own_heads,
}
"""Algorithms that only choose parts of operands: the operator itself, or another algorithm, runs on these."""

OWN_TEXTS: dict[object, Callable[[PlannedCall], str]] = {
    aten.dropout.default: _dropout,
    ops.experts: _plain_experts,
    ops.noised: _noised,
    ops.statistic: _statistic,
}
"""Operators with a text of their own where no algorithm splits them."""
