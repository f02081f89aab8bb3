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
    """The argument `name`, and the one without which the operator does in training what it does in evaluation."""

    name: str
    of: str = ""

    def is_on(self, arguments: dict[str, Any]) -> bool:
        """Whether a call with these arguments, by name, does what only training does."""
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


EVALUATED: dict[Any, Any] = {
    ops.noised: lambda x, noise, keep: x,
    ops.statistic: lambda total, count, running: running.reshape(total.shape).to(total.dtype),
}
"""Operators that training computes otherwise -> what they are in evaluation."""


def evaluate(gm: fx.GraphModule) -> fx.GraphModule:
    """Make of a captured training step, in place, what it is in evaluation. It is for an interpreter: no other pass
    knows what it is made of."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.target in SWITCHES:
                turn_off(node)
            node.target = EVALUATED.get(node.target, node.target)
    return gm


def place_of(target: Any, name: str) -> int:
    """The place of argument `name` of an operator."""
    return next(place for place, argument in enumerate(target._schema.arguments) if argument.name == name)


def turn_off(node: fx.Node) -> bool:
    """Let a call of an operator with a switch do what it does in evaluation; whether it did anything else."""
    switch, given = SWITCHES[node.target], edit.args_of(node)
    if not switch.is_on(given):
        return False
    name = switch.of or switch.name
    if name in node.kwargs:
        node.update_kwarg(name, type(given[name])())
    else:
        node.update_arg(place_of(node.target, name), type(given[name])())
    return True
