"""Reductions, and operators that need a dim whole: sums, maxima, softmax, norms, cumulative sums, sorting."""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.arguments import Spec, dims, given, line, named, rank_of, replicated, rule, words
from autopar.rules.language import Call
from autopar.rules.rule import Rule
from passes import ops

aten = torch.ops.aten


def reduced(mark: str = "") -> Spec:
    """The rule of a reduction over the dims in argument `dim` (None: all dims). They are removed, or kept with size 1
    where argument `keepdim` is true. `mark` "!" forbids splitting them."""

    def spec(call: Call) -> str:
        rank, arguments = rank_of(call), given(call)
        gone = dims(arguments.get("dim"), rank)
        if arguments.get("dim") == [] and call.outs[0].shape == call.ins[0].shape:
            gone = []  # all.dims and any.dims: an empty list stands for no dims
        stay = arguments.get("keepdim")
        right = [w for i, w in enumerate(words(rank, dict.fromkeys(gone, "1"))) if i not in gone or stay]
        return rule([line(rank, {d: f"d{d}{mark}" for d in gone})], [" ".join(right) for _ in call.outs])

    return spec


def whole_dim(call: Call) -> str:
    """One dim is whole in operands and outputs; all others, of the same sizes on both sides, can be cut (softmax,
    cumsum, sort, glu)."""
    rank = rank_of(call)
    whole = dims(given(call).get("dim"), rank)
    return rule(
        [line(rank, {d: f"y{d}!" for d in whole}) for _ in call.ins],
        [line(rank, {d: f"z{d}!" for d in whole}) for _ in call.outs],
    )


def layer_norm(call: Call) -> str:
    """The normalised dims are whole, and weights have only these. Statistics, where they are outputs, have size 1
    there."""
    count = len(given(call)["normalized_shape"])
    last = " ".join(f"n{i}!" for i in range(count))
    ones = " ".join("1" for _ in range(count))
    return rule(
        [f"... {last}", *(last for _ in call.ins[1:])], [f"... {last}", *(f"... {ones}" for _ in call.outs[1:])]
    )


def group_norm(call: Call) -> str:
    """Only samples split: statistics are taken over channels and positions."""
    rank = rank_of(call)
    left = " ".join(["a", "c!", *(f"d{i}!" for i in range(2, rank))])
    return rule([left, *("c!" for _ in call.ins[1:])], [left])


def instance_norm(call: Call) -> str:
    """Channels split. With statistics of each sample, samples split too, unless running statistics are made of all
    samples. With given running statistics, samples and positions split."""
    arguments, rank = given(call), rank_of(call)
    own = arguments["use_input_stats"]
    sample, mark = "a!" if own and arguments["running_mean"] is not None else "a", "!" if own else ""
    left = " ".join([sample, "c", *(f"d{i}{mark}" for i in range(2, rank))])
    return rule([left, *("c" for _ in call.ins[1:])], [left])


def statistic(call: Call) -> str:
    """The sum of a batch per channel; `c` is also the only dim of running statistics."""
    left = " ".join("c" if i == 1 else "1" for i in range(rank_of(call)))
    return rule([left, "c"], [left])


def weight_norm(call: Call) -> str:
    """A weight, and its norms along `dim`, which have size 1 in all other dims. The dims that a norm sums over are
    whole."""
    rank, along = rank_of(call), given(call)["dim"]
    left = line(rank, {d: f"d{d}!" for d in range(rank) if d != along % rank or along == -1})
    right = " ".join("1" if n == 1 else f"d{i}" for i, n in enumerate(call.ins[1].shape))
    return rule([left, right], [left])


def _pair(call: Call, along: int, left: str = "") -> str:
    """Two operands that broadcast against each other, whole along dim `along`; `left` is the word for that dim in the
    result, "" where it is removed."""
    rank = max(len(t.shape) for t in call.ins)
    if not rank:  # torch takes two scalars too
        return replicated(call)
    whole = along % rank
    ins = [
        [
            ("1" if n == 1 else w)
            for w, n in zip(words(rank, {whole: "y!"})[rank - len(t.shape) :], t.shape, strict=True)
        ]
        for t in call.ins
    ]
    met = {word for side in ins for word in side}  # a dim of size 1 in all operands is one in the result
    out = [left if d == whole else w if w in met else "1" for d, w in enumerate(words(rank))]
    return rule([" ".join(w) for w in ins], [" ".join(word for word in out if word)])


def cosine(call: Call) -> str:
    """One number per pair of vectors along `dim`."""
    return _pair(call, given(call)["dim"])


def distance(call: Call) -> str:
    """One number per pair of vectors along the last dim."""
    return _pair(call, -1, "1" if given(call)["keepdim"] else "")


def cross(call: Call) -> str:
    """One vector per pair of vectors along `dim`."""
    return _pair(call, given(call)["dim"], "z!")


WHOLE_DIM = """softmax.int log_softmax.int
    argsort.default argsort.stable cumprod.default cummax.default cummin.default glu.default logcumsumexp.default
    sort.default sort.stable topk.default"""
"""Operators that need their `dim` whole and do not let a partial sum through."""

REDUCED = """all.dim all.dims amax.default amin.default any.dim any.dims argmax.default argmin.default logsumexp.default
    max.dim min.dim median.dim nanmedian.dim mode.default kthvalue.default prod.dim_int std.correction
    var.correction var_mean.correction std_mean.correction linalg_vector_norm.default
    norm.ScalarOpt_dim
    aminmax.default all.default any.default max.default min.default median.default prod.default
    norm.Scalar linalg_norm.default linalg_norm.ord_str
    linalg_matrix_norm.default linalg_matrix_norm.str_ord
    nanmean.default nanquantile.scalar quantile.scalar"""
"""Reductions that need the reduced dims whole."""

RULES: dict[Any, Rule] = {
    **{op: Rule(whole_dim) for op in named(WHOLE_DIM)},
    **{op: Rule(reduced("!")) for op in named(REDUCED)},
    aten._weight_norm.default: Rule(weight_norm),
    aten.cosine_similarity.default: Rule(cosine),
    aten.count_nonzero.default: Rule(reduced()),
    aten.count_nonzero.dim_IntList: Rule(reduced()),
    aten.cumsum.default: Rule(whole_dim, linear="all"),
    aten.group_norm.default: Rule(group_norm),
    aten.instance_norm.default: Rule(instance_norm),
    aten.layer_norm.default: Rule(layer_norm),
    aten.linalg_cross.default: Rule(cross, linear="each"),
    aten.pairwise_distance.default: Rule(distance),
    aten.nansum.default: Rule(reduced()),
    aten.native_layer_norm.default: Rule(layer_norm),
    aten.rms_norm.default: Rule(layer_norm),
    aten.sum.default: Rule(reduced(), linear="all"),
    aten.sum.dim_IntList: Rule(reduced(), linear="all"),
    ops.statistic: Rule(statistic, linear="first"),
}
