"""Pointwise operators, with broadcasting: every dim can be cut.

Which of them let a partial sum through: those that are linear in all operands together (add, sub, neg, casts), in each
alone (mul), or in the first only (div). An operator that adds a Python number is not linear: each rank would add it.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.language import Call, Tensor
from autopar.rules.rule import Rule

aten = torch.ops.aten


def broadcast(call: Call) -> str:
    """All operands broadcast against each other."""
    return f"{', '.join('...' for _ in call.ins)} -> {', '.join('...' for _ in call.outs)}"


PLAIN = ["abs", "acos", "asin", "atan", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "cos", "cosh", "elu", "erf", "erfc", "exp", "exp2", "expm1", "floor", "frac", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "lgamma", "log", "log10", "log1p", "log2", "log_sigmoid", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "mish", "nan_to_num", "pow", "reciprocal", "relu", "relu6", "round", "rsqrt", "selu", "sgn", "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "sqrt", "square", "tan", "tanh", "trunc", "atan2", "maximum", "minimum", "fmod", "remainder", "floor_divide", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "where", "xlogy", "square", "threshold", "lerp", "addcmul", "addcdiv", "rsub", "masked_fill", "logaddexp", "full_like", "zeros_like", "ones_like", "empty_like", "fill", "special_expit", "special_entr", "copysign", "hypot"]

RANDOM = ["dropout", "bernoulli", "rand_like", "randn_like", "native_dropout"]


def _overloads(names: list[str]) -> list[Any]:
    found = []
    for name in names:
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            if not overload.endswith("out"):
                found.append(getattr(packet, overload))
    return found


def _adds(call: Call) -> str:
    """A sum of tensors lets partial sums through, a tensor plus a number does not."""
    return "all" if len(call.ins) > 1 else ""


def _casts(call: Call) -> str:
    """Casts between floats let partial sums through (rounding aside), casts to and from integers do not."""
    return "all" if all(t.floating for t in (*call.ins, *call.outs)) else ""


def _scales(call: Call) -> str:
    """Linear in each operand alone; times a number, linear in the one there is."""
    return "each" if len(call.ins) > 1 else "all"


def _divides(call: Call) -> str:
    """Linear in the numerator."""
    return "first" if len(call.args) < 3 and not call.kwargs and isinstance(call.args[0], Tensor) else ""


RULES: dict[Any, Rule] = {
    **{op: Rule(broadcast) for op in _overloads(PLAIN)},
    **{op: Rule(broadcast, random=True) for op in _overloads(RANDOM)},
    aten.add.Tensor: Rule(broadcast, linear=_adds),
    aten.alias.default: Rule(broadcast, linear="all"),
    aten.clone.default: Rule(broadcast, linear="all"),
    aten.contiguous.default: Rule(broadcast, linear="all"),
    aten.detach.default: Rule(broadcast, linear="all"),
    aten.div.Tensor: Rule(broadcast, linear=_divides),
    aten.mul.Tensor: Rule(broadcast, linear=_scales),
    aten.neg.default: Rule(broadcast, linear="all"),
    aten.sub.Tensor: Rule(broadcast, linear=_adds),
    aten.to.dtype: Rule(broadcast, linear=_casts),
}
