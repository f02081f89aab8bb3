"""The proof that shortened runs stand for whole ones, from the model's outer code and one run of the shortened model.
Called by capture.capture.

    h = embed(ids); for block in blocks: h = block(h, mask); ...

Three things are shown. No block of a run reads its own number. In the whole model every block of a run is called once,
in order, and each argument is, for all groups from the second on, the same thing: the previous block's output number i,
the very object that its twin one group earlier got, or an equal plain value. And the outer code of the shortened model
does what that of the whole model does, operator for operator, with the middle blocks left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar.capture import block_runs
from autopar.capture._torch import OF_MODELS
from autopar.capture.block_runs import AlikeRun
from autopar.capture.outer_code import Call, Recording, play, results
from autopar.capture.watched_number import ReadError, Watched
from autopar.errors import CaptureError
from autopar.text import first_line


def chains(
    model: nn.Module,
    shortened: Callable[[Sequence[AlikeRun]], nn.Module],
    runs: Sequence[AlikeRun],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[list[AlikeRun], list[str]]:
    """Those of `runs` that may be shortened, and for all others a note that says why not. `shortened` makes the shadow
    with some runs shortened.

    Heads that outer code collects must not keep layers from being shortened: where all runs together are no chains,
    those of each kind of container (`layers.*.experts`) are tried one after the other."""
    kinds: dict[str, list[AlikeRun]] = {}
    for run in runs:
        kind = ".".join("*" if part.isdecimal() else part for part in run.path.split("."))
        kinds.setdefault(kind or "the model", []).append(run)
    if len(kinds) > 1 and not is_chain(model, shortened(runs), runs, args, kwargs):
        return list(runs), []
    taken: list[AlikeRun] = []
    notes = []
    for kind, more in kinds.items():
        tried = [run for run in runs if run in taken or run in more]
        if why := is_chain(model, shortened(tried), tried, args, kwargs):
            notes.append(f"blocks of {kind} are captured one by one: {why}")
        else:
            taken = tried
    return taken, notes


def is_chain(
    model: nn.Module, short: nn.Module, runs: Sequence[AlikeRun], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Why `runs` of `model` may not be shortened; "" where they may. `short` is the shortened shadow; inputs are on
    meta."""
    inputs = (args, dict(kwargs))
    paths = list(dict.fromkeys(run.path for run in runs))
    sizes = {path: len(model.get_submodule(path)._modules) for path in paths}
    keep = {path: block_runs.kept(runs, path, sizes[path]) for path in paths}
    try:
        with _watching(short, runs):
            gave = results(short, paths, inputs)
        idle = next((f"{path}.{shown}" for path in paths for shown in keep[path] if (path, shown) not in gave), "")
        if idle:
            return f"{idle} is not called itself, but its parts are"
        brief = play(model, keep, short.training, inputs, gave.__getitem__)
        whole = play(
            model,
            {path: {n: n for n in range(sizes[path])} for path in paths},
            short.training,
            inputs,
            lambda block: gave[block[0], _stand_in(runs, *block)],
        )
    except ReadError as error:
        return first_line(error)
    except (*OF_MODELS, CaptureError) as error:  # of what the whole model does, its own capture tells
        return (
            "the model does not run with fewer of them, as where it counts them or takes them by number "
            f"({first_line(error)})"
        )
    broken = next((why for run in runs if (why := _why_no_chain(run, whole.calls))), "")
    return broken or _compare(runs, brief, whole)


@contextmanager
def _watching(short: nn.Module, runs: Sequence[AlikeRun]) -> Iterator[None]:
    """A context in which the shortened model's blocks raise where code reads the number of a block."""
    held = []
    for run in runs:
        for shown, number in run.kept.items():
            for path, name in run.indexes:
                module = short.get_submodule(".".join(filter(None, (run.path, str(shown), path))))
                held.append((module, name, getattr(module, name)))
                setattr(
                    module,
                    name,
                    Watched(number, f"blocks read their own number ({type(module).__name__}.{name})"),
                )
    try:
        yield
    finally:
        for module, name, value in held:
            setattr(module, name, value)


def _run_of(runs: Sequence[AlikeRun], path: str, number: int) -> AlikeRun | None:
    """The run that child `number` of container `path` is in."""
    return next((run for run in runs if run.path == path and run.start <= number < run.stop), None)


def _stand_in(runs: Sequence[AlikeRun], path: str, number: int) -> int:
    """The child that stands for child `number` of container `path` in outer code; itself outside of runs."""
    run = _run_of(runs, path, number)
    return number if run is None else run.shown_as(number)


def _why_no_chain(run: AlikeRun, calls: Sequence[Call]) -> str:
    """Why the `calls` of the blocks of a run are no chain; "" where they are."""
    mine = [call for call in calls if call.block[0] == run.path and run.start <= call.block[1] < run.stop]
    if [call.block[1] for call in mine] != list(range(run.start, run.stop)):
        return "its blocks are not called once each, in order"
    seen: dict[int, list[Any]] = {}
    for at in range(run.period, len(mine)):
        number = mine[at].block[1]
        how = [_origin(x, mine[at - 1], mine[at - run.period], i) for i, x in enumerate(mine[at].fed)]
        if None in how:
            return f"block {number} is fed something made anew for it (argument {how.index(None)})"
        if seen.setdefault(at % run.period, how) != how:
            return f"block {number} is fed differently from the blocks before it"
    return ""


def _origin(x: Any, before: Call, twin: Call, index: int) -> Any:
    """Where one argument of a block comes from, in words that are the same for all blocks of a chain; None where
    unknown."""
    known = index < len(twin.fed)
    if isinstance(x, torch.Tensor):
        for i, result in enumerate(before.gave):
            if x is result:
                return ("output", i)
        return ("same", index) if known and x is twin.fed[index] else None
    return ("equal", index) if known and (x is twin.fed[index] or x == twin.fed[index]) else None


def _compare(runs: Sequence[AlikeRun], brief: Recording, whole: Recording) -> str:
    """How the outer programs of both models differ, apart from the blocks that the shortened one lacks; "" where they
    are equal."""
    wanted, got = _program(runs, whole, whole=True), _program(runs, brief, whole=False)
    for a, b in zip(wanted, got, strict=False):
        if a != b:
            return f"outer code depends on the number of blocks (at {a[0]})"
    if len(wanted) != len(got):
        return (
            f"outer code depends on the number of blocks ({len(wanted)} operators and blocks with all of them, "
            f"{len(got)} with some)"
        )
    return ""


def _program(runs: Sequence[AlikeRun], recording: Recording, *, whole: bool) -> list[tuple[str, Any]]:
    """A recording as comparable lines. Of the whole model's, calls of middle blocks are left out, the last group gets
    its number in the shortened model, and arguments that come from a middle block are named as from the second
    group."""
    shown: dict[Any, Any] = {}
    stands: dict[Any, Any] = {}
    for run in runs if whole else ():
        numbers = {number: shown for shown, number in run.kept.items()}
        for number in range(run.start + 2 * run.period, run.stop):
            shown["block", (run.path, number)] = ("block", (run.path, numbers[number])) if number in numbers else None
            stands["block", (run.path, number)] = ("block", (run.path, run.shown_as(number)))
    lines: list[tuple[str, Any]] = []
    for event in recording.events:
        if not isinstance(event, Call):
            lines.append((event[0], [_renamed(label, shown) for label in event[1]]))
        elif (name := shown.get(("block", event.block), ("block", event.block))) is not None:
            fed = [_renamed(label, shown, stands) for label in recording.flat(event.fed)]
            lines.append((f"block {name[1][1]} of {name[1][0]}", fed))
    return [*lines, ("the result", [_renamed(label, shown) for label in recording.result])]


def _renamed(label: Any, shown: Mapping[Any, Any], stands: Mapping[Any, Any] | None = None) -> Any:
    """A label in the numbers of the shortened model. A middle block has no number there; `stands` gives the second
    group's, for arguments of blocks only."""
    origin, *rest = label
    if origin not in shown:
        return label
    name = shown[origin] if shown[origin] is not None else (stands or {}).get(origin, origin)
    return (name, *rest)
