"""Numbers that modules keep and change when they run (`self.steps += 1`): a graph has their values of one step.

What a first run alone changes is a cache (the longest sequence so far). What every run changes is a counter; where the graph of the next run is another one,
steps depend on it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.export import ExportedProgram

from autopar.errors import CaptureError

PLAIN = (bool, int, float)  # their types themselves: symbolic sizes, which pass for ints, are of the trace
Numbers = dict[str, bool | int | float]


def kept_numbers(model: nn.Module) -> Numbers:
    """The numbers that modules have as attributes, by path."""
    return {f"{path}.{name}" if path else name: value
            for path, module in model.named_modules() for name, value in vars(module).items() if type(value) in PLAIN}


def counters(model: nn.Module, seen: list[Numbers], trace: Callable[[], ExportedProgram]) -> tuple[ExportedProgram, list[str]]:
    """What `trace` gives, and notes on numbers that count steps. Whenever `model` ran, what it kept then is put at the end of `seen`; torch.export takes changes back.

    Raises CaptureError where the next step would be another graph.
    """
    before = kept_numbers(model)
    traced = trace()
    first = seen[-1]
    changed = _changed(before, first)
    if not changed:
        return traced, []
    _keep(model, {name: first[name] for name in changed})
    other = trace()
    counts = [f"{name} ({before[name]}, {first[name]}, {seen[-1][name]}, ...)" for name in _changed(first, seen[-1])]
    if counts and str(traced.graph) != str(other.graph):
        raise CaptureError(f"{type(model).__name__} cannot be captured: its step depends on a number that changes with every step, and a graph has one step\n"
                           f"{', '.join(counts)}: make it a buffer (a tensor that is changed in place), or pass it as an input")
    return traced, [f"{each} changes with every step of the model, and not in the sharded module" for each in counts]


def _changed(before: Numbers, after: Numbers) -> list[str]:
    return [name for name, value in after.items() if name in before and before[name] != value]


def _keep(model: nn.Module, numbers: Numbers) -> None:
    for name, value in numbers.items():
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, value)
