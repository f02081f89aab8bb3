"""Is every step of a model the same one? A graph has one.

    self.steps += 1; y = y * min(1.0, self.steps / 1000)     # a count, wherever it is kept
    y = y + self.last; self.last = y.detach()                # what the step before computed
    if not self.ready: ...; self.ready = True                # what only the first step does

The model runs twice without values, and what it gives is compared as expressions of weights and inputs (`capture.tape`). What it keeps of the first run (a mask that
is made once) is the expression that it was.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn

from autopar.capture.tape import UNTOLD, played


def another_step(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Where the second step of `model`, which is on meta and changes, first computes something that the first one does not: `mul (model.py:12)`; "" where results and
    buffers are alike, or it does not run without values."""
    numbers: dict[Hashable, int] = {}
    try:
        first = played(model, (args, dict(kwargs)), numbers)
        second = played(model, (args, dict(kwargs)), numbers, known=dict.fromkeys(first.made), kept=first)
    except UNTOLD:
        return ""
    same = (first.result, first.states) == (second.result, second.states)
    return "" if same else second.other or "what it gives"
