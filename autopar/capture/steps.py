"""Is every step of a model the same one? A graph has one.

    self.steps += 1; y = y * min(1.0, self.steps / 1000)     # a count, wherever it is kept
    y = y + self.last; self.last = y.detach()                # what the step before computed
    if not self.ready: ...; self.ready = True                # what only the first step does

The model runs twice without values, and what it gives is compared as expressions of weights and inputs (`capture.tape`). What it keeps of the first run (a mask that
is made once) is the expression that it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.capture.tape import Tape, played
from autopar.capture.valueless import UNTOLD
from autopar.errors import CaptureError


def one_step(model: nn.Module, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tape | None:
    """The tape of the first step of `model`, which is on meta and changes; None where it does not run without values, so that nothing can be told of its steps.
    Raises CaptureError, which calls the model `name`, where the results or the buffers of the second step are others."""
    inputs = (args, dict(kwargs))
    try:
        first = played(model, inputs, {})
        second = played(model, inputs, first.numbers, known=first.made, kept=first)
    except UNTOLD:
        return None
    if (first.result, first.states) == (second.result, second.states):
        return first
    where = f"{second.other} ({second.where})" if second.other else "what it gives"
    raise CaptureError(f"{name} cannot be captured: its second step computes something else than the first one, from {where} on, and a graph has one step; "
                       "what is kept from step to step must be a buffer (a tensor that is changed in place) or an input; where only a first step differs, run that before")
