"""What a model keeps from step to step beside tensors: numbers that count (`self.steps += 1`), and what else changes in
its attributes, also inside of lists, dicts and plain objects, and in what its code keeps outside of it
(`capture.outside`). Used by step_variation.

Whether any later step is another one cannot be known by running some. For numbers, later steps are tried where a
comparison of them turns out otherwise (`capture.noting_numbers`), and whether or not they are compared, far later: at
FAR, which is beyond the thresholds that are in use, and a multiple of every n up to 20 and of their products with
powers of ten, and at its neighbours. Lists that grow are tried at one great length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import IOBase
from operator import setitem
from typing import Any

from torch import Tensor, nn

from autopar.capture.block_runs import INNER
from autopar.capture.forwards import functions_of
from autopar.capture.noting_numbers import Comparison, noting
from autopar.capture.outside import Place, is_plain_object, slots
from autopar.capture.shadow import WithLoss

FAR = math.lcm(*range(1, 21)) * 10_000
"""A count that no training reaches, which all usual periods divide."""
LONG = 1000
"""The number of items of a list that has grown for long."""
DEPTH = 4
"""How deep attributes are looked into."""


@dataclass(frozen=True)
class Held:
    """A value that a model holds, or that its code finds outside of it; `put` gives its place another one."""

    value: Any
    put: Callable[[Any], None]


def held(model: nn.Module) -> dict[Place, Held]:
    """Everything in the attributes of all modules, and outside of the model, that is neither a tensor nor a module, by
    its place."""
    found: dict[Place, Held] = {}
    seen: set[int] = set()
    functions = [("loss_fn", function) for function in functions_of(model) if isinstance(function, nn.Module)]
    for path, module in (*model.named_modules(), *functions):
        own = {name: value for name, value in vars(module).items() if name not in INNER}
        for name, value in own.items():
            _look(Held(value, partial(setitem, vars(module), name)), (path, name), found, seen)
    for place, slot in slots(model).items():
        _look(Held(slot.value, slot.put), place, found, seen)
    return found


def _look(here: Held, place: Place, found: dict[Place, Held], seen: set[int]) -> None:
    value = here.value
    if isinstance(value, Tensor | nn.Module) or id(value) in seen or len(place) > DEPTH:
        return
    found[place] = here
    if isinstance(value, MutableMapping | list) or is_plain_object(value):
        seen.add(id(value))
        inside = value if isinstance(value, MutableMapping | list) else vars(value)
        for name, item in _pairs(inside):
            _look(Held(item, partial(setitem, inside, name)), (*place, str(name)), found, seen)


def _pairs(container: MutableMapping[Any, Any] | list[Any]) -> list[tuple[Any, Any]]:
    """What a container has now, by key or position. A dict is read as Python's own are: one of classes that are
    imported when they are read (transformers' tables of models) would import all of them."""
    if isinstance(container, dict):
        return list(dict.items(container))
    return list(container.items() if isinstance(container, MutableMapping) else enumerate(container))


@dataclass(frozen=True)
class State:
    """What a model keeps between two steps: its numbers, the lengths of its lists, the training flags of its modules by
    path, and all else as one key."""

    numbers: Mapping[Place, float]
    lengths: Mapping[Place, int]
    modes: Mapping[str, bool]
    rest: Hashable


def state_of(model: nn.Module) -> State:
    """The state of a model. What moves is never in the state that it was in."""
    everything = held(model)
    values = {place: item.value for place, item in everything.items()}
    numbers = {
        place: value
        for place, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    lengths = {place: len(value) for place, value in values.items() if isinstance(value, list)}
    rest = [
        (place, value if isinstance(value, bool | str | bytes | None) else object() if _moves(value) else type(value))
        for place, value in values.items()
        if place not in numbers
    ]
    modes = {path: module.training for path, module in model.named_modules()}
    return State(numbers, lengths, modes, (tuple(rest), tuple(lengths.items())))


def _moves(value: Any) -> bool:
    """Whether a value gives something else whenever it is asked: an iterator. So is a stream, by its lines; one that is
    written (sys.stderr, which the thread of a progress bar holds) gives nothing to a step."""
    return isinstance(value, Iterator) and not (isinstance(value, IOBase) and (value.closed or value.writable()))


def counts(states: Sequence[State]) -> dict[Place, float]:
    """The numbers that each of two steps has changed, and by how much the second one did: a number that only the first
    step changes (the longest text so far) is no count, nor is one that is no number (a nan differs from itself).
    `states`: before the first step, between the two, and after."""
    first, between, last = (state.numbers for state in states)
    return {
        place: value - between.get(place, 0)
        for place, value in last.items()
        if first.get(place) != between.get(place) != value and math.isfinite(value - between.get(place, 0))
    }


def put(model: nn.Module, values: Mapping[Place, float], by: Mapping[Place, float], noted: list[Comparison]) -> None:
    """Set numbers of a model to `values`, which change `by` so much in a step, and note what they are compared with."""
    everything = held(model)
    for place, value in values.items():
        if place in everything:
            step = by[place]

            def later(steps: int, value: float = value, step: float = step) -> float:
                return value + steps * step

            everything[place].put(noting(value, later, noted))


def lengthen(model: nn.Module, which: Sequence[Place]) -> None:
    """Let lists of a model grow to LONG items, all but the first ones like the last one."""
    everything = held(model)
    for place in which:
        if place in everything and (items := everything[place].value):
            items.extend(items[-1:] * (LONG - len(items)))


def said(places: Sequence[Place]) -> str:
    """Places as people read them: `encoder.steps, kept.scale`."""
    names = (".".join(part for part in place if part) for place in places)
    return ", ".join(name.removeprefix(f"{WithLoss.INNER}.") for name in names)
