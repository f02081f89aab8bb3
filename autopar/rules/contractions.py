"""Contractions and lookups: matmuls, convolutions, attention, embedding, einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.rules.arguments import Spec, given, line, replicated, rule
from autopar.rules.halo import borders
from autopar.rules.language import Call
from autopar.rules.ring import ring
from autopar.rules.rule import Rule
from passes import ops
from passes.einsums import spelled

aten = torch.ops.aten


def matmul(call: Call) -> str:
    """As torch.matmul: batch dims broadcast, aligned at the right; an operand may be a vector."""
    one, other = (len(t.shape) for t in call.ins)
    if one == 1 or other == 1:
        left = "k" if one == 1 else "... m k"
        right = "k" if other == 1 else "... k n"
        out = ("..." if max(one, other) > 1 else "", "m" if one > 1 else "", "n" if other > 1 else "")
        return rule([left, right], [" ".join(w for w in out if w)])
    if other == 2:
        return "... k, k n -> ... n"
    return "... m k, ... k n -> ... m n"


def with_bias(plain: str, bias: str) -> Spec:
    """The rule `plain` of two operands; where there is a third one, it is the bias, which is added to the output."""

    def spec(call: Call) -> str:
        left, right = plain.split(" -> ")
        return plain if len(call.ins) == 2 else f"{left}, +{bias} -> {right}"

    return spec


def linear(call: Call) -> str:
    """`weight [o, i]` has a row per output. A weight `[i]` gives one number per row of the input, and has no bias."""
    return "... i, i -> ..." if len(call.ins[1].shape) == 1 else with_bias("... i, o i -> ... o", "o")(call)


def linear_with_bias(call: Call) -> str:
    """The linearity (Rule.linear) of a product: in each of two operands alone; with a bias, in each of them together
    with the bias."""
    return "each" if len(call.ins) == 2 else "0+2|1+2"


def linear_without_bias(call: Call) -> str:
    """The linearity (Rule.linear) of a convolution: in each of two operands alone; with a bias, in none."""
    return "each" if len(call.ins) == 2 else ""


def added(call: Call) -> str:
    """`addmv`: the added operand comes first and broadcasts to the result."""
    return f"{' '.join('1' if n == 1 else 'm' for n in call.ins[0].shape)}, m k!, k! -> m"


def einsum(call: Call) -> str:
    """The equation itself. A letter that an operand has twice stays whole; a dim of size 1 where another operand is
    larger is a broadcast."""
    ins, out = spelled(str(call.args[0]), [tensor.shape for tensor in call.ins])
    sizes: dict[str, set[Any]] = {}
    for letters, tensor in zip(ins, call.ins, strict=True):
        for letter, size in zip(letters, tensor.shape, strict=True):
            sizes.setdefault(letter, set()).add(size)
    twice = {letter for letters in ins for letter in letters if letters.count(letter) > 1}
    sides = [
        " ".join(
            "1" if size == 1 and len(sizes[letter]) > 1 else f"{letter}!" if letter in twice else letter
            for letter, size in zip(letters, tensor.shape, strict=True)
        )
        for letters, tensor in zip(ins, call.ins, strict=True)
    ]
    return rule(sides, [" ".join(out)])


def convolution(call: Call) -> str:
    """Samples and output channels split. A split of input channels leaves a partial sum, and is possible where there is
    no bias. Spatial dims are split by the algorithm `halo` (`rules.halo`). With groups, those of depthwise convolutions
    split, as channels of what is pointwise do; their number is that of a rank (`rules.local`)."""
    return _convolution(call, transposed=False)


def transposed_convolution(call: Call) -> str:
    """As `convolution`, for a weight with input channels first and without a split of spatial dims."""
    return _convolution(call, transposed=True)


def _convolution(call: Call, *, transposed: bool) -> str:
    """The rule of a convolution, whose weight is [outputs, inputs / groups, kernel...]; of a transposed one
    [inputs, outputs / groups, kernel...]."""
    if 0 in call.ins[1].shape[:2]:  # torch gives no output channels where there are no input channels
        return replicated(call)
    spatial = len(call.ins[1].shape) - 2
    if given(call)["groups"] != 1:
        channels, out, within = _in_groups(call, -spatial - 1, transposed)
        weight = f"{channels if transposed else out} {within}"
    else:
        channels, out = "i" if len(call.ins) == 2 else "i!", "o"
        weight = f"{channels} {out}" if transposed else f"{out} {channels}"
    kernel, sizes, new_sizes = (" ".join(f"{letter}{d}!" for d in range(spatial)) for letter in "khp")
    batch = "b " if len(call.ins[0].shape) == spatial + 2 else ""
    bias = [out] if len(call.ins) > 2 else []
    return rule([f"{batch}{channels} {sizes}", f"{weight} {kernel}", *bias], [f"{batch}{out} {new_sizes}"])


def _in_groups(call: Call, dim: int, transposed: bool) -> tuple[str, str, str]:
    """The words for channels, at `dim`, of the image and of the result of a convolution with groups, and for the second
    dim of its weight. Groups are cut where they are a dim of one of the two, as in depthwise convolutions: its size
    tells over how many ranks."""
    image, result = call.ins[0].shape[dim], call.outs[0].shape[dim]
    groups = given(call)["groups"]
    if groups not in (image, result):
        return "i!", "o!", "j!"
    channels, out = ("g" if size == groups else f"(g {f}!)" for size, f in ((image, "i"), (result, "o")))
    inner = out if transposed else channels
    return channels, out, "1" if inner == "g" else f"{inner[3]}!"


def attention(call: Call) -> str:
    """The rule of scaled_dot_product_attention. Samples, heads and the features of the values split; keys stay whole.
    Query rows split: by `causal_rows` with a causal mask, without an algorithm where nothing depends on positions, and
    together with the keys by `ring`. Groups of query heads (enable_gqa) split together with their key heads.

    Replicated where queries, keys and values have different numbers of dims, and where only the values have more than
    one sample or head."""
    arguments = given(call)
    if len({len(t.shape) for t in call.ins[:3]}) > 1 or _stretched_by_values(call):
        return replicated(call)
    rows = (
        "q!"
        if arguments["dropout_p"] and arguments["is_causal"]
        else "q@causal_rows"
        if arguments["is_causal"]
        else "q"
    )
    return _attention(call, "(h r!)" if _grouped(call) else "h", rows, "v")


def grouped_heads(call: Call) -> str:
    """The second rule of attention with grouped query heads: query heads split without regard to the number of key
    heads. Keys and values stay whole, and `own_heads` takes the heads that a rank's queries attend to."""
    return _attention(call, "g@own_heads", "q", "v") if _grouped(call) else ""


def values(call: Call) -> float:
    """The share of the product with the values in the FLOPs of attention: for d features of queries and keys and v of
    values, v / (d + v)."""
    of_keys, of_values = call.ins[0].sizes[-1], call.ins[2].sizes[-1]
    return of_values / (of_keys + of_values)


def _grouped(call: Call) -> bool:
    """Whether several query heads share one key head."""
    return (
        bool(given(call)["enable_gqa"])
        and len(call.ins[0].shape) == len(call.ins[1].shape) == len(call.ins[2].shape)
        and call.ins[0].shape[-3] != call.ins[1].shape[-3]
    )


def _attention(call: Call, heads: str, rows: str, features: str) -> str:
    """The rule with the words `heads` and `rows` for the queries' dims, and `features` for the last dim of the values;
    the heads of keys and values are `h`."""
    rank = len(call.ins[0].shape)
    lead = ["b", "h"][4 - rank :] if rank <= 4 else [f"b{i}" for i in range(rank - 3)] + ["h"]
    names = [*(heads if w == "h" else w for w in lead), rows, "d!"]
    pairs = [[*lead, "k!", "d!"], [*lead, "k!", features]]
    out = [*names[:-1], features]
    ins = [names, *pairs]
    if len(call.ins) > 3:
        ins.append([*names[:-1], "c!"][rank - len(call.ins[3].shape) :])
    full = _full_sizes(call)

    def text(operand: int, words: Sequence[str], shape: Sequence[Any]) -> str:
        """The words of an operand, with 1 for dims that are broadcast: batch dims and rows of size 1 where others are
        larger; and all dims of size 1 of a mask with several keys."""
        of_mask, offset = operand == 3 and full[-1] != 1, rank - len(shape)
        stretched = [
            size == 1 and (of_mask or (dim < len(shape) - 1 and full[offset + dim] != 1))
            for dim, size in enumerate(shape)
        ]
        return " ".join("1" if broadcast else word for broadcast, word in zip(stretched, words, strict=True))

    texts = [text(i, words, t.shape) for i, (words, t) in enumerate(zip(ins, call.ins, strict=True))]
    return rule(texts, [" ".join(out)])


def _stretched_by_values(call: Call) -> bool:
    """Whether a batch dim is larger than 1 in the values alone. A cut of it would divide the product with the values
    but not that of queries and keys."""
    query, key, value = (t.shape[:-2] for t in call.ins[:3])
    return any(q == 1 and k == 1 and v != 1 for q, k, v in zip(query, key, value, strict=True))


def _full_sizes(call: Call) -> list[Any]:
    """The sizes of the attention scores: batch dims of queries and keys broadcast, then query rows and keys."""
    query, key = call.ins[0].shape, call.ins[1].shape
    lead = [q if q != 1 else k for q, k in zip(query[:-2], key[:-2], strict=True)]
    return [*lead, query[-2], key[-2]]


def embedding(call: Call) -> str:
    """One row of the table per id. Where the vocabulary is split, ids of other ranks give zeros (algorithm
    `embedding`), and the outputs sum up. The table's rows stay whole where gradients are scaled by how often an id
    occurs in the batch."""
    if given(call)["scale_grad_by_freq"]:  # by how often an id comes in the whole batch
        ids = line(len(call.ins[1].shape), {dim: f"x{dim}!" for dim in range(len(call.ins[1].shape))})
        return rule(["v! d", ids], [f"{ids} d"])
    return "v@embedding d, ... -> ... d"


def bag(call: Call) -> str:
    """Sums (or means, or maxima) of bags of table rows. Where the rows are split, those of other ranks count as zero
    (algorithm `bag`), and sums and means add up; maxima do not."""
    lead = " ".join(f"t{d}" for d in range(len(call.ins[1].shape) - 1))
    rows = "v!" if _mode(call) == "max" else "v@bag"
    return f"{rows} d, {lead} n!{f', {lead} n!' if len(call.ins) > 2 else ''} -> {lead} d"


def bag_of_sums(call: Call) -> str:
    """A sum or mean is linear in the table; a sum also in its weights."""
    return "" if _mode(call) == "max" else "0|2" if len(call.ins) > 2 else "0"


def _mode(call: Call) -> str:
    return str(dict(enumerate(call.args)).get(ops.MODE, "sum"))


def ragged_bags(call: Call) -> str:
    """Bags of different lengths, concatenated. Which ids belong to which sample depends on data, so only the width of
    the table can be cut."""
    return rule(["v! d", *(f"x{i}!" for i in range(1, len(call.ins)))], ["b! d"])


RULES: dict[Any, Rule] = {
    ops.bag: Rule(bag, linear=bag_of_sums),
    ops.ragged_bags: Rule(ragged_bags),
    aten.embedding_bag.padding_idx: Rule(replicated),
    aten.addmv.default: Rule(added),
    aten.bmm.default: Rule("b m k, b k n -> b m n", linear="each"),
    aten.cdist.default: Rule("... p k!, ... r k! -> ... p r"),
    **{
        op: Rule(convolution, linear=linear_without_bias, together=borders)
        for op in (
            aten.conv1d.default,
            aten.conv2d.default,
            aten.conv3d.default,
            aten.conv1d.padding,
            aten.conv2d.padding,
            aten.conv3d.padding,
        )
    },
    **{
        op: Rule(transposed_convolution, linear=linear_without_bias)
        for op in (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
    },
    aten.dot.default: Rule("k, k -> ", linear="each"),
    aten.einsum.default: Rule(einsum, linear="each"),
    aten.embedding.default: Rule(embedding),
    aten.linear.default: Rule(linear, linear=linear_with_bias),
    aten.matmul.default: Rule(matmul, linear="each"),
    aten.mv.default: Rule("m k, k -> m", linear="each"),
    aten.outer.default: Rule("m, n -> m n", linear="each"),
    aten.scaled_dot_product_attention.default: Rule(attention, together=ring, also=grouped_heads, partly={"v": values}),
    ops.affine: Rule(with_bias("... k, k n -> ... n", "n"), linear=linear_with_bias),
    ops.count_each: Rule("n -> c!"),
    ops.grouped_matmul: Rule("n! k, g@own_groups k m, e! -> n! m", linear="0|1"),
}
