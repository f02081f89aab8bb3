"""Random operators, made deterministic for verification: dropout drops nothing, other draws give a constant, and the
report's notes say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.rules import rule_for
from passes import edit, facts
from passes.switches import SWITCHES, turn_off

aten = torch.ops.aten
STILL: dict[Any, tuple[Any, Callable[..., tuple[Any, ...]]]] = {
    aten.rand.default: (aten.full.default, lambda size: (size, 0.5)),
    aten.randn.default: (aten.full.default, lambda size: (size, 0.5)),
    aten.randint.default: (aten.full.default, lambda high, size: (size, 0)),
    aten.randint.low: (aten.full.default, lambda low, high, size: (size, low)),
    aten.randperm.default: (aten.arange.default, lambda n: (n,)),
    aten.rand_like.default: (aten.full_like.default, lambda x: (x, 0.5)),
    aten.randn_like.default: (aten.full_like.default, lambda x: (x, 0.5)),
    aten.randint_like.default: (aten.full_like.default, lambda x, high: (x, 0)),
    aten.randint_like.low_dtype: (aten.full_like.default, lambda x, low, high: (x, low)),
    aten.bernoulli.default: (aten.full_like.default, lambda x: (x, 1.0)),
    aten.bernoulli.p: (aten.full_like.default, lambda x, p: (x, 1.0)),
    **{
        op: (aten.full_like.default, lambda x, *_: (x, 0.5))
        for op in (
            aten.cauchy.default,
            aten.exponential.default,
            aten.log_normal.default,
            aten.normal_functional.default,
        )
    },
    aten.normal.Tensor_Tensor: (aten.full_like.default, lambda mean, std: (mean, 0.5)),
    aten.normal.Tensor_float: (aten.full_like.default, lambda mean, std=1.0: (mean, 0.5)),
    aten.normal.float_Tensor: (aten.full_like.default, lambda mean, std: (std, 0.5)),
    aten.poisson.default: (aten.full_like.default, lambda x: (x, 1.0)),
    aten.geometric.default: (aten.full_like.default, lambda x, p: (x, 1.0)),
    aten.uniform.default: (aten.full_like.default, lambda x, low=0.0, high=1.0: (x, (low + high) / 2)),
}
"""Random operator -> an operator that gives a constant that could be drawn, and a function from the arguments of the
first to those of the second."""
INTEGERS = (aten.randint.default, aten.randint.low)  # their constant must be int64
# keyword arguments of random operators that the constant has no use for
ASIDE = ("generator", "from", "lambd", "mean", "median", "p", "sigma", "std", "to")


def keep_all(gm: fx.GraphModule) -> tuple[str, ...]:
    """Make a captured graph deterministic, in place: dropout drops nothing, and random operators give a constant.
    Returns notes for the report: what was changed, and which random operators could not be, whose values will
    differ."""
    silenced: list[str] = []
    stilled: list[str] = []
    others: list[str] = []
    for node in list(edit.nodes(gm)):
        if node.target in SWITCHES:
            silenced += [node.name] if turn_off(node) else []
        elif node.target in STILL:
            stilled.append(node.name)
            _still(node)
        elif node.op == "call_function" and _draws(node.target):
            others.append(f"{node.name} ({facts.where(node)})")
    for part in edit.graphs(gm):
        part.recompile()
    notes = (
        [
            f"dropout is off in this comparison: {len(silenced)} operators ({', '.join(silenced[:3])}"
            f"{', ...' if len(silenced) > 3 else ''}) drop nothing on either side"
        ]
        if silenced
        else []
    )
    notes += [f"{name} draws the same number always in this comparison, on both sides" for name in stilled]
    return (*notes, *(f"{name} draws random numbers: its values cannot agree" for name in others))


def drawn(gm: fx.GraphModule) -> list[str]:
    """The operators of a captured graph that draw random numbers, dropout aside, by name."""
    return [
        node.name
        for graph in edit.graphs(gm)
        for node in edit.calls(graph)
        if node.target not in SWITCHES and (node.target in STILL or _draws(node.target))
    ]


def _draws(target: Any) -> bool:
    """Whether an operator draws random numbers: by its rule, or where it has none by what torch says of it."""
    rule = rule_for(target)
    return rule.random if rule is not None else torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _still(node: fx.Node) -> None:
    """Replace a random node by its constant."""
    whole = node.target in INTEGERS
    node.target, arguments = STILL[node.target]
    node.args = arguments(*node.args)
    node.kwargs = {name: value for name, value in node.kwargs.items() if name not in ASIDE and value is not None}
    if whole:
        node.kwargs = {"dtype": torch.int64, **node.kwargs}
