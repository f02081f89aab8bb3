"""What changes of layout take while they run: receive buffers, and parts put in order (runtime/moves.py,
collectives.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.layout import Step, dim_of, is_placed, sections_of


def done(steps: Sequence[Step], sizes: Sequence[int]) -> tuple[Step, ...]:
    """The steps on axes of several ranks: on an axis of one there is nothing to do, and what comes out is what came in
    (runtime.moves.Chain)."""
    return tuple(step for step in steps if sizes[step.axis] > 1)


def fresh(steps: Sequence[Step]) -> bool:
    """Whether the result has memory of its own."""
    return any(not is_placed(step.after[step.axis]) for step in steps)


def workspace(steps: Sequence[Step], nbytes: Callable[[tuple[str, ...]], float], *, staged: bool) -> float:
    """The most bytes that stand beside what comes in and what comes out; `nbytes` gives those of the tensor under a
    layout. `staged`: gloo, on CPUs, gathers into a tensor of its own and sums in a copy before it scatters."""
    most = 0.0
    for number, step in enumerate(steps):
        before, after = nbytes(step.before), nbytes(step.after)
        own = (before if number else 0.0) + (after if number + 1 < len(steps) else 0.0)
        most = max(most, own + (_staged(step, before, after) if staged else _parts(step, before, after)))
    return most


def halfway(steps: Sequence[Step], nbytes: Callable[[tuple[str, ...]], float]) -> tuple[float, ...]:
    """Of collectives that run one after the other in the background (runtime.moves.Chain): the bytes of what each but
    the last brings, with the copies in which the next one takes or gives it."""
    return tuple(
        nbytes(step.before) + _parts(step, nbytes(step.before), nbytes(step.after)) * (step.kind != "all_gather")
        for step in steps[1:]
    )


def _parts(step: Step, before: float, after: float) -> float:
    """Copies in which a collective takes or gives what it moves: none where the first dim is cut, the order in
    memory."""
    if step.kind == "all_gather":
        return 0.0 if _leading(step.before[step.axis]) else after
    if step.kind == "reduce_scatter":
        return 0.0 if _leading(step.after[step.axis]) else before
    return before + after if step.kind == "all_to_all" else 0.0


def _staged(step: Step, before: float, after: float) -> float:
    """The same with gloo's own copies: one that it gathers into, which is gone before parts are put in order; and the
    one that it sums in, beside parts."""
    if step.kind == "all_gather":
        return after
    return _parts(step, before, after) + before * (step.kind == "reduce_scatter")


def _leading(entry: str) -> bool:
    return dim_of(entry) == 0 and len(sections_of(entry)) == 1
