"""Every row of the rule table is proven: the operator on shards, as emitted, gives what it gives whole, gradients included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from autopar.codegen.expressions import Written, write
from autopar.rules import RULES
from autopar.rules.oracle import call_of, failures
from autopar.rules.rule import Rule
from passes import ops
from tests.unit.rules import samples_maths as maths
from tests.unit.rules import samples_pointwise as pointwise
from tests.unit.rules import samples_views as views
from tests.unit.rules.samples import Case, case, f, fill, i

aten = torch.ops.aten

SAMPLES: dict[Any, Sequence[Case]] = {
    **pointwise.samples(), **views.VIEWS, **views.FACTORIES, **views.INDEXING, **maths.CONTRACTIONS, **maths.LOSSES, **maths.REDUCTIONS,
    **maths.VISION,
}


def embedding(shards: Sequence[Any]) -> list[torch.Tensor]:
    """Each rank looks up the ids of its own rows, and gives zeros for others."""
    outs, start = [], 0
    for (weight, ids), _ in shards:
        mine = (ids >= start) & (ids < start + len(weight))
        rows = torch.zeros(*ids.shape, weight.shape[1], dtype=weight.dtype)
        outs.append(rows.index_put((mine,), weight[ids[mine] - start]))
        start += len(weight)
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
    for (hidden, chosen, gates, up, down, activation), _ in shards:
        mine = (chosen >= start) & (chosen < start + len(up))
        outs.append(ops.experts(hidden, (chosen - start).where(mine, len(up)), gates, up, down, activation))
        start += len(up)
    return outs


def expert_dispatch(shards: Sequence[Any]) -> list[torch.Tensor]:
    """Each rank's tokens meet the experts of all."""
    up, down = (torch.cat([args[place] for args, _ in shards]) for place in (3, 4))
    return [ops.experts(*args[:3], up, down, args[5]) for args, _ in shards]


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


TOGETHER = {"embedding": embedding, "cross_entropy": cross_entropy, "causal_rows": causal_rows, "own_experts": own_experts,
            "expert_dispatch": expert_dispatch, "ring": ring}


def as_emitted(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[tuple[int, ...]]) -> Any:
    """Runs the source text that codegen writes for the call."""
    if not isinstance(target, torch._ops.OpOverload):
        return target(*args, **kwargs)
    held: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}

    def text(item: Any) -> str:
        if isinstance(item, torch.Tensor):
            name = f"t{len(held)}"
            held[name] = item
            return name
        if isinstance(item, (list, tuple)):
            return f"[{', '.join(text(x) for x in item)}]"
        return repr(item)

    texts = tuple(text(a) for a in args)
    written = Written(texts, {k: text(v) for k, v in kwargs.items()}, tuple(args), tuple(tuple(map(str, o)) for o in outs))
    return eval(write(target, written), held)


def wrong(target: Any, rule: Rule, one: Case, ways: int) -> list[str]:
    torch.manual_seed(0)
    args, kwargs = fill((list(one.args), dict(one.kwargs)))
    random = target in views.STILL or target in pointwise.STILL
    return failures(rule, target, args, kwargs, ways, execute=as_emitted, together=TOGETHER, mask=random)


def test_every_row_has_a_sample():
    assert [str(op) for op in RULES if not SAMPLES.get(op)] == []
    assert [str(op) for op in SAMPLES if op not in RULES] == []


@pytest.mark.parametrize("target", list(RULES), ids=lambda op: str(op).removeprefix("aten.").split(" at ")[0])
def test_row(target):
    found = [text for one in SAMPLES[target] for ways in (2, 3, 4) for text in wrong(target, RULES[target], one, ways)]
    assert not found, "\n".join(found)


def test_ring_splits_rows_and_keys_of_every_kind_of_attention():
    target, found = aten.scaled_dot_product_attention.default, []
    for one in SAMPLES[target]:
        args, kwargs = fill((list(one.args), dict(one.kwargs)))
        rank = args[0].dim()
        here = [o for o in RULES[target].options(call_of(target, args, kwargs), 2) if o.run == "ring"]
        for option in here:
            assert [use.value for use in option.ins[:3]] == [use.grad for use in option.outs] * 3 == [f"S{rank - 2}"] * 3
        found.append(bool(here))
    assert found == [args[0].shape[-2] == args[1].shape[-2] for args in (one.args for one in SAMPLES[target])]
    args, kwargs = fill(([f(4, 6, 5, 3)] * 3, {"dropout_p": 0.1}))
    assert not [o for o in RULES[target].options(call_of(target, args, kwargs), 2) if o.run]


PLANTED = {
    "softmax without !": (aten.softmax.int, Rule("... -> ..."), case(f(5, 4), -1)),
    "addmm that adds its bias on every rank": (aten.addmm.default, Rule("n, m k, k n -> m n"), case(f(6), f(5, 4), f(4, 6))),
    "mean of means of uneven shards": (aten.mean.dim, Rule("a b -> b"), case(f(5, 4), [0])),
    "a number added to a partial sum": (aten.add.Scalar, Rule("... -> ...", linear="all"), case(f(5, 4), 1.0)),
    "layer_norm with its last dim cut": (aten.layer_norm.default, Rule("... n, n, n -> ... n"), case(f(5, 4), [4], f(4), f(4))),
    "product through which both partial sums go": (aten.mul.Tensor, Rule("..., ... -> ...", linear="all"), case(f(5, 4), f(5, 4))),
    "minor factor of a merged dim": (aten.reshape.default, Rule("a b -> (b a)"), case(f(4, 6), [24])),
    "batch norm of the rank's own samples": (aten.batch_norm.default, Rule("b c, c, c -> b c"),
                                             case(f(5, 4), f(4), f(4), None, None, True, 0.1, 1e-5, False)),
    "positions counted from the shard": (aten.triu.default, Rule("r c -> r c"), case(f(5, 4))),
    "rows of a table without the algorithm": (aten.embedding.default, Rule("v d, ... -> ... d"), case(f(8, 4), i(8, 5))),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_row_is_rejected(name):
    target, rule, one = PLANTED[name]
    assert wrong(target, rule, one, 2) or wrong(target, rule, one, 3)
