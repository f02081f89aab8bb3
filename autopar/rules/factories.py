"""Operators that make tensors from sizes: every rank makes the whole tensor, and its readers cut it. Of tensor operands
they read only the dtype."""

from __future__ import annotations

from typing import Any

from autopar.rules.arguments import named, replicated
from autopar.rules.rule import Rule

MADE = """arange.default arange.start arange.start_step eye.default eye.m full.default
    linspace.default
    logspace.default ones.default scalar_tensor.default
    tril_indices.default triu_indices.default zeros.default hann_window.default hamming_window.default"""
"""Operators that make a tensor of fixed values from sizes."""

DRAWN = "rand.default randint.default randint.low randn.default randperm.default"
"""Operators that make a tensor of random numbers from sizes."""

RULES: dict[Any, Rule] = {
    **{op: Rule(replicated) for op in named(MADE)},
    **{op: Rule(replicated, random=True) for op in named(DRAWN)},
}
