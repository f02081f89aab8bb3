"""Samples of pointwise rows: from the schema, with a table of what some operators want."""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules import pointwise
from passes import ops
from tests.unit.rules.samples import Case, Samples, T, case, f

aten = torch.ops.aten

KINDS = {
    "p": "log log10 log1p log2 lgamma digamma rsqrt sqrt reciprocal pow float_power xlogy special_xlog1py "
    "special_entr polar logit_",
    "u": "acos asin atanh erfinv",
    "g": "acosh",
    "b": "logical_and logical_not logical_or logical_xor",
    "i9": "bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor gcd lcm",
    "c": "floor_divide heaviside ldexp nextafter polar",
}
KIND = {name: kind for kind, names in KINDS.items() for name in names.split()}
FILLED = (
    aten.cauchy.default,
    aten.exponential.default,
    aten.geometric.default,
    aten.log_normal.default,
    aten.normal_functional.default,
    aten.uniform.default,
)
NORMAL = (aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
STILL = (
    aten.empty_like.default,
    aten.rand_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.randn_like.default,
    aten.poisson.default,
    *FILLED,
    *NORMAL,
)

SPECIAL: Samples = {
    aten.add.Tensor: [case(f(5, 4), f(5, 4), alpha=2), case(f(5, 4), 3.0), case(f(4), f(5, 1))],
    aten.bernoulli.default: [case(T((5, 4), "t"))],
    aten.bernoulli.p: [case(T((5, 4), "c"), 1.0)],
    **{op: [case(T((5, 4), "c"), *([0.5] if op is aten.geometric.default else []))] for op in FILLED},
    aten.normal.Tensor_Tensor: [case(T((5, 4), "c"), T((4,), "t"))],
    aten.normal.Tensor_float: [case(T((5, 4), "c"), 2.0)],
    aten.normal.float_Tensor: [case(1.0, T((5, 4), "t"))],
    aten.poisson.default: [case(T((5, 4), "t"))],
    aten.clamp.Tensor: [case(f(5, 4), f(4)), case(f(5, 4), None, f(5, 1))],
    aten.clamp.default: [case(f(5, 4), -0.5, 0.5), case(f(5, 4), min=0.0)],
    aten.div.Scalar_mode: [case(f(5, 4), 0.3, rounding_mode="floor")],
    aten.div.Tensor: [case(f(5, 4), T((4,), "p")), case(f(5, 4), 2.0), case(2.0, T((5, 4), "p"))],
    aten.div.Tensor_mode: [case(f(5, 4), T((4,), "p"), rounding_mode="trunc")],
    aten.alpha_dropout.default: [case(f(5, 4), 0.5, False)],
    aten.dropout.default: [case(f(5, 4), 0.5, False)],
    aten.feature_alpha_dropout.default: [case(f(5, 4, 3), 0.5, False), case(f(5), 0.5, False)],
    aten.feature_dropout.default: [case(f(5, 4, 3, 3), 0.5, False), case(f(5, 4), 0.5, False)],
    ops.noised: [case(f(6, 5, 4), f(6, 1, 1), 0.5), case(f(6, 4), f(6, 4), 1.0)],
    aten.rrelu.default: [case(f(5, 4), 0.25, 0.5, False)],
    aten.full_like.default: [case(f(5, 4), 2.5), case(f(5, 4), 1, dtype=torch.int64)],
    aten.logit.default: [case(T((5, 4), "c"), 0.1)],
    aten.masked_fill.Scalar: [
        case(f(5, 4), T((5, 4), "b"), 0),
        case(f(5, 4), T((4,), "b"), -1e4),
        case(f(4), T((5, 1), "b"), 0),
    ],
    aten.masked_fill.Tensor: [case(f(5, 4), T((4,), "b"), f())],
    aten.mul.Tensor: [
        case(f(5, 4), f(5, 1)),
        case(f(5, 4), 2.0),
        case(f(5, 4), T((4,), "b")),
        case(T((5, 4), "i9"), T((5, 4), "i9")),
    ],
    aten.native_dropout.default: [case(f(5, 4), 0.0, True)],
    aten.pow.Tensor_Scalar: [case(f(5, 4), 2), case(T((5, 4), "p"), 0.5)],
    aten.randint_like.default: [case(T((5, 4), "c"), 7)],
    aten.randint_like.low_dtype: [case(T((5, 4), "c"), 1, 7)],
    aten.remainder.Scalar_Tensor: [case(3.0, T((5, 4), "c"))],
    aten.round.decimals: [case(f(5, 4), decimals=1)],
    aten.sub.Tensor: [case(f(5, 4), f(4), alpha=3), case(f(5, 4), 1.0)],
    aten.threshold.default: [case(f(5, 4), 0.1, 2.0)],
    aten.to.dtype: [
        case(f(5, 4), torch.float32),
        case(f(5, 4), torch.int64),
        case(T((5, 4), "i9"), torch.float64),
        case(T((5, 4), "b"), torch.float64),
    ],
    aten.where.self: [case(T((5, 4), "b"), f(5, 4), f(4)), case(T((4,), "b"), f(5, 1), f())],
    aten.where.ScalarOther: [case(T((5, 4), "b"), f(5, 4), 0), case(T((5, 4), "b"), f(4), -1e4)],
    aten.where.ScalarSelf: [case(T((5, 4), "b"), 0.0, f(5, 4)), case(T((5, 4), "b"), 3.0, f(5, 4))],
    aten.where.Scalar: [case(T((5, 4), "b"), 1.0, 0.0)],
}


def samples() -> dict[Any, list[Case]]:
    """Cases for every pointwise row: the special ones, else by schema, with and without broadcasting."""
    return {op: list(SPECIAL[op]) if op in SPECIAL else _generic(op) for op in pointwise.RULES}


def _generic(op: Any) -> list[Case]:
    name = op._schema.name.removeprefix("aten::")
    kinds = [KIND.get(name, "f")] * 3
    if name == "ldexp":
        kinds = ["f", "i3", "f"]
    if name == "masked_fill":
        kinds[1] = "b"
    shapes: list[list[tuple[int, ...]]] = [[(5, 4)] * 3]
    if sum(_is_tensor(a) for a in op._schema.arguments) > 1:
        shapes += [[(5, 4), (4,), (5, 1)], [(5, 1), (5, 4), ()]]
    return [_by_schema(op, one, kinds) for one in shapes]


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) == "Tensor"


def _by_schema(op: Any, shapes: list[tuple[int, ...]], kinds: list[str]) -> Case:
    args: list[Any] = []
    number = 0
    for argument in op._schema.arguments:
        if argument.kwarg_only:
            break
        if _is_tensor(argument):
            args.append(T(shapes[number], kinds[number]))
            number += 1
        elif argument.has_default_value():
            break
        else:
            args.append(3 if str(argument.type) == "int" or kinds[0] == "i9" else 0.7)
    return Case(tuple(args), {})
