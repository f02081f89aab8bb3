"""Pointwise operators with broadcasting: every dim can be cut.

Partial sums pass through operators that are linear in all operands together (add, sub, neg, casts), in each operand
alone (mul), or in the first operand (div). An operator that adds a Python number is not linear: each rank would add
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.rules.arguments import named, overloads, rule
from autopar.rules.language import Call, Tensor
from autopar.rules.rule import Rule
from passes import ops

aten = torch.ops.aten


def broadcast(call: Call) -> str:
    """All operands broadcast against each other."""
    return rule(["..." for _ in call.ins], ["..." for _ in call.outs])


UNARY = """abs acos acosh angle asin asinh atan atanh bitwise_not ceil celu clamp clamp_max clamp_min cos cosh deg2rad
    digamma elu
    erf erfc erfinv exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan
    isneginf isposinf
    leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num reciprocal relu relu6 round
    rsqrt
    rad2deg selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_entr sqrt square
    tan tanh tanhshrink threshold trunc"""

BINARY = """add addcdiv addcmul atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor
    copysign div eq
    floor_divide fmax fmin fmod ge gt heaviside hypot le lerp logaddexp logaddexp2 logical_and logical_or logical_xor lt
    float_power gcd isclose lcm ldexp masked_fill maximum minimum mul ne nextafter polar pow remainder
    rsub special_xlog1py sub where xlogy"""

LIKE = "empty_like full_like ones_like zeros_like"
"""Operators that read only the sizes of their operand."""


RANDOM = named("""alpha_dropout.default bernoulli.default bernoulli.p cauchy.default exponential.default
    geometric.default log_normal.default native_dropout.default
    normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor normal_functional.default poisson.default
    rand_like.default randint_like.default randint_like.low_dtype randn_like.default rrelu.default uniform.default""")
"""Operators that draw a random number per element."""


def features(call: Call) -> str:
    """One random number for each sample and channel: the other dims are whole."""
    rank = len(call.ins[0].shape)
    line = " ".join([*["n", "c"][:rank], *(f"d{i}!" for i in range(2, rank))])
    return rule([line], [line])


def _casts(call: Call) -> str:
    """Casts between floating-point dtypes are linear, apart from rounding; those from and to integers are not."""
    return "all" if all(t.floating for t in (*call.ins, *call.outs)) else ""


def _sums(call: Call) -> str:
    """A sum of tensors is linear in them together; a tensor plus a number is not linear."""
    return "all" if len(call.ins) > 1 and all(t.floating for t in call.ins) else ""


def _products(call: Call) -> str:
    """Linear in each operand alone; a product with a number is linear in the tensor."""
    if not call.outs[0].floating:
        return ""
    return "each" if len(call.ins) > 1 else "all"


def _quotients(call: Call) -> str:
    """Linear in the numerator."""
    return "first" if call.ins and isinstance(call.args[0], Tensor) else ""


def _keeps_zero(position: int, operand: str) -> Callable[[Call], str]:
    """masked_fill and where with a number: linear in `operand` where the number is 0."""
    return lambda call: operand if call.args[position] == 0 else ""


RULES: dict[Any, Rule] = {
    **{op: Rule(broadcast) for op in overloads(f"{UNARY} {BINARY} {LIKE}")},
    aten.add.Tensor: Rule(broadcast, linear=_sums),
    aten.deg2rad.default: Rule(broadcast, linear="all"),
    aten.detach.default: Rule(broadcast, linear="all"),
    aten.div.Scalar: Rule(broadcast, linear="all"),
    aten.div.Tensor: Rule(broadcast, linear=_quotients),
    aten.dropout.default: Rule(broadcast, random=True),
    aten.frexp.Tensor: Rule(broadcast),
    aten.feature_alpha_dropout.default: Rule(features, random=True),
    aten.feature_dropout.default: Rule(features, random=True),
    aten.lerp.Scalar: Rule(broadcast, linear="all"),
    aten.lerp.Tensor: Rule(broadcast, linear="0+1"),
    aten.masked_fill.Scalar: Rule(broadcast, linear=_keeps_zero(2, "0")),
    aten.masked_fill.Tensor: Rule(broadcast, linear="0+2"),
    aten.mul.Scalar: Rule(broadcast, linear=_products),
    aten.mul.Tensor: Rule(broadcast, linear=_products),
    aten.neg.default: Rule(broadcast, linear="all"),
    aten.rad2deg.default: Rule(broadcast, linear="all"),
    aten.rsub.Tensor: Rule(broadcast, linear=_sums),
    aten.sub.Tensor: Rule(broadcast, linear=_sums),
    aten.to.dtype: Rule(broadcast, linear=_casts),
    aten.where.ScalarOther: Rule(broadcast, linear=_keeps_zero(2, "1")),
    aten.where.ScalarSelf: Rule(broadcast, linear=_keeps_zero(1, "1")),
    aten.where.self: Rule(broadcast, linear="1+2"),
    ops.noised: Rule(broadcast, linear="first"),
    **{op: Rule(broadcast, random=True) for op in RANDOM},
}
