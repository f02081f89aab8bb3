"""Operators that torch has under a second name, and the first name by which this project's tables have them (exported
graphs keep both). Used by spellings."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

NAMES = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "arctanh": "atanh", "clip": "clamp",
    "divide": "div", "fix": "trunc", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "moveaxis": "movedim", "multiply": "mul", "negative": "neg",
    "not_equal": "ne", "special_digamma": "digamma", "special_erf": "erf", "special_erfc": "erfc",
    "special_erfinv": "erfinv", "special_exp2": "exp2", "special_expm1": "expm1",
    "special_gammainc": "igamma", "special_gammaincc": "igammac", "special_gammaln": "lgamma", "special_logit": "logit",
    "special_multigammaln": "mvlgamma",
    "special_polygamma": "polygamma", "special_psi": "digamma", "special_sinc": "sinc", "subtract": "sub",
    "trapz": "trapezoid",
}  # fmt: skip
"""Second name of an operator -> the first, which the tables of this project use; overloads have equal names and
arguments."""

ALIASES: dict[Any, Any] = {
    getattr(getattr(aten, second), overload): getattr(getattr(aten, first), overload)
    for second, first in NAMES.items()
    for overload in getattr(aten, second).overloads()
    if overload in getattr(aten, first).overloads() and not getattr(getattr(aten, second), overload)._schema.is_mutable
} | {
    aten.__lshift__.Scalar: aten.bitwise_left_shift.Tensor_Scalar,
    aten.__lshift__.Tensor: aten.bitwise_left_shift.Tensor,
    aten.__rshift__.Scalar: aten.bitwise_right_shift.Tensor_Scalar,
    aten.__rshift__.Tensor: aten.bitwise_right_shift.Tensor,
    aten.special_log_softmax.default: aten.log_softmax.int,
    aten.special_softmax.default: aten.softmax.int,
}
"""Overload of a second name -> the overload of the first name."""
