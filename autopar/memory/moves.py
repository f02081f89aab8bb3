"""Bytes that changes of layout use while they run: receive buffers, and reordered parts (runtime/moves.py,
collectives.py). Called by memory.forward and memory.backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.layout import Step, in_order, is_placed


def done(steps: Sequence[Step], sizes: Sequence[int]) -> tuple[Step, ...]:
    """The steps that are executed: those on axes of several ranks. On an axis of one rank the input is the result
    (runtime.moves.Chain)."""
    return tuple(step for step in steps if sizes[step.axis] > 1)


def fresh(steps: Sequence[Step]) -> bool:
    """Whether the result of some steps has memory of its own, and is not the input."""
    return any(not is_placed(step.after[step.axis]) for step in steps)


def workspace(steps: Sequence[Step], nbytes: Callable[[tuple[str, ...]], float], *, staged: bool) -> float:
    """The most bytes that some steps take in addition to input and result; `nbytes` gives the bytes of the tensor in a
    layout. `staged`: by gloo, on CPUs, which gathers into a tensor of its own, and sums in a copy before it
    scatters."""
    most = 0.0
    for number, step in enumerate(steps):
        before, after = nbytes(step.before), nbytes(step.after)
        own = (before if number else 0.0) + (after if number + 1 < len(steps) else 0.0)
        most = max(most, own + (_staged(step, before, after) if staged else _parts(step, before, after)))
    return most


def halfway(steps: Sequence[Step], nbytes: Callable[[tuple[str, ...]], float]) -> tuple[float, ...]:
    """For a chain of collectives in the background (runtime.moves.Chain): the bytes of each result but the last, and of
    the copies in which the next collective reads or writes it."""
    return tuple(
        nbytes(step.before) + _parts(step, nbytes(step.before), nbytes(step.after)) * (step.kind != "all_gather")
        for step in steps[1:]
    )


def _parts(step: Step, before: float, after: float) -> float:
    """Bytes of the copies in which a collective reads or writes its parts; none where the first dim is cut, because
    parts are then contiguous."""
    if step.kind == "all_gather":
        return 0.0 if in_order(step.before[step.axis]) else after
    if step.kind == "reduce_scatter":
        return 0.0 if in_order(step.after[step.axis]) else before
    return before + after if step.kind == "all_to_all" else 0.0


def _staged(step: Step, before: float, after: float) -> float:
    """As `_parts`, with gloo's own copies: the one that it gathers into, which is freed before parts are reordered; and
    the one in which it sums, in addition to parts."""
    if step.kind == "all_gather":
        return after
    return _parts(step, before, after) + before * (step.kind == "reduce_scatter")
