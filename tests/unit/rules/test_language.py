"""The rule language: what parses, what is refused, and which options follow."""

from __future__ import annotations

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import RuleError
from autopar.layout import dim_of, is_shard
from autopar.rules import RULES, as_rules, options_for
from autopar.rules.language import Call, Tensor, Use, parse
from autopar.rules.matches import options
from autopar.rules.oracle import call_of, failures
from autopar.rules.reshapes import reshape
from autopar.rules.rule import Rule

aten = torch.ops.aten


def call(*shapes, outs=((),), grad=True):
    return Call("op", tuple(Tensor(s, grad) for s in shapes), {}, tuple(Tensor(s, grad) for s in outs))


def by_factor(text, one, ways=2, **kwargs):
    return {o.factor: ([str(u) for u in o.ins], [str(u) for u in o.outs]) for o in options(text, one, ways, **kwargs)}


MALFORMED = {
    "a b": "exactly one '->'",
    "a -> b -> c": "exactly one '->'",
    "a$ -> a": "is not a factor",
    "a!! -> a": "is not a factor",
    "2 -> a": "is not a factor",
    "(a b -> a": "is not closed",
    "... a ... -> a": "more than one '...'",
    "a a -> a": "factor a is twice in one tensor",
    "a -> a a": "factor a is twice in one tensor",
    "a! b, a@ring -> b": "factor a is marked '!' and '@ring'",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_rules_are_refused(text):
    with pytest.raises(RuleError, match=r".*".join(MALFORMED[text].split("..."))) as error:
        parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("text", "shapes", "said"),
    [
        ("a -> a", [(4,), (4,)], "1 operands and 1 outputs"),
        ("a b -> a", [(4,)], "written with 2 dims"),
        ("a -> a", [(4, 4)], "written with 1 dims has shape .4, 4."),
        ("... a b -> a", [(4,)], "written with 3 dims has shape .4,."),
        ("a, a -> a", [(4,), (5,)], "factor a is 4 in one tensor and 5 in another"),
        ("a -> b", [(6,)], "factor b is in outputs and in no operand"),
        (" -> a", [], "factor a is in outputs and in no operand"),
        ("(a b), b -> a", [(10,), (2,)], "factor a is 5 in one tensor and 4 in another|do not make a dim"),
        ("a b, (a b) -> a", [(4, 2), (9,)], "factors a, b of sizes .4, 2. do not make a dim of 9"),
    ],
)
def test_rules_that_do_not_fit_are_refused(text, shapes, said):
    with pytest.raises(RuleError, match=said):
        options(text, call(*shapes, outs=((4,),)), 2)


def test_user_rules():
    tanh, add = torch.ops.aten.tanh, torch.ops.aten.add
    assert as_rules({tanh.default: "b d -> b d"}) == {tanh.default: Rule("b d -> b d")}
    with pytest.raises(RuleError, match="is int, wanted a rule string"):
        as_rules({tanh.default: 3})
    with pytest.raises(RuleError, match="exactly one"):
        as_rules({tanh.default: "b d"})
    for pair in ({add: "b, b -> b", add.Tensor: "derive"}, {add.Tensor: "derive", add: "b, b -> b"}):
        found = as_rules(pair)
        assert (
            set(found) == {getattr(add, name) for name in add.overloads()}
            and found[add.Tensor] == Rule("derive")
            and found[add.Scalar] == Rule("b, b -> b")
        )


def test_outputs_may_have_whole_factors_of_their_own():
    assert {o.factor for o in options("a -> a b!", call((4,), outs=((4, 3),)), 2)} == {"", "grad", "a"}


WRONG = {  # fields of a Rule that say what no operator has -> what the error says
    "no text": ({"spec": 3}, "the spec of a Rule is 3, wanted a rule string"),
    "text of no call": ({"spec": lambda call: None}, "wrote None for a call, wanted a rule string"),
    "linear": ({"linear": "al"}, "linear is 'al', wanted all, each, first, or numbers"),
    "linear of a call": ({"linear": lambda call: None}, "linear is None, wanted"),
    "operands": ({"linear": "0|7"}, "which has 1 operands: linear is '0.7'"),
    "reduce": ({"reduce": "sum"}, "reduce is 'sum', wanted one of P, "),
    "no share": ({"partly": {"a": 0.5}}, r"partly\['a'\] is 0.5, wanted a function"),
    "no factor": ({"partly": {"b": lambda call: 0.5}}, "partly has the share of 'b', which is no factor"),
    "too much": ({"partly": {"a": lambda call: 2.0}}, r"partly\['a'\] gave 2.0, wanted the share"),
    "together": ({"together": lambda call, ways: ((("a", "z"), "ring"),)}, "the call has no factor z"),
}


@pytest.mark.parametrize("name", WRONG)
def test_rules_that_say_what_no_operator_has_are_refused(name):
    fields, said = WRONG[name]
    with pytest.raises(RuleError, match=said):
        Rule(**{"spec": "a -> a", **fields}).options(call((4,), outs=((4,),)), 2)


def test_a_users_rule_has_the_runtime_algorithms_of_its_operator_alone():
    tanh, add = torch.ops.aten.tanh.default, torch.ops.aten.add.Tensor
    for target, text, operands in ((tanh, "a@ring -> a", [(4,)]), (add, "a@nothing, a -> a", [(4,), (4,)])):
        one = Call(target, tuple(Tensor(shape) for shape in operands), {}, (Tensor((4,)),))
        with pytest.raises(
            RuleError, match=r"runtime algorithm '(ring|nothing)' does not split this operator; none does"
        ):
            options_for(one, 2, rules=as_rules({target: text}))
    table = Call(torch.ops.aten.embedding.default, (Tensor((8, 3)), Tensor((4,), False)), {}, (Tensor((4, 3)),))
    assert "embedding" in {
        o.run for o in options_for(table, 2, rules=as_rules({table.target: "v@embedding d, n -> n d"}))
    }
    with pytest.raises(RuleError, match="those that do are embedding"):
        options_for(table, 2, rules=as_rules({table.target: "v@ring d, n -> n d"}))


@pytest.mark.parametrize("key", ["mylib.scale.default", torch.tanh, torch.ops.aten, 3])
def test_rules_for_what_is_no_operator_are_refused(key):
    with pytest.raises(
        RuleError, match=r"rules= has the key .*, wanted an operator: torch\.ops\.mylib\.scale\.default"
    ):
        as_rules({key: "b d -> b d"})


def test_matmul_is_the_table_of_the_design():
    assert by_factor("m k, k n -> m n", call((4, 6), (6, 8), outs=((4, 8),)), linear="each") == {
        "": (["R|R", "R|R"], ["R|R"]),
        "grad": (["R|P", "R|P"], ["R|P"]),
        "m": (["S0|S0", "R|P"], ["S0|S0"]),
        "k": (["S1|S1", "S0|S0"], ["P|R"]),
        "n": (["R|P", "S1|S1"], ["S1|S1"]),
        "P0": (["P|R", "R|P"], ["P|R"]),
        "P1": (["R|P", "P|R"], ["P|R"]),
    }


def test_what_is_added_to_parts_of_a_sum_is_a_part_too():
    found = by_factor("m k, n k, +n -> m n", call((4, 6), (8, 6), (8,), outs=((4, 8),)), linear="0+2|1+2")
    assert found == {
        "": (["R|R"] * 3, ["R|R"]),
        "grad": (["R|P"] * 3, ["R|P"]),
        "m": (["S0|S0", "R|P", "R|P"], ["S0|S0"]),
        "k": (["S1|S1", "S1|S1", "P|R"], ["P|R"]),
        "n": (["R|P", "S0|S0", "S0|S0"], ["S1|S1"]),
        "P0+2": (["P|R", "R|P", "P|R"], ["P|R"]),
        "P1+2": (["R|P", "P|R", "P|R"], ["P|R"]),
    }


def test_whole_factors_and_algorithms():
    assert list(by_factor("a! b -> a b", call((4, 4), outs=((4, 4),)))) == ["", "grad", "b"]
    found = {o.factor: o.run for o in options("v@embedding d, a -> a d", call((8, 4), (6,), outs=((6, 4),)), 2)}
    assert found == {"": "", "grad": "", "v": "embedding", "d": "", "a": ""}


def test_values_without_gradient():
    found = by_factor("a, a -> a", Call("op", (Tensor((4,)), Tensor((4,), False)), {}, (Tensor((4,)),)))
    assert found["a"] == (["S0|S0", "S0|-"], ["S0|S0"])
    assert "grad" not in by_factor("a -> a", call((4,), outs=((4,),), grad=False))


def test_operator_without_gradient_sends_none_back():
    """An operand that carries a gradient gets none from an operator whose outputs have none."""
    found = by_factor("a -> a", Call("op", (Tensor((4,)),), {}, (Tensor((4,), False),)))
    assert found == {"": (["R|-"], ["R|-"]), "a": (["S0|-"], ["S0|-"])}


def test_compound_dims_split_by_section():
    found = by_factor("(a b) -> a b", call((12,), outs=((2, 6),)))
    assert found["a"] == (["S0|S0"], ["S0|S0"]) and found["b"] == (["S0/2|S0/2"], ["S1|S1"])
    assert "b" not in by_factor("(a b) -> a b", call((10,), outs=((2, 5),)))  # uneven sections


def test_sizes_of_factors_follow_from_those_of_other_compound_dims():
    found = by_factor("(c b), (b a), a -> c! b!, a", call((20,), (10,), (2,), outs=((4, 5), (2,))))
    assert {"a", "b"} & set(found) == {"a"}
    found = by_factor("(c b), (b a), a -> a", call((20,), (10,), (2,), outs=((2,),)))
    assert found["c"] == (["S0|S0", "R|P", "R|P"], ["P|R"]) and "b" not in found


def test_pieces_side_by_side_split_together():
    found = by_factor("{q|k|v} -> q, k, v", call((12,), outs=((8,), (2,), (2,))))
    assert found["q|k|v"] == (["S0/4:1:1|S0/4:1:1"], ["S0|S0"] * 3)
    assert list(by_factor("{q|k} -> q, k", call((5,), outs=((4,), (1,))))) == ["", "grad"]


def test_sections_of_other_operators():
    found = by_factor("a o -> a o", call((4, 12), outs=((4, 12),)), sections=[(8, 2, 2), (6, 3, 3), (5, 5)])
    assert list(found) == ["", "grad", "a", "o", "o/8:2:2"]
    assert found["o/8:2:2"][0] == ["S1/4:1:1|S1/4:1:1"]


def test_broadcast_dims_are_lacked():
    found = by_factor("..., ... -> ...", call((3, 4, 1), (4, 6), outs=((3, 4, 6),)))
    assert found["_0"] == (["S0|S0", "R|P"], ["S0|S0"])
    assert found["_1"] == (["S1|S1", "S0|S0"], ["S1|S1"])
    assert found["_2"] == (["R|P", "S1|S1"], ["S2|S2"])


def test_partial_sums_through_groups_of_operands():
    one = call((4,), (4,), (4,), outs=((4,),))
    assert by_factor("a, a, a -> a", one, linear="1+2")["P1+2"] == (["R|P", "P|R", "P|R"], ["P|R"])
    assert [f for f in by_factor("a, a, a -> a", one, linear="0|2") if f[:1] == "P"] == ["P0", "P2"]
    assert by_factor("a, a, a -> a", one, linear="all")["P"] == (["P|R"] * 3, ["P|R"])


def test_maxima_split_without_gradient_only():
    assert by_factor("a -> ", call((4,), grad=False), reduce="Pmax")["a"] == (["S0|-"], ["Pmax|-"])
    assert "a" not in by_factor("a -> ", call((4,)), reduce="Pmax")


@pytest.mark.parametrize(
    ("size", "ways", "split"), [(257, 4, True), (5, 4, False), (3, 4, False), (5, 2, True), (9, 4, False), (4, 4, True)]
)
def test_no_rank_is_left_empty(size, ways, split):
    assert ("a" in by_factor("a -> a", call((size,), outs=((size,),)), ways)) == split


@pytest.mark.parametrize("symbolic", range(3))
def test_factors_of_symbolic_size_are_cut_evenly(symbolic):
    """Wherever the symbol stands: at other sizes, cuts of which some ranks have more are other cuts."""
    size = sympy.Symbol("s", positive=True, integer=True)
    for number, split in ((6, True), (7, False)):
        one, other, out = (Tensor((size if i == symbolic else number,), hint=(number,)) for i in range(3))
        found = options("a, a -> a", Call("op", (one, other), {}, (out,)), 2)
        assert any(o.split for o in found) == split


def test_no_operands():
    assert by_factor(" -> n!", Call("op", (4,), {}, (Tensor((4,), False),))) == {"": ([], ["R|-"])}


EMPTY = {
    "a factor of the side that is empty": (aten.pixel_shuffle.default, [(6, 8, 0, 6)], (2,), {"_0", "c", "w"}),
    "a factor of two empty sides": (aten.pixel_shuffle.default, [(6, 8, 0, 0)], (2,), {"_0", "c"}),
    "no channels": (aten.pixel_shuffle.default, [(6, 0, 4, 6)], (2,), {"_0", "h", "w"}),
    "no input channels, of which torch makes no output channels": (
        aten.conv2d.default,
        [(2, 0, 5, 5), (4, 0, 2, 2)],
        (),
        set(),
    ),
    "no samples": (aten.conv2d.default, [(0, 4, 5, 5), (6, 4, 2, 2)], (), {"i", "o"}),
}
"""Calls with a dim of size 0: operands, other arguments, and the factors that can be cut all the same."""


@pytest.mark.parametrize("name", EMPTY)
def test_empty_dims_say_nothing_of_their_factors(name):
    target, shapes, others, wanted = EMPTY[name]
    args = (*(torch.ones(shape, dtype=torch.float64) for shape in shapes), *others)
    call = call_of(target, args, {})
    cut = {f for o in options_for(call, 2) if o.split for f in [o.factor] if 0 not in _cut_sizes(call, o)}
    assert cut == wanted
    assert failures(RULES[target], target, args, {}, 2) == []


def _cut_sizes(call, option):
    """The sizes of the dims that an option cuts in operands."""
    return [t.shape[dim_of(use.value)] for t, use in zip(call.ins, option.ins, strict=True) if is_shard(use.value)]


@given(st.integers(2, 300), st.integers(2, 8))
def test_uneven_cuts_hold_something_everywhere(size, ways):
    found = [o for o in options("a -> a", call((size,), outs=((size,),)), ways) if o.split]
    starts = [rank * -(-size // ways) for rank in range(ways)]
    assert bool(found) == all(start < size for start in starts)


B, S = sympy.symbols("b s", positive=True, integer=True)
SIZES = {B: 8, S: 16}
RESHAPES = [
    ((B, S, 64), (B, S, 4, 16)),
    ((B, S, 4, 16), (B, S, 64)),
    ((B, S, 64), (B * S, 64)),
    ((B * S, 64), (B, S, 64)),
    ((B, S, 3, 4, 16), (B, S, 192)),
    ((B, 1, S), (B, S)),
    ((B * S, 8), (B, 8 * S)),
    ((B, 6, 4), (B, 4, 6)),
    ((B, S), (S, B)),
    ((B, 4, S, 16), (4 * B, S, 16)),
    ((4 * B, S), (B, 4, S)),
    ((B, S + 1), (B * S + B,)),
    ((B, S, 3), (B // 4, 4, S, 3)),
    ((B // 4, 4, S), (4 * (B // 4), S)),
    ((B // 4, 4, S), (B, S)),
]


@pytest.mark.parametrize(("before", "after"), RESHAPES)
def test_symbolic_sizes_give_the_options_of_numbers(before, after):
    """Symbolic dims must be cut evenly, so the numbers here are even: then both agree."""

    def number(shape):
        return tuple(int(sympy.sympify(n).subs(SIZES)) for n in shape)

    symbols = Call("op", (Tensor(before, True, number(before)),), {}, (Tensor(after, True, number(after)),))
    numbers = call(number(before), outs=(number(after),))
    for ways in (2, 4):
        # numbers may have common factors that hold for them alone, so theirs may be more
        mine, theirs = (
            [(o.ins, o.outs) for o in options(reshape(c), c, ways, linear="all")] for c in (symbols, numbers)
        )
        assert [o for o in mine if o not in theirs] == []
        if (before, after) not in (((B, 6, 4), (B, 4, 6)), ((B, S), (S, B))):
            assert [o for o in theirs if o not in mine] == [] or (before, after) in CHANCE


CHANCE = [((B * S, 8), (B, 8 * S)), ((B, S + 1), (B * S + B,))]


@given(st.permutations([2, 3, 4]), st.integers(0, 2), st.integers(0, 2))
def test_reshapes_by_merging_keep_every_even_cut(sizes, start, length):
    """Merging neighbouring dims: each even dim can be cut on both sides."""
    stop = min(start + length + 1, 3)
    merged = (*sizes[:start], sympy.prod(sizes[start:stop]), *sizes[stop:])
    one = call(tuple(sizes), outs=(tuple(int(n) for n in merged),))
    cut = {o.ins[0].value for o in options(reshape(one), one, 2) if o.split}
    assert cut == {f"S{d}" for d, n in enumerate(sizes) if n % 2 == 0 or not start <= d < stop or stop - start == 1}


def test_uses_print():
    assert str(Use("S0", "P")) == "S0|P" and is_shard(Use("S0", "P").value)
