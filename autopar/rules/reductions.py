"""Reductions and operators that need a dim whole: sums, maxima, softmax, norms, cumsum, sorting, indexing, factories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.rules.language import Call
from autopar.rules.rule import Rule
from autopar.rules.views import names

aten = torch.ops.aten


def _dims(call: Call, position: int, rank: int, default: Any = None) -> set[int]:
    dims = call.args[position] if len(call.args) > position else default
    if dims is None or dims == []:
        return set(range(rank))
    return {d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])} if rank else set()


def reduced(position: int = 1, keep: int = 2, mark: str = "") -> Callable[[Call], str]:
    """Dims `args[position]` are reduced away, or stay as size 1 where `args[keep]`; `mark` "!" forbids splitting them."""
    def spec(call: Call) -> str:
        rank = len(call.ins[0].shape)
        gone = _dims(call, position, rank)
        kept = call.args[keep] if len(call.args) > keep else call.kwargs.get("keepdim", False)
        left = [w + (mark if i in gone else "") for i, w in enumerate(names(rank))]
        right = ["1" if i in gone else w for i, w in enumerate(names(rank)) if kept or i not in gone]
        return f"{' '.join(left)} -> {', '.join(' '.join(right) for _ in call.outs)}"
    return spec


def everything(mark: str = "") -> Callable[[Call], str]:
    """All dims are reduced away."""
    return lambda call: f"{' '.join(w + mark for w in names(len(call.ins[0].shape)))} -> "


def whole_dim(position: int = 1, default: Any = -1) -> Callable[[Call], str]:
    """One dim must be whole, in all operands and outputs, whose shapes are alike; all others can be cut (softmax, cumsum, sort)."""
    def spec(call: Call) -> str:
        rank = len(call.ins[0].shape)
        whole = _dims(call, position, rank, default)
        words = " ".join(w + ("!" if i in whole else "") for i, w in enumerate(names(rank)))
        outs = [" ".join((w + "!" if t.shape[i] == call.ins[0].shape[i] else f"{w}2!") if i in whole else w
                         for i, w in enumerate(names(rank))) for t in call.outs]
        return f"{', '.join(words for _ in call.ins)} -> {', '.join(outs)}"
    return spec


def layer_norm(call: Call) -> str:
    """The normalised dims are whole; weights lie along them."""
    count = len(call.args[1])
    last = " ".join(f"n{i}!" for i in range(count))
    return f"... {last}{f', {last}' * (len(call.ins) - 1)} -> ... {last}"


def group_norm(call: Call) -> str:
    """Only samples split: statistics go over channels and positions."""
    rank = len(call.ins[0].shape)
    words = " ".join(f"{w}!" for w in names(rank)[1:])
    return f"a {words}{', b!' * (len(call.ins) - 1)} -> a {words}"


def batch_norm(call: Call) -> str:
    """With running statistics: pointwise, each channel by its own."""
    rest = " ".join(names(len(call.ins[0].shape))[2:])
    return f"a b {rest}{', b' * (len(call.ins) - 1)} -> a b {rest}"


def pooling(spatial: int) -> Callable[[Call], str]:
    """Samples and channels split; positions do not."""
    def spec(call: Call) -> str:
        lead = names(len(call.ins[0].shape) - spatial)
        ins = " ".join([*lead, *(f"h{i}!" for i in range(spatial))])
        outs = " ".join([*lead, *(f"o{i}!" for i in range(spatial))])
        return f"{ins} -> {', '.join(outs for _ in call.outs)}"
    return spec


def replicated(call: Call) -> str:
    """Nothing can be cut: each rank computes the whole."""
    def part(number: int, rank: int) -> str:
        return " ".join(f"x{number}n{i}!" for i in range(rank))
    ins = [part(i, len(t.shape)) for i, t in enumerate(call.ins)]
    outs = [part(len(ins) + i, len(t.shape)) for i, t in enumerate(call.outs)]
    return f"{', '.join(ins)} -> {', '.join(outs)}"


def gather(call: Call) -> str:
    """The indexed dim is whole; others are cut where both sides have the same size."""
    rank = len(call.ins[0].shape)
    dim = call.args[1] % rank
    same = [one == other for one, other in zip(call.ins[0].shape, call.ins[1].shape, strict=True)]
    left = [w if same[i] and i != dim else f"{w}!" for i, w in enumerate(names(rank))]
    right = [w if same[i] and i != dim else f"{w}2!" for i, w in enumerate(names(rank))]
    return f"{' '.join(left)}, {' '.join(right)} -> {' '.join(right)}"


def index_select(call: Call) -> str:
    rank = len(call.ins[0].shape)
    dim = call.args[1] % rank
    left = [f"{w}!" if i == dim else w for i, w in enumerate(names(rank))]
    right = ["z" if i == dim else w for i, w in enumerate(names(rank))]
    return f"{' '.join(left)}, z -> {' '.join(right)}"


WHOLE = Rule(replicated)

RULES: dict[Any, Rule] = {
    aten._softmax.default: Rule(whole_dim()),
    aten.amax.default: Rule(reduced(mark="!")),
    aten.amin.default: Rule(reduced(mark="!")),
    aten.any.default: Rule(everything("!")),
    aten.all.default: Rule(everything("!")),
    aten.argmax.default: Rule(reduced(mark="!")),
    aten.avg_pool2d.default: Rule(pooling(2), linear="all"),
    aten.batch_norm.default: Rule(batch_norm),
    aten.cumprod.default: Rule(whole_dim()),
    aten.cumsum.default: Rule(whole_dim(), linear="all"),
    aten.gather.default: Rule(gather),
    aten.group_norm.default: Rule(group_norm),
    aten.index_select.default: Rule(index_select),
    aten.layer_norm.default: Rule(layer_norm),
    aten.log_softmax.int: Rule(whole_dim()),
    aten.logsumexp.default: Rule(reduced(mark="!")),
    aten.max_pool1d.default: Rule(pooling(1)),
    aten.max_pool2d.default: Rule(pooling(2)),
    aten.mean.default: Rule(everything("!"), linear="all"),
    aten.mean.dim: Rule(reduced(mark="!"), linear="all"),
    aten.one_hot.default: Rule("... -> ... n!"),
    aten.prod.dim_int: Rule(reduced(mark="!")),
    aten.rms_norm.default: Rule(layer_norm),
    aten.softmax.int: Rule(whole_dim()),
    aten.sort.default: Rule(whole_dim()),
    aten.sum.default: Rule(everything(), linear="all"),
    aten.sum.dim_IntList: Rule(reduced(), linear="all"),
    aten.topk.default: Rule(whole_dim(2)),
    aten.tril.default: Rule("... r! c! -> ... r! c!", linear="all"),
    aten.triu.default: Rule("... r! c! -> ... r! c!", linear="all"),
    aten.var.correction: Rule(reduced(mark="!")),
}
