"""A check that every step of a model is the same computation, since a graph has one step. Called by capture.capture.

    self.steps += 1; y = y * min(1.0, self.steps / 1000)     # a count, wherever it is kept
    y = y + self.last; self.last = y.detach()                # what the step before computed
    if not self.ready: ...; self.ready = True                # what only the first step does
    self.scale = self.scale or x.std()                       # what the first batch gave

The model runs twice without values, and the results are compared as expressions of weights and inputs (`capture.tape`).
Tensors that it keeps from the first run keep their expressions where these have the same values in every step (a mask
that is made once). Those of inputs, random draws, weights that train or buffers that change are other expressions in
the second run. Where the second step then
differs and forward assigned buffers, a fresh model runs twice again, with these buffers restored before the second
step: both steps then begin with the same tensors, and only what they compute from them is compared. Where a model
counts its steps, a second step far later is compared too (`step_counts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from autopar.capture.assigned import buffers_of, put_back
from autopar.capture.step_counts import Count, counts_of, later, put
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
        model, counted = fresh(), list[Mapping[Count, float]]()
        counted.append(counts_of(model))
        first, second = _two(model, inputs, between=lambda model: counted.append(counts_of(model)))
        counted.append(counts_of(model))
        _refuse_unlike(first, second, name)
        same = _computed(first) == _computed(second)
        restoring = not same and bool(second.assigned)
        if restoring:
            first, again = _two(fresh(), inputs, putting_back=True)
            same = _computed(first, restored=True) == _computed(again, restored=True)
        if same:
            _refuse_later(fresh, later(counted), name, inputs, restoring)
    except UNTOLD:
        return None
    if same:
        return first
    raise CaptureError(
        f"{name} cannot be captured: its second step computes something else than the first one, from "
        f"{_where(second)} on, and a graph has one step; what is kept from step to step must be a buffer "
        "(register_buffer, then assigned or changed in place) or an input; where only a first step differs, run that "
        "before"
    )


def _refuse_later(
    fresh: Callable[[], nn.Module], counts: Iterable[Mapping[Count, float]], name: str, inputs: Any, restoring: bool
) -> None:
    """Raise CaptureError where a step computes something else than the first one once the numbers that it counts are
    any of `counts`, those of later steps."""
    for values in counts:
        first, late = _two(fresh(), inputs, putting_back=restoring, between=partial(put, values=values))
        if _computed(first, restored=restoring) != _computed(late, restored=restoring):
            names = ", ".join(f"{path}.{key}".lstrip(".") for path, key in values)
            raise CaptureError(
                f"{name} cannot be captured: it counts its steps ({names}), and a later one computes something else "
                f"than the first one, from {_where(late)} on, and a graph has one step; make what depends on the count "
                "a buffer (register_buffer, then changed in place) or an input"
            )


def _computed(tape: Tape, *, restored: bool = False) -> tuple[Any, Any]:
    """What a step computes, its results and buffers, to be compared with that of another step. `restored`: both begin
    with the same buffers, so that only changes of these count."""
    return tape.result, tape.changed if restored else tape.states


def _where(tape: Tape) -> str:
    """Where a step first computes something else than the one before it."""
    return f"{tape.other} ({tape.where})" if tape.other else "what it gives"


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


def _two(
    model: nn.Module,
    inputs: Any,
    *,
    putting_back: bool = False,
    between: Callable[[nn.Module], None] = lambda model: None,
) -> tuple[Tape, Tape]:
    """The tapes of two steps; with `putting_back`, buffers that the first one assigned are restored before the second
    one; `between` is called with the model before that."""
    before = buffers_of(model)
    first = played(model, inputs, {})
    if putting_back:
        put_back(model, before)
    between(model)
    return first, played(model, inputs, first.numbers, known=first.made, kept=first)
