"""Recurrent layers of torch.nn, each one operator: samples split, positions and features do not."""

from __future__ import annotations

from typing import Any

from autopar.rules.arguments import given, named, rule
from autopar.rules.language import Call
from autopar.rules.rule import Rule
from passes.recurrent import CELLS

RECURRENT = "gru.input lstm.input rnn_relu.input rnn_tanh.input"


def layers(call: Call) -> str:
    """`input [b s i]` or `[s b i]`, one or two states `[l b h]`, and weights; the outputs are as the input and the
    states."""
    first, states = bool(given(call)["batch_first"]), len(call.outs) - 1
    return rule(
        [_line("i", first), *[f"l{n}! b h{n}!" for n in range(states)], *_weights(call, states)],
        [_line("o", first), *[f"m{n}! b g{n}!" for n in range(states)]],
    )


def _line(kind: str, batch_first: bool) -> str:
    """The words of the input ("i") or the output ("o"): samples, positions (`is`, `os`) and features."""
    return f"b {kind}s! {kind}!" if batch_first else f"{kind}s! b {kind}!"


def _weights(call: Call, states: int) -> list[str]:
    """Every dim of every weight, which come behind the input and the states: none splits."""
    return [" ".join(f"w{i}n{d}!" for d in range(len(t.shape))) for i, t in enumerate(call.ins[1 + states :])]


def cell(call: Call) -> str:
    """One position: `input [b i]`, one or two states `[b h]`, and weights; the outputs are the new states."""
    states = len(call.outs)
    return rule(
        ["b i!", *[f"b h{n}!" for n in range(states)], *_weights(call, states)], [f"b g{n}!" for n in range(states)]
    )


RULES: dict[Any, Rule] = {**{op: Rule(layers) for op in named(RECURRENT)}, **{op: Rule(cell) for op in CELLS}}
