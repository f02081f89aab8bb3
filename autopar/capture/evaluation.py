"""A check whether the graph of a training step can also evaluate: what `model.eval()` changes. Called by
capture.capture.

    y = F.dropout(x, 0.1, self.training)      # one flag: the graph has the operator, and evaluation leaves it out
    if self.training: y = y * torch.rand(b)   # a random factor, which evaluation leaves out, too (stochastic depth)
    if self.training: y = y + z               # other operators: evaluation is another graph

The model runs once in each mode on tensors without values. Every value is numbered by the expression that computes it,
training flags ignored (value numbering, `capture.tape`). Where all results have the same numbers in both modes,
evaluation is the graph with its flags off, and without the changes of buffers that only training makes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.capture._torch import OF_MODELS
from autopar.capture.tape import Tape, played
from autopar.text import first_line


@dataclass(frozen=True)
class Evaluation:
    """How a captured model evaluates. `why`: why the graph cannot evaluate; empty where it can, with its flags off.
    `changing`: the buffers that evaluation changes too. `noises`: the number of products with random factors that
    evaluation leaves out (`passes.noises`). `differs`: whether evaluation differs from training at all. `rerun`: of the
    training step, lines of the user that checkpoint parts which change buffers."""

    why: str = ""
    changing: tuple[str, ...] = ()
    noises: int = 0
    differs: bool = False
    rerun: tuple[str, ...] = ()


def evaluation(
    fresh: Callable[[], nn.Module], step: Tape | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Evaluation:
    """How a model that `fresh` makes, in training mode, evaluates on inputs on meta. `step` is the tape of its
    training step on them; None where that did not run."""
    inputs, numbers = (args, dict(kwargs)), step.numbers if step is not None else dict[Hashable, int]()
    try:
        evaluated = played(fresh().eval(), inputs, numbers)
        for leaving_out in (False, True):
            trained = (
                step
                if step is not None and not leaving_out
                else played(fresh(), inputs, numbers, leaving_out=leaving_out)
            )
            same = evaluated.result == trained.result and all(
                trained.changed.get(name) == state for name, state in evaluated.changed.items()
            )
            if same and not evaluated.on:
                differs = bool(trained.on or trained.noises or trained.changed.keys() - evaluated.changed.keys())
                return Evaluation(changing=tuple(evaluated.changed), noises=trained.noises, differs=differs)
        again = played(fresh().eval(), inputs, numbers, known=trained.made)
    except OF_MODELS as error:
        return Evaluation(
            f"it does not run without values, to see what evaluation changes: {first_line(error)[:200]}", differs=True
        )
    other = again.other and f"{again.other} computes something that training does not ({again.where})"
    return Evaluation(again.on or other or "evaluation leaves out parts of what training computes", differs=True)
