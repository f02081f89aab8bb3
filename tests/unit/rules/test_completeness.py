"""Rules leave nothing out: each mark `!` is needed, every cut that comes out right is an option, and every operand that
an operator is linear in may be a part of a sum. `test_oracle.py` proves that they allow nothing wrong."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autopar.errors import RuleError
from autopar.rules import RULES, recurrent
from autopar.rules.arguments import replicated
from autopar.rules.language import Call, Use
from autopar.rules.oracle import call_of
from autopar.rules.rule import Rule
from passes import ops
from tests.unit.rules import samples_pointwise as pointwise
from tests.unit.rules import samples_views as views
from tests.unit.rules.samples import Case, fill, reseed
from tests.unit.rules.table import SAMPLES
from tests.unit.rules.test_oracle import wrong

aten = torch.ops.aten

COMPARED = [
    target
    for target, rule in RULES.items()
    if not rule.random and target not in (*views.STILL, *pointwise.STILL, aten.zeros_like.default)
]
"""Those whose values say something; the last one reads sizes alone."""

UNCHECKED = (aten.gru.input, aten.lstm.input, aten.rnn_relu.input, aten.rnn_tanh.input)
"""Kernels that do not check sizes: what does not go together would end the process."""

UNEQUAL = (aten._weight_norm.default, aten.lu_unpack.default, aten.segment_reduce.default)
"""The same of operands that are cut each by itself."""

QUICK = (
    aten.linear.default,
    aten.matmul.default,
    aten.embedding.default,
    aten.gather.default,
    aten.index_put.default,
    aten.layer_norm.default,
    aten.reshape.default,
    aten.softmax.int,
    aten.sum.dim_IntList,
    aten.where.self,
    aten.mul.Tensor,
    aten.cat.default,
)

OR = "whether any is true of the parts is no sum that a rank adds up"
ORDER = "norms of order 1 are sums, but not those of other orders"

GROUPS = "channels of each group, where whole groups are cut"

WHOLE: dict[Any, tuple[str, str]] = {
    aten.any.default: ("d0 d1", OR),
    aten.any.dim: ("d1 d2", OR),
    aten.any.dims: ("d0 d1 d2", OR),
    aten.bucketize.Tensor: (
        "n",
        "the places are numbers of boundaries, so that those of parts add up: boundaries are few",
    ),
    aten.conv1d.default: ("i o", GROUPS),
    aten.conv_transpose2d.input: ("o", GROUPS),
    aten.histc.default: ("x0n0", "counts of parts add up, where the bounds are given"),
    aten.instance_norm.default: ("a", "running statistics, which the kernel changes, are of all samples"),
    aten.isin.Tensor_Tensor: ("n0 n1", "in any part is in the whole: what is looked up in is small"),
    aten.linalg_norm.default: ("d2", ORDER),
    aten.linalg_vector_norm.default: ("d1", ORDER),
    aten.pairwise_distance.default: ("y", ORDER),
    aten.scaled_dot_product_attention.default: (
        "r x0n0 x0n2 x2n0 x2n3",
        "query heads of all groups, beside whole keys: `own_heads` cuts them; and what torch broadcasts",
    ),
    aten.searchsorted.Tensor: ("n", "as bucketize"),
    aten.slice.Tensor: ("y0", "of a slice that is all of a dim, which passes leave out"),
    ops.bag: ("n", "bags are short, and their rows are cut instead"),
    ops.experts: ("k", "a token has few experts"),
}
"""Factors that stay whole although they might be cut, and why."""

RANKS = "ranks of parts add up where no rows depend on each other"

UNCUT: dict[Any, tuple[str, ...]] = {
    aten.any.default: (OR, "0 -", "1 -"),
    aten.any.dim: (OR, "1 -", "2 -"),
    aten.any.dims: (OR, "0 -", "1 -", "2 -"),
    aten.bucketize.Tensor: (WHOLE[aten.bucketize.Tensor][1], "- 0 -"),
    aten.cross_entropy_loss.default: ("against probabilities, which passes write as plain operators", "0 0 -"),
    aten.histc.default: (WHOLE[aten.histc.default][1], "0 -"),
    aten.index_put.default: ("by a mask of all dims, which passes write as masked_fill", "0 0 - 0", "1 1 - 1"),
    aten.instance_norm.default: (WHOLE[aten.instance_norm.default][1], "0 - - - - 0"),
    aten.isin.Tensor_Tensor: (WHOLE[aten.isin.Tensor_Tensor][1], "- 0 -", "- 1 -"),
    **dict.fromkeys((aten.linalg_matrix_rank.atol_rtol_float, aten.linalg_matrix_rank.default), (RANKS, "0 -", "2 -")),
    aten.linalg_matrix_rank.atol_rtol_tensor: (RANKS, "0 -", "2 -", "1 - -", "2 - -"),
    aten.linalg_matrix_rank.tol_tensor: (RANKS, "1 - -", "2 - -"),
    aten.linalg_norm.default: (ORDER, "2 -"),
    aten.linalg_vector_norm.default: (ORDER, "1 -"),
    aten.pairwise_distance.default: (ORDER, "1 1 -"),
    aten.scaled_dot_product_attention.default: (
        "of operands with different numbers of dims, or values alone with samples: what torch broadcasts",
        *("- - 0 0", "- - 2 3", "- - 3 3", "- 0 0 0", "0 - - 0", "0 1 1 1"),
        *("1 - - 2", "1 0 0 1", "1 1 1 1", "2 - - 2"),
    ),
    aten.searchsorted.Tensor: ("as bucketize", "0 - -", "1 - -"),
    aten.slice.Tensor: (WHOLE[aten.slice.Tensor][1], "0 0"),
    aten.triplet_margin_loss.default: ("of rows of unequal lengths", "0 - 0 0"),
    ops.bag: (WHOLE[ops.bag][1], "- 1 -", "- 1 1 -", "- 2 2 -"),
    ops.experts: (WHOLE[ops.experts][1], "- 1 1 - - -", "- 1 1 - - - -", "- 2 2 - - -", "- 2 2 - - - -"),
    ops.statistic: ("the running ones lie as the sums do", "1 - 1"),
}
"""Cuts that come out right and are no options all the same, and why: the dim of each operand and result, - for none."""

MOST_CUTS = 64
"""Of one size, of a call; a call with more is not tried with that size."""

NANS = "only of finite numbers"
LOGARITHMS = "what is multiplied with logarithms, of which 0 counts whatever these are"

LINEAR: dict[Any, tuple[str, str]] = {
    aten._weight_norm.default: ("1", "lengths, which are parameters"),
    aten.embedding.default: ("0", "tables are parameters"),
    aten.nan_to_num.default: ("all", NANS),
    aten.nanmean.default: ("all", NANS),
    aten.nansum.default: ("all", NANS),
    aten.ldexp.Tensor: ("0", "numbers without a gradient"),
    aten.nextafter.default: ("0 all", "the numbers themselves, as far as trials tell"),
    aten.nll_loss.default: ("0", "logarithms of probabilities, which are no sums"),
    aten.nll_loss_nd.default: ("0", "as nll_loss"),
    aten.polar.default: ("0", "lengths"),
    aten.rms_norm.default: ("1", "weights"),
    aten.scaled_dot_product_attention.default: ("2", "values, beside queries and keys that are whole on each rank"),
    aten.special_xlog1py.default: ("0", LOGARITHMS),
    aten.special_xlog1py.other_scalar: ("all", LOGARITHMS),
    aten.where.Scalar: ("all", "conditions"),
    aten.xlogy.Scalar_Other: ("all", LOGARITHMS),
    aten.xlogy.Tensor: ("0", LOGARITHMS),
    ops.experts: ("2 4", "gates, and the second layer of all experts"),
    ops.noised: ("1", "noise"),
    ops.ragged_bags: ("3", "weights of the rows"),
    ops.statistic: ("all", "sums and running ones, which are no sums of parts"),
    ops.weigh_valid: ("1", "weights"),
}
"""Operands in which an operator is linear that are no parts of sums all the same, and what they are."""


def _calls(target: Any) -> Iterator[tuple[Case, Call]]:
    for one in SAMPLES[target]:
        reseed()
        args, kwargs = fill((list(one.args), dict(one.kwargs)))
        yield one, call_of(target, args, kwargs)


def _alone(text: str, factor: str) -> str:
    """A rule in which all named factors are whole but one."""
    return re.sub(rf"\b{factor}!", factor, re.sub(r"([A-Za-z]\w*)(!|@\w+)?", r"\1!", text))


def _named_alike(text: str, call: Call, factor: str) -> str:
    """The rule with the name of a factor also for the dims of results that are at the same place and of the same size,
    where these have a name of their own."""
    left, right = ([part.split() for part in side.split(",")] for side in text.split("->"))
    place = next(
        (
            names.index(f"{factor}!")
            for names, tensor in zip(left, call.ins, strict=True)
            if f"{factor}!" in names and len(names) == len(tensor.shape)
        ),
        None,
    )
    size = next(
        (
            tensor.shape[place]
            for names, tensor in zip(left, call.ins, strict=True)
            if place is not None and names[place : place + 1] == [f"{factor}!"]
        ),
        None,
    )
    for names, out in zip(right, call.outs, strict=True):
        if (
            place is not None
            and place < len(names) == len(out.shape)
            and out.shape[place] == size
            and names[place].endswith("!")
        ):
            names[place] = f"{factor}!"
    return " -> ".join(", ".join(" ".join(names) for names in side) for side in (left, right))


def _needed(target: Any, one: Case, call: Call, text: str, factor: str) -> bool:
    """Whether the sample shows that a factor cannot be cut, or has no size that would be."""
    rule = Rule(_alone(text, factor), reduce=RULES[target].reduce)
    try:
        cut = [
            ways for ways in (2, 3) if any(option.factor.split("/")[0] == factor for option in rule.options(call, ways))
        ]
        return not cut or any(wrong(target, rule, one, ways) for ways in cut)
    except (RuleError, RuntimeError):  # the factor is made by the operator, or the backward refuses what it is given
        return True


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(op, id=str(op).split(" at ")[0], marks=() if op in QUICK else pytest.mark.slow)
        for op in COMPARED
        if op not in UNCHECKED
    ],
)
def test_every_mark_is_needed(target):
    shown: dict[tuple[str, str], bool] = {}
    for one, call in _calls(target):
        if not call.ins:
            continue  # made of numbers: whole, on every rank
        text = RULES[target].text(call)
        for factor in dict.fromkeys(re.findall(r"(\w+)!", text)):
            for spelled in dict.fromkeys((text, _named_alike(text, call, factor))):
                shown[spelled, factor] = shown.get((spelled, factor)) or _needed(target, one, call, spelled, factor)
    idle = {factor for (_, factor), needed in shown.items() if not needed}
    assert idle == set(WHOLE.get(target, ("", ""))[0].split())


def _cuts(call: Call) -> Iterator[tuple[int | None, ...]]:
    """Every way to choose at most one dim of each tensor of a call, of one size and at least one of an operand."""
    shapes, ins = [t.shape for t in (*call.ins, *call.outs)], len(call.ins)
    for size in dict.fromkeys(n for shape in shapes[:ins] for n in shape if n != 1):
        places = [[None, *(dim for dim, n in enumerate(shape) if n == size)] for shape in shapes]
        found = itertools.product(*places) if math.prod(map(len, places)) <= MOST_CUTS else ()
        yield from (cut for cut in found if any(dim is not None for dim in cut[:ins]))


def _cut(call: Call, dims: tuple[int | None, ...], reduce: str) -> Rule:
    """A rule with one factor, at `dims` of operands and results; all else is whole."""
    sides = [
        " ".join("f" if dim == cut else f"x{i}n{dim}!" for dim in range(len(tensor.shape)))
        for i, (tensor, cut) in enumerate(zip((*call.ins, *call.outs), dims, strict=True))
    ]
    return Rule(f"{', '.join(sides[: len(call.ins)])} -> {', '.join(sides[len(call.ins) :])}", reduce=reduce)


def _layouts(rule: Rule, call: Call, ways: int) -> set[tuple[tuple[Use, ...], tuple[Use, ...]]]:
    """How operands and results lie under each option that divides the work."""
    return {(option.ins, option.outs) for option in rule.options(call, ways) if option.split}


def _left_out(target: Any, one: Case, call: Call, dims: tuple[int | None, ...]) -> bool:
    """Whether a cut comes out right, on 2 ranks and on 3 where it can be, and is no option of the table's rule."""
    rule = _cut(call, dims, RULES[target].reduce)
    try:
        new = {ways: _layouts(rule, call, ways) - _layouts(RULES[target], call, ways) for ways in (2, 3)}
        return any(new.values()) and not any(
            wrong(target, rule, one, ways) for ways in new if _layouts(rule, call, ways)
        )
    except (RuleError, RuntimeError):  # the cut is of what the operator makes, or the backward refuses what it is given
        return False


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(op, id=str(op).split(" at ")[0], marks=() if op in QUICK else pytest.mark.slow)
        for op in COMPARED
        if op not in (*UNCHECKED, *UNEQUAL)
    ],
)
def test_every_cut_that_comes_out_right_is_an_option(target):
    """Of one dim of each tensor. A row that replicates what might be cut has no mark that `every_mark_is_needed` could
    take off of several operands at once."""
    found = {
        " ".join("-" if dim is None else str(dim) for dim in dims)
        for one, call in _calls(target)
        for dims in (_cuts(call) if call.ins else ())
        if _left_out(target, one, call, dims)
    }
    assert found == set(UNCUT.get(target, ("",))[1:])


def _has(call: Call, target: Any, claim: str) -> bool:
    """Whether the rule lets a part of a sum through in operand `claim`, or in all of them together."""
    named = [
        option.factor[1:] for option in RULES[target].options(call, 2) if not option.split and option.factor[:1] == "P"
    ]
    together = "+".join(map(str, range(len(call.ins))))
    return "" in named or (together in named if claim == "all" else any(claim in name.split("+") for name in named))


@pytest.mark.parametrize(
    "target",
    [pytest.param(op, id=str(op).split(" at ")[0], marks=() if op in QUICK else pytest.mark.slow) for op in COMPARED],
)
def test_parts_of_sums_go_through_what_is_linear(target):
    missed: dict[str, bool] = {}
    for one, call in _calls(target):
        if call.ins and all(t.floating for t in call.outs):
            for claim in ("all", *(str(i) for i, t in enumerate(call.ins) if t.floating and len(call.ins) > 1)):
                rule = Rule(replicated, linear=claim)
                linear = any(option.factor[:1] == "P" for option in rule.options(call, 2)) and not any(
                    wrong(target, rule, one, ways) for ways in (2, 3)
                )
                missed[claim] = missed.get(claim, True) and linear and not _has(call, target, claim)
    assert {claim for claim, missing in missed.items() if missing} == set(LINEAR.get(target, ("", ""))[0].split())


def test_what_is_left_out_is_of_rows_that_are_compared():
    assert (
        not {*WHOLE, *LINEAR, *UNCUT, *UNEQUAL} - set(COMPARED)
        and set(UNCHECKED) < set(recurrent.RULES)
        and set(QUICK) < set(COMPARED)
    )
