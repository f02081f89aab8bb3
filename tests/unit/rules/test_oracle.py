"""Every row of the rule table is proven: the operator on shards, as emitted, gives what it gives whole, gradients
included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import sympy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autopar._torch import pytree
from autopar.codegen.expressions import Written, write
from autopar.rules import RULES
from autopar.rules import halo as windows
from autopar.rules.halo import borders
from autopar.rules.language import Call, Tensor
from autopar.rules.local import local_args
from autopar.rules.oracle import call_of, failures, shapes_of, shards_of
from autopar.rules.rule import Rule
from autopar.runtime.mesh import Mesh
from passes import ops
from tests.helpers.halos import halo
from tests.unit.rules import samples_pointwise as pointwise
from tests.unit.rules import samples_views as views
from tests.unit.rules.samples import Case, case, f, fill, i, reseed
from tests.unit.rules.table import SAMPLES

aten = torch.ops.aten


def embedding(shards: Sequence[Any]) -> list[torch.Tensor]:
    """Each rank looks up the ids of its own rows, and gives zeros for others; a padding id gives a row that does not
    learn."""
    outs, start = [], 0
    for (weight, ids, *padding), _ in shards:
        mine = (ids >= start) & (ids < start + len(weight))
        rows = torch.zeros(*ids.shape, weight.shape[1], dtype=weight.dtype)
        found = rows.index_put((mine,), weight[ids[mine] - start])
        outs.append(torch.where((ids == padding[0]).unsqueeze(-1), found.detach(), found) if padding else found)
        start += len(weight)
    return outs


def bag(shards: Sequence[Any]) -> list[torch.Tensor]:
    """Each rank adds up the rows that it has; means are over those of all."""
    outs, start = [], 0
    for (table, chosen, *rest), _ in shards:
        gates, mode, padding = (*rest, *(None, "sum", -1)[len(rest) :])
        mine, counted = (chosen >= start) & (chosen < start + len(table)), chosen != padding
        rows = (table[(chosen - start).where(mine, 0)] * (mine & counted).unsqueeze(-1)) * (
            1 if gates is None else gates.unsqueeze(-1)
        )
        outs.append(rows.sum(-2) / (counted.sum(-1, keepdim=True).clamp(min=1) if mode == "mean" else 1))
        start += len(table)
    return outs


def cross_entropy(shards: Sequence[Any]) -> list[torch.Tensor]:
    """The loss of all classes together, as the part of rank 0."""
    logits = torch.cat([args[0] for args, _ in shards], -1)
    total = ops.cross_entropy_sum(logits, *shards[0][0][1:])
    return [total, *(torch.zeros_like(total) for _ in shards[1:])]


def causal_rows(shards: Sequence[Any]) -> list[torch.Tensor]:
    """Each rank has some query rows and sees the keys up to them."""
    outs, start = [], 0
    for (query, key, value, *_), kwargs in shards:
        rows = torch.arange(start, start + query.shape[-2])
        mask = rows.unsqueeze(1) >= torch.arange(key.shape[-2])
        gqa = kwargs.get("enable_gqa", False)
        outs.append(aten.scaled_dot_product_attention.default(query, key, value, mask, enable_gqa=gqa))
        start += query.shape[-2]
    return outs


def own_experts(shards: Sequence[Any]) -> list[torch.Tensor]:
    """Each rank has all tokens, and gives 0 for the experts of others."""
    outs, start = [], 0
    for (hidden, chosen, gates, up, *more), _ in shards:
        mine = (chosen >= start) & (chosen < start + len(up))
        outs.append(ops.experts(hidden, (chosen - start).where(mine, len(up)), gates, up, *more))
        start += len(up)
    return outs


def own_groups(shards: Sequence[Any]) -> list[torch.Tensor]:
    """Each rank has all rows, and gives 0 for those of the groups of others."""
    outs, start = [], 0
    for (rows, weights, ends), _ in shards:
        bounds = [0, *ends.tolist()]
        first, stop = bounds[start], start + len(weights)
        own = ops.grouped_matmul(rows[first:], weights, ends[start:stop] - first)
        outs.append(torch.cat([torch.zeros(first, own.shape[1], dtype=own.dtype), own]))
        start = stop
    return outs


def expert_dispatch(shards: Sequence[Any]) -> list[torch.Tensor]:
    """Each rank's tokens meet the experts of all."""
    up, down, *bias = (
        torch.cat([args[place] for args, _ in shards]) for place in (3, 4, 6) if place < len(shards[0][0])
    )
    return [ops.experts(*args[:3], up, down, args[ops.INNER], *bias) for args, _ in shards]


def ring(shards: Sequence[Any]) -> list[torch.Tensor]:
    """Each rank has some query rows and, once they came round, the keys and values of all."""
    key, value = (torch.cat([args[i] for args, _ in shards], -2) for i in (1, 2))
    outs, start = [], 0
    for (query, _, _, *mask), kwargs in shards:
        named = {k: v for k, v in kwargs.items() if k != "is_causal"}
        if kwargs.get("is_causal"):
            mask = [torch.arange(start, start + query.shape[-2]).unsqueeze(1) >= torch.arange(key.shape[-2])]
        outs.append(aten.scaled_dot_product_attention.default(query, key, value, *mask, **named))
        start += query.shape[-2]
    return outs


def own_heads(shards: Sequence[Any]) -> list[torch.Tensor]:
    """Each rank has some query heads and all heads of keys and values, each of which serves `each` query heads in a
    row."""
    heads, outs, start = sum(args[0].shape[-3] for args, _ in shards), [], 0
    for (query, key, value, *mask), kwargs in shards:
        each, mine = heads // key.shape[-3], torch.arange(start, start + query.shape[-3])
        named = {k: v for k, v in kwargs.items() if k != "enable_gqa"}
        outs.append(
            aten.scaled_dot_product_attention.default(
                query, key[..., mine // each, :, :], value[..., mine // each, :, :], *mask, **named
            )
        )
        start += query.shape[-3]
    return outs


TOGETHER = {
    "bag": bag,
    "embedding": embedding,
    "cross_entropy": cross_entropy,
    "causal_rows": causal_rows,
    "own_experts": own_experts,
    "own_groups": own_groups,
    "expert_dispatch": expert_dispatch,
    "own_heads": own_heads,
    "ring": ring,
}


WINDOWS = [target for target, rule in RULES.items() if rule.together is borders]


def as_emitted(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[tuple[int, ...]]) -> Any:
    """Runs the source text that codegen writes for the call."""
    if not isinstance(target, torch._ops.OpOverload):
        return target(*args, **kwargs)
    args, kwargs = local_args(target, args, kwargs, outs)
    held: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "MESH": Mesh((1,), ("x",))}

    def text(item: Any) -> str:
        if isinstance(item, torch.Tensor):
            name = f"t{len(held)}"
            held[name] = item
            return name
        if isinstance(item, (list, tuple)):
            return f"[{', '.join(text(x) for x in item)}]"
        return repr(item)

    texts = tuple(text(a) for a in args)
    written = Written(
        texts, {k: text(v) for k, v in kwargs.items()}, tuple(args), tuple(tuple(map(str, o)) for o in outs)
    )
    return eval(write(target, written), held)


def wrong(target: Any, rule: Rule, one: Case, ways: int) -> list[str]:
    reseed()
    args, kwargs = fill((list(one.args), dict(one.kwargs)))
    here = {**TOGETHER, "halo": halo(target, args[0].shape)} if target in WINDOWS else TOGETHER
    random = target in views.STILL or target in pointwise.STILL
    return failures(rule, target, args, kwargs, ways, execute=as_emitted, together=here, mask=random)


def test_every_row_has_a_sample():
    assert [str(op) for op in RULES if not SAMPLES.get(op)] == []
    assert [str(op) for op in SAMPLES if op not in RULES] == []


@pytest.mark.parametrize("target", list(RULES), ids=lambda op: str(op).removeprefix("aten.").split(" at ")[0])
def test_row(target):
    found = [text for one in SAMPLES[target] for ways in (2, 3, 4) for text in wrong(target, RULES[target], one, ways)]
    assert not found, "\n".join(found)


def _flops(run: Callable[[], Any]) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def _computed(target: Any, one: Case, ways: int) -> Iterator[tuple[str, float, float]]:
    """Of each option on plain shards: its factor, what all ranks multiply over what one device does, and what is
    priced."""
    args, kwargs = fill((list(one.args), dict(one.kwargs)))
    call, whole = call_of(target, args, kwargs), _flops(lambda: target(*args, **kwargs))
    made = [t for t in pytree.tree_leaves(target(*args, **kwargs)) if isinstance(t, torch.Tensor)]
    for option in RULES[target].options(call, ways) if whole else ():
        if option.split and not option.run:
            ranks = zip(
                shards_of((tuple(args), dict(kwargs)), option, ways), shapes_of(made, option, ways), strict=True
            )
            flops = sum(_flops(partial(as_emitted, target, *shard, outs)) for shard, outs in ranks)
            yield option.factor, flops / whole, ways * (1 - option.cuts + option.cuts / ways)


@pytest.mark.parametrize("target", list(RULES), ids=lambda op: str(op).removeprefix("aten.").split(" at ")[0])
def test_ranks_multiply_what_is_priced(target):
    """But for torch.einsum, which sums what only one operand has before it multiplies, and does not multiply matrices
    that are one wide."""
    found = [(str(one), *each) for one in SAMPLES[target] for ways in (2, 3) for each in _computed(target, one, ways)]
    assert target is aten.einsum.default or [each for each in found if each[2] != pytest.approx(each[3])] == []


def test_ring_splits_rows_and_keys_of_every_kind_of_attention():
    target, found = aten.scaled_dot_product_attention.default, []
    for one in SAMPLES[target]:
        args, kwargs = fill((list(one.args), dict(one.kwargs)))
        rank = args[0].dim()
        here = [o for o in RULES[target].options(call_of(target, args, kwargs), 2) if o.run == "ring"]
        for option in here:
            assert (
                [use.value for use in option.ins[:3]] == [use.grad for use in option.outs] * 3 == [f"S{rank - 2}"] * 3
            )
        found.append(bool(here))
    assert found == [
        query.shape[:-3] == key.shape[:-3] and key.shape[:-2] == value.shape[:-2] and query.shape[-2] == key.shape[-2]
        for query, key, value in (one.args[:3] for one in SAMPLES[target])
    ]
    args, kwargs = fill(([f(4, 6, 5, 3)] * 3, {"dropout_p": 0.1}))
    assert not [o for o in RULES[target].options(call_of(target, args, kwargs), 2) if o.run]


@pytest.mark.parametrize(
    ("query", "key", "grouped"),
    [((1, 6, 5, 3), (4, 6, 5, 3), False), ((4, 1, 5, 3), (4, 6, 5, 3), False), ((1, 6, 5, 3), (4, 2, 5, 3), True)],
    ids=["samples", "heads", "samples of groups"],
)
def test_rings_are_not_for_queries_that_are_broadcast(query, key, grouped):
    target = aten.scaled_dot_product_attention.default
    args, kwargs = fill(([f(*query), f(*key), f(*key)], {"enable_gqa": grouped}))
    assert not [o for o in RULES[target].options(call_of(target, args, kwargs), 2) if o.run == "ring"]


CUT = {  # the spatial dims of each sample that 2 ranks may cut
    "conv1d.default": ["0", "0", "0", "0", "0", "0"],
    "conv1d.padding": ["0", ""],
    "conv2d.default": ["01", "01", "01", "01", "01"],
    "conv2d.padding": ["01", "01"],
    "conv3d.default": ["012"],
    "conv3d.padding": ["012"],
    "max_pool1d.default": ["0", "0", "0"],
    "max_pool2d.default": ["01", "01", "01"],
    "max_pool3d.default": ["012"],
    "avg_pool1d.default": ["0", "", ""],
    "avg_pool2d.default": ["01", "01", "", "1", ""],
    "avg_pool3d.default": ["012"],
}


@pytest.mark.parametrize("target", WINDOWS, ids=str)
def test_which_dims_windows_go_over_may_be_cut(target):
    found = []
    for one in SAMPLES[target]:
        args, kwargs = fill((list(one.args), dict(one.kwargs)))
        here = [o for o in RULES[target].options(call_of(target, args, kwargs), 2) if o.run == "halo"]
        first = args[0].dim() - int(str(target).split("d.")[0][-1])
        for option in here:
            assert (
                option.ins[0] == option.outs[0]
                and option.ins[0].value == option.ins[0].grad == f"S{first + int(option.factor[1])}"
            )
            assert all(str(use) == "R|P" for use in option.ins[1:])
        found.append("".join(option.factor[1] for option in here))
    assert found == CUT[str(target).removeprefix("aten.")]


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("named", ["same", "valid"])
def test_paddings_by_name_are_numbers(named, spatial, size):
    """Of kernels 3 and 2 with dilations 1 and 2, whose sums of padding are even."""
    reseed()
    kernel, dilation = [3, 2, 3][:spatial], [1, 2, 2][:spatial]
    image, weight = (torch.randn(*lead, dtype=torch.float64) for lead in ((2, 3, *[size] * spatial), (4, 3, *kernel)))
    by_name, by_numbers = (getattr(getattr(aten, f"conv{spatial}d"), overload) for overload in ("padding", "default"))
    call = call_of(by_name, (image, weight, None, [1] * spatial, named, dilation), {})
    got = by_numbers(image, weight, None, [1] * spatial, windows.paddings(call, ()), dilation)
    torch.testing.assert_close(got, by_name(image, weight, None, [1] * spatial, named, dilation))
    first, *others = windows.spatial(call)
    assert windows.paddings(call, (first,)) == [0, *(windows.padding(call, dim) for dim in others)]


def test_windows_that_reach_beyond_the_ranks_beside_are_refused():
    target, rule = aten.conv1d.default, RULES[aten.conv1d.default]

    def cut(size, ways, *args):
        filled, _ = fill(([f(2, 3, size), f(4, 3, args[0]), None, *args[1:]], {}))
        return any(o.run == "halo" for o in rule.options(call_of(target, filled, {}), ways))

    assert cut(16, 4, 7, [1], [3]) and not cut(8, 4, 7, [1], [3])  # 3 rows on either side of chunks of 2
    assert cut(16, 4, 3, [2], [1]) and not cut(9, 4, 3, [2], [1])  # outputs of the last rank: none
    # no padding: 4 outputs, chunk 3 reads from row 3 on
    assert cut(12, 2, 5, [1], [0], [2]) and not cut(12, 4, 5, [1], [0], [2])


def test_means_over_windows_are_cut_where_windows_end_with_the_image_whatever_its_size():
    """With ceil_mode the last window of an image of 13 rows reads fewer than that of 14: what is so at the planned size
    is not enough."""
    target, s = aten.avg_pool1d.default, sympy.Symbol("s", integer=True, positive=True)

    def cut(size, kernel, stride, padding, ceil, counted=True):
        outs = sympy.floor((size + 2 * padding - kernel + (stride - 1 if ceil else 0)) / stride) + 1
        image, out = (Tensor((2, 3, n), hint=(2, 3, int(n.subs(s, 8)))) for n in (size, outs))
        return any(
            o.run == "halo"
            for o in RULES[target].options(
                Call(target, (image, [kernel], [stride], [padding], ceil, counted), {}, (out,)), 2
            )
        )

    assert cut(s, 2, 2, 0, False) and not cut(s, 2, 2, 0, True)
    assert cut(2 * s, 2, 2, 0, True) and cut(s, 3, 1, 1, True)
    assert not cut(s, 3, 1, 1, False, counted=False)


PLANTED = {
    "softmax without !": (aten.softmax.int, Rule("... -> ..."), case(f(5, 4), -1)),
    "addmm that adds its bias on every rank": (
        aten.addmm.default,
        Rule("n, m k, k n -> m n"),
        case(f(6), f(5, 4), f(4, 6)),
    ),
    "linear that adds its bias on every rank": (
        aten.linear.default,
        Rule("... i, o i, o -> ... o"),
        case(f(5, 4), f(6, 4), f(6)),
    ),
    "bias that is part of a sum, of a product that is none": (
        aten.linear.default,
        Rule("... i, o i, o -> ... o", linear="2"),
        case(f(5, 4), f(6, 4), f(6)),
    ),
    "mean of means of uneven shards": (aten.mean.dim, Rule("a b -> b"), case(f(5, 4), [0])),
    "a number added to a partial sum": (aten.add.Scalar, Rule("... -> ...", linear="all"), case(f(5, 4), 1.0)),
    "layer_norm with its last dim cut": (
        aten.layer_norm.default,
        Rule("... n, n, n -> ... n"),
        case(f(5, 4), [4], f(4), f(4)),
    ),
    "product through which both partial sums go": (
        aten.mul.Tensor,
        Rule("..., ... -> ...", linear="all"),
        case(f(5, 4), f(5, 4)),
    ),
    "minor factor of a merged dim": (aten.reshape.default, Rule("a b -> (b a)"), case(f(4, 6), [24])),
    "batch norm of the rank's own samples": (
        aten.batch_norm.default,
        Rule("b c, c, c -> b c"),
        case(f(5, 4), f(4), f(4), None, None, True, 0.1, 1e-5, False),
    ),
    "positions counted from the shard": (aten.triu.default, Rule("r c -> r c"), case(f(5, 4))),
    "rows of a table without the algorithm": (
        aten.embedding.default,
        Rule("v d, ... -> ... d"),
        case(f(8, 4), i(8, 5)),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_row_is_rejected(name):
    target, rule, one = PLANTED[name]
    assert wrong(target, rule, one, 2) or wrong(target, rule, one, 3)
