"""What `model.eval()` changes: does the graph of a training step say how the model evaluates, too?

    y = F.dropout(x, 0.1, self.training)      # one flag: the graph has the operator, and evaluation leaves it out
    if self.training: y = y * torch.rand(b)   # a random factor, which evaluation leaves out, too (stochastic depth)
    if self.training: y = y + z               # other operators: evaluation is another graph

The model runs once in each mode on tensors without values. Every value has a number by what it is computed of, flags aside, so that equal numbers are equal
expressions; where all results have those of training, evaluation is the graph with its flags off, and without changes of buffers that evaluation does not make.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.capture.shadow import shadow
from autopar.capture.tape import Tape, played
from autopar.capture.valueless import UNTOLD
from autopar.text import first_line


@dataclass(frozen=True)
class Evaluation:
    """How a captured model evaluates: with the flags of its functions off, if `why` is empty; else why not. `changing` are the buffers that evaluation
    changes, too, `noises` counts the products with random factors that it leaves out (`passes.noises`), and `differs` says whether it is another thing than training at all."""

    why: str = ""
    changing: tuple[str, ...] = ()
    noises: int = 0
    differs: bool = False


def evaluation(model: nn.Module, step: Tape | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Evaluation:
    """How `model`, a shadow that is in training, evaluates inputs on meta; it stays as it is. `step` is the tape of its training step on them, where there is one."""
    inputs, numbers = (args, dict(kwargs)), step.numbers if step is not None else dict[Hashable, int]()
    try:
        evaluated = played(shadow(model).eval(), inputs, numbers)
        for leaving_out in (False, True):
            trained = step if step is not None and not leaving_out else played(shadow(model), inputs, numbers, leaving_out=leaving_out)
            same = evaluated.result == trained.result and all(trained.changed.get(name) == state for name, state in evaluated.changed.items())
            if same and not evaluated.on:
                differs = bool(trained.on or trained.noises or trained.changed.keys() - evaluated.changed.keys())
                return Evaluation(changing=tuple(evaluated.changed), noises=trained.noises, differs=differs)
        again = played(shadow(model).eval(), inputs, numbers, known=trained.made)
    except UNTOLD as error:
        return Evaluation(f"it does not run without values, to see what evaluation changes: {first_line(error)[:200]}", differs=True)
    other = again.other and f"{again.other} computes something that training does not ({again.where})"
    return Evaluation(again.on or other or "evaluation leaves out parts of what training computes", differs=True)
