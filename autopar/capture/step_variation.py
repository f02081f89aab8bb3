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
counts its steps, second steps far later, and where comparisons of the count turn out otherwise, are compared too; where
something else in its attributes changes, a few further steps (`step_counts`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from autopar.capture._torch import OF_MODELS
from autopar.capture.assigned import buffers_of, put_back
from autopar.capture.noting_numbers import Comparison
from autopar.capture.outside import Place
from autopar.capture.step_counts import FAR, State, counts, lengthen, put, said, state_of
from autopar.capture.tape import Tape, played
from autopar.errors import CaptureError

MOMENTS = 24
"""The largest number of later steps that are tried for their counts."""
FURTHER = 6
"""The largest number of further steps that are tried where other attributes change."""


def one_step(
    fresh: Callable[[], nn.Module], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tape | None:
    """The tape of the first step of a model that `fresh` makes, on meta; None where it does not run without values, so
    that steps cannot be compared. Raises CaptureError, which calls the model `name`, where the second step gives other
    results or other new buffers."""
    inputs = (args, dict(kwargs))
    try:
        model = fresh()
        states = [state_of(model)]
        first, second = _two(model, inputs, between=lambda model: states.append(state_of(model)))
        states.append(state_of(model))
        _refuse_unlike(first, second, name)
        _refuse_modes(states, name)
        same = _computed(first) == _computed(second)
        restoring = not same and bool(second.assigned)
        if restoring:
            first, again = _two(fresh(), inputs, putting_back=True)
            same = _computed(first, restored=True) == _computed(again, restored=True)
        if same:
            steps = _Steps(fresh, name, inputs, restoring)
            _refuse_later(steps, states)
            _refuse_further(steps, states)
    except OF_MODELS:
        return None
    if same:
        return first
    raise CaptureError(
        f"{name} cannot be captured: its second step computes something else than the first one, from "
        f"{_where(second)} on, and a graph has one step; what is kept from step to step must be a buffer "
        "(register_buffer, then assigned or changed in place) or an input; where only a first step differs, run that "
        "before"
    )


def _refuse_later(steps: _Steps, states: Sequence[State]) -> None:
    """Raise CaptureError where a step computes something else than the first one once the numbers that the model counts
    are those of a later step. `states`: those of two steps (`step_counts.counts`)."""
    by = counts(states)
    far = {place: FAR if step > 0 else -FAR for place, step in by.items()}
    ways = [{place: value + n * by[place] for place, value in far.items()} for n in (-1, 0, 1)]
    moments = deque([{place: states[-1].numbers[place] for place in by}, *ways] if by else [])
    tried: list[Mapping[Place, float]] = []
    while moments and len(tried) < MOMENTS:
        values, noted = moments.popleft(), list[Comparison]()
        if values in tried:
            continue
        tried.append(values)
        late = steps.second(partial(put, values=values, by=by, noted=noted))
        steps.refuse(late, f"it counts its steps ({said(list(by))}), and a later one", "what depends on the count")
        turns = dict.fromkeys(after for each in noted if (after := each.turns()) is not None)
        moments.extend({place: value + n * by[place] for place, value in values.items()} for n in turns)


def _refuse_further(steps: _Steps, states: Sequence[State]) -> None:
    """Raise CaptureError where one of a few further steps computes something else than the first one, in a model in
    whose attributes something else than numbers and tensors changes from step to step, or a step with long lists where
    lists grow."""
    first, between, last = states
    if not first.rest != between.rest != last.rest:
        return
    for tape in steps.further():
        steps.refuse(tape, "its attributes change from step to step, and a later one", "what depends on them")
    if grown := [place for place, length in last.lengths.items() if length > between.lengths.get(place, length)]:
        late = steps.second(partial(lengthen, which=grown))
        steps.refuse(late, f"its lists grow ({said(grown)}), and a later step", "what depends on their lengths")


@dataclass
class _Steps:
    """Steps of the models that `fresh` makes, to be compared with their first one; `name` is what errors call them.
    `restoring`: buffers that steps assign are restored before each step."""

    fresh: Callable[[], nn.Module]
    name: str
    inputs: Any
    restoring: bool

    def second(self, between: Callable[[nn.Module], None]) -> tuple[Tape, Tape] | None:
        """The tapes of a first and a second step, `between` which the model is changed; None where it does not run."""
        try:
            return _two(self.fresh(), self.inputs, putting_back=self.restoring, between=between)
        except OF_MODELS:
            return None

    def further(self) -> Iterator[tuple[Tape, Tape] | None]:
        """The tapes of the first step and of each of FURTHER ones behind it, until the model is in a state that it was
        in before."""
        model = self.fresh()
        before = buffers_of(model)
        first = tape = played(model, self.inputs, {})
        states = [state_of(model).rest]
        for _ in range(FURTHER):
            if self.restoring:
                put_back(model, before)
            try:
                tape = played(model, self.inputs, first.numbers, known=first.made, kept=tape)
            except OF_MODELS:
                return
            yield first, tape
            if (state := state_of(model).rest) in states:
                return
            states.append(state)

    def refuse(self, tapes: tuple[Tape, Tape] | None, which: str, what: str) -> None:
        """Raise CaptureError where the second one of two steps, which is `which`, computes something else; `what` must
        be tensors then."""
        if tapes is None:
            return
        first, late = tapes
        if _computed(first, restored=self.restoring) != _computed(late, restored=self.restoring):
            raise CaptureError(
                f"{self.name} cannot be captured: {which} computes something else than the first one, from "
                f"{_where(late)} on, and a graph has one step; make {what} a buffer (register_buffer, then changed in "
                "place) or an input"
            )


def _computed(tape: Tape, *, restored: bool = False) -> tuple[Any, ...]:
    """What a step computes, its results and buffers, and what it drops at random, to be compared with that of another
    step. `restored`: both begin with the same buffers, so that only changes of these count."""
    return tape.result, tape.changed if restored else tape.states, tape.switched


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


def _refuse_modes(states: Sequence[State], name: str) -> None:
    """Raise CaptureError where the second step leaves modules in another mode than the first one. Which mode a step
    finds is no expression that tapes compare."""
    _, between, last = (state.modes for state in states)
    if other := [path for path, training in last.items() if between.get(path, training) != training]:
        raise CaptureError(
            f"{name} cannot be captured: its steps leave {other[0] or 'the model'} in training and in evaluation by "
            "turns (train(), eval() in forward), and a graph has one step: set the mode before compile, or give "
            "functions the flag that they need (F.dropout(x, p, training=...))"
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
