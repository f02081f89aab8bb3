"""Rules that are derived for operators without a row."""

from __future__ import annotations

import pytest
import torch

from autopar.rules import as_rules, derived, options_for, rule_for
from autopar.rules.derive import derive
from autopar.rules.language import Call, Tensor
from autopar.rules.oracle import call_of, failures
from autopar.rules.rule import Rule

aten = torch.ops.aten


@torch.library.custom_op("autopar_tests::gate", mutates_args=())
def gate(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A pointwise product with a row of scales."""
    return x * scale


gate.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[1], (g * ctx.saved_tensors[0]).flatten(0, -2).sum(0)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
gate.register_fake(lambda x, scale: torch.empty_like(x))
GATE = torch.ops.autopar_tests.gate.default


def call(target, *shapes, out, extra=(), **kwargs):
    return Call(target, (*(Tensor(s) for s in shapes), *extra), kwargs, (Tensor(out),))


CASES = {
    "custom op": (call(GATE, (8, 128, 512), (512,), out=(8, 128, 512)), "f0 f1 f2, f2 -> f0 f1 f2"),
    "softsign-like": (call(aten.tanh.default, (64, 32), out=(64, 32)), "f0 f1 -> f0 f1"),
    "matmul": (call(aten.matmul.default, (64, 32), (32, 16), out=(64, 16)), "f0 f1, f1 f2 -> f0 f2"),
    "softmax": (call(aten.softmax.int, (64, 32), out=(64, 32), extra=(-1,)), "f0 x0n1! -> f0 x1n1!"),
    "sum": (call(aten.sum.default, (64, 32), out=()), "f0 f1 -> "),
    "square matmul": (call(aten.matmul.default, (32, 32), (32, 32), out=(32, 32)), "f0 f1, f1 f2 -> f0 f2"),
    "dims of size 1": (call(aten.squeeze_copy.default, (64, 1, 32), out=(64, 32)), None),
    "sizes as arguments": (call(aten.layer_norm.default, (8, 16), out=(8, 16), extra=([16],)), "f0 x0n1! -> f0 x1n1!"),
}


@pytest.mark.parametrize("name", CASES)
def test_factors_found(name):
    one, wanted = CASES[name]
    rule = derive(one)
    assert (None if rule is None else _renamed(rule.text(one))) == (wanted and _renamed(wanted))


def _renamed(text):
    """Factors by order of first occurrence, so that names do not matter."""
    names: dict[str, str] = {}
    words = text.replace(",", " ,").split()
    return " ".join(
        w if w in ("->", ",") else names.setdefault(w.rstrip("!"), f"n{len(names)}") + w[len(w.rstrip("!")) :]
        for w in words
    )


def test_derived_rule_is_proven_at_other_sizes():
    one = CASES["custom op"][0]
    rule = derive(one)
    x, scale = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((5, 4, 9), (9,)))
    assert rule is not None and failures(rule, GATE, (x, scale), {}, 4) == []


@pytest.mark.parametrize(
    "one",
    [
        call(aten.linalg_inv.default, (8, 8), out=(8, 8)),  # nothing to split
        call(aten.bernoulli.default, (8, 8), out=(8, 8)),  # random
        call(aten.relu_.default, (8, 8), out=(8, 8)),  # in place
        Call(aten.take.default, (Tensor((8, 8)), Tensor((3,), False, (), False)), {}, (Tensor((3,)),)),  # integers
        # does not check its arguments: shards that do not go together break the heap
        call(aten._weight_norm.default, (8, 4, 4), (1, 1, 4), out=(8, 4, 4), extra=(2,)),
        Call(max, (Tensor((8,)),), {}, (Tensor((8,)),)),  # no operator of torch
    ],
    ids=["inverse", "random", "in place", "integers", "internal", "function"],
)
def test_nothing_is_derived(one):
    assert derive(one) is None
    if rule_for(one.target) is None:
        assert [o.factor for o in options_for(one, 2) if o.split] == []


def opaque(name, forward, backward):
    """An operator that nothing is known of."""
    made = torch.library.custom_op(f"autopar_tests::{name}", forward, mutates_args=())
    made.register_fake(lambda x: torch.empty_like(x))
    made.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return getattr(torch.ops.autopar_tests, name).default


def lag(x: torch.Tensor) -> torch.Tensor:
    """Adds the row 16 rows before."""
    return torch.cat([x[:16], x[16:] + x[:-16]])


def back(ctx, g):
    return torch.cat([g[:-16] + g[16:], g[-16:]]) if len(g) > 16 else g


def cap(x: torch.Tensor) -> torch.Tensor:
    """Scales all down to a norm of at most 20."""
    return x * (20 / x.norm()).clamp(max=1)


def uncap(ctx, g):
    (x,), norm = ctx.saved_tensors, ctx.saved_tensors[0].norm()
    return g if norm <= 20 else 20 / norm * (g - x * (g * x).sum() / norm**2)


def above(x: torch.Tensor) -> torch.Tensor:
    """The mean of rows is taken off where some number is negative."""
    return x - x.mean(0) if (x < 0).any() else x.clone()


LAG, CAP, ABOVE = (
    opaque("lag", lag, back),
    opaque("cap", cap, uncap),
    opaque("above", above, lambda ctx, g: g - g.mean(0) if (ctx.saved_tensors[0] < 0).any() else g),
)


@pytest.mark.parametrize(
    ("target", "wanted"),
    [(LAG, "x0n0! f0 -> x1n0! f0"), (CAP, None), (ABOVE, "x0n0! f0 -> x1n0! f0")],
    ids=["lag", "cap", "signs"],
)
def test_trials_are_of_the_sizes_of_the_call_and_of_all_kinds_of_values(target, wanted):
    one = call(target, (64, 256), out=(64, 256))
    rule = derive(one)
    assert (None if rule is None else rule.text(one)) == wanted


def test_large_calls_are_tried_at_sizes_near_their_own():
    one = call(LAG, (4096, 4096), out=(4096, 4096))
    rule = derive(one)
    assert rule is not None and rule.text(one) == "x0n0! f0 -> x1n0! f0"


def test_nothing_is_derived_for_operators_of_others_unless_that_is_asked_for():
    one = CASES["custom op"][0]
    assert [o.factor for o in options_for(one, 2) if o.split] == [] and derived([one]) == {}
    assert len([o for o in options_for(one, 2, rules=as_rules({GATE: "derive"})) if o.split]) == 3


def test_rules_of_operators_of_torch_without_a_row_are_derived():
    one = call(aten.i0.default, (64, 32), out=(64, 32))
    assert (
        rule_for(one.target) is None
        and [o.factor for o in options_for(one, 2) if o.split] == ["f0", "f1"]
        and list(derived([one])) == [one.target]
    )


def test_options_come_from_user_then_table_then_derivation():
    one, asked = CASES["custom op"][0], as_rules({GATE: "derive"})
    assert len([o for o in options_for(one, 2, rules=asked) if o.split]) == 3
    assert [o.factor for o in options_for(one, 2, rules={GATE: Rule("b s! d!, d! -> b s! d!")}) if o.split] == ["b"]
    assert list(derived([one, CASES["matmul"][0]], asked)) == [GATE]
    assert derived([one], {GATE: Rule("b s! d!, d! -> b s! d!")}) == {}


def test_call_of_sees_what_the_graph_sees():
    x = torch.randn(5, 4, requires_grad=True)
    seen = call_of(aten.topk.default, (x, 2), {})
    assert seen.ins == (Tensor((5, 4)),) and seen.outs == (Tensor((5, 2)), Tensor((5, 2), False, (), False, 8))
