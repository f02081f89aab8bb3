"""Operators that differ between training and evaluation: those with a training argument (dropout, randomised leaky
ReLU), and those that have their value in evaluation as an operand (`ops.statistic` of batch norms, `ops.noised`). Used
by noises, codegen and verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes import edit, ops

aten = torch.ops.aten


@dataclass(frozen=True)
class Switch:
    """The argument `name` that makes an operator compute as in training. `of`: an argument that makes both modes equal
    where it is 0 (the share of a dropout)."""

    name: str
    of: str = ""

    def is_on(self, arguments: dict[str, Any]) -> bool:
        """Whether a call with these arguments, by name, computes something that evaluation does not."""
        return bool(arguments[self.name] and arguments[self.of or self.name])


SWITCHES: dict[Any, Switch] = {
    **dict.fromkeys(
        (
            aten.alpha_dropout.default,
            aten.dropout.default,
            aten.feature_alpha_dropout.default,
            aten.feature_dropout.default,
        ),
        Switch("train", "p"),
    ),
    **dict.fromkeys(
        (
            aten.gru.data,
            aten.gru.input,
            aten.lstm.data,
            aten.lstm.input,
            aten.rnn_relu.data,
            aten.rnn_relu.input,
            aten.rnn_tanh.data,
            aten.rnn_tanh.input,
        ),
        Switch("train", "dropout"),
    ),
    aten.rrelu.default: Switch("training"),
    aten.scaled_dot_product_attention.default: Switch("dropout_p"),
}
"""Operators with a training argument -> that argument."""


EVALUATED: dict[Any, Any] = {
    ops.noised: lambda x, noise, keep: x,
    ops.statistic: lambda total, count, running: running.reshape(total.shape).to(total.dtype),
}
"""Operators that compute otherwise in training -> a function that gives their value in evaluation."""


def evaluate(gm: fx.GraphModule) -> fx.GraphModule:
    """Change a captured training step, in place, to what evaluation computes. The result is for an interpreter only:
    its targets may be plain functions, which no pass knows."""
    for node in edit.nodes(gm):
        if node.target in SWITCHES:
            turn_off(node)
        node.target = EVALUATED.get(node.target, node.target)
    return gm


def place_of(target: Any, name: str) -> int:
    """The position of argument `name` of an operator."""
    return next(place for place, argument in enumerate(target._schema.arguments) if argument.name == name)


def turn_off(node: fx.Node) -> bool:
    """Make a call of an operator with a switch compute as in evaluation. Returns whether it computed anything else
    before."""
    switch, given = SWITCHES[node.target], edit.args_of(node)
    if not switch.is_on(given):
        return False
    name = switch.of or switch.name
    if name in node.kwargs:
        node.update_kwarg(name, type(given[name])())
    else:
        node.update_arg(place_of(node.target, name), type(given[name])())
    return True
