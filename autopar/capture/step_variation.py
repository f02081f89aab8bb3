"""A check that every step of a model is the same computation, since a graph has one step.

    self.steps += 1; y = y * min(1.0, self.steps / 1000)     # a count, wherever it is kept
    y = y + self.last; self.last = y.detach()                # what the step before computed
    if not self.ready: ...; self.ready = True                # what only the first step does

The model runs twice without values, and the results are compared as expressions of weights and inputs (`capture.tape`).
Tensors that it keeps from the first run (a mask that is made once) keep their expressions. Where the second step then
differs and forward assigned buffers, a fresh model runs twice again, with these buffers restored before the second
step: both steps then begin with the same tensors, and only what they compute from them is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from autopar.capture.assigned import buffers_of, put_back
from autopar.capture.tape import Tape, played
from autopar.capture.valueless import UNTOLD
from autopar.errors import CaptureError


def one_step(
    fresh: Callable[[], nn.Module], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tape | None:
    """The tape of the first step of a model that `fresh` makes, on meta; None where it does not run without values, so
    that steps cannot be compared. Raises CaptureError, which calls the model `name`, where the second step gives other
    results or other new buffers."""
    inputs = (args, dict(kwargs))
    try:
        first, second = _two(fresh(), inputs)
        _refuse_unlike(first, second, name)
        same = (first.result, first.states) == (second.result, second.states)
        if not same and second.assigned:
            first, again = _two(fresh(), inputs, putting_back=True)
            same = (first.result, first.changed) == (again.result, again.changed)
    except UNTOLD:
        return None
    if same:
        return first
    where = f"{second.other} ({second.where})" if second.other else "what it gives"
    raise CaptureError(
        f"{name} cannot be captured: its second step computes something else than the first one, from {where} on, and "
        "a graph has one step; what is kept from step to step must be a buffer (register_buffer, then assigned or "
        "changed in place) or an input; where only a first step differs, run that before"
    )


def _refuse_unlike(first: Tape, second: Tape, name: str) -> None:
    """Raise CaptureError where each step assigns to a buffer a tensor of another size or dtype, and by another
    expression."""
    for buffer, unlike in first.unlike.items():
        if second.assigned.get(buffer, first.assigned[buffer]) != first.assigned[buffer]:
            key = buffer.rpartition(".")[2]
            raise CaptureError(
                f"{name} cannot be captured: its steps assign the buffer {buffer} a tensor that is {unlike}, and a "
                "buffer has one size and dtype in a graph: assign what is like it, or write it in place "
                f"(self.{key}.copy_(...))"
            )


def _two(model: nn.Module, inputs: Any, *, putting_back: bool = False) -> tuple[Tape, Tape]:
    """The tapes of two steps; with `putting_back`, buffers that the first one assigned are restored before the second
    one."""
    before = buffers_of(model)
    first = played(model, inputs, {})
    if putting_back:
        put_back(model, before)
    return first, played(model, inputs, first.numbers, known=first.made, kept=first)
