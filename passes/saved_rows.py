"""Rows of the table of what autograd saves: functions from "which operands require a gradient" to positions among
operands and results. Used by saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

OUT, SECOND, THIRD = -1, -2, -3

Row = Callable[[Sequence[bool]], tuple[int, ...]]


def fixed(*positions: int) -> Row:
    """The same positions whatever gradients are wanted."""
    return lambda grads: positions


def every(grads: Sequence[bool]) -> tuple[int, ...]:
    """All operands."""
    return tuple(range(len(grads)))


def crosswise(grads: Sequence[bool]) -> tuple[int, ...]:
    """A product: for each factor that requires a gradient, the other factor."""
    if len(grads) < 2:
        return ()
    return tuple(position for position, other in ((0, 1), (1, 0)) if grads[other])


def quotient(grads: Sequence[bool]) -> tuple[int, ...]:
    """x / y: y for the gradient of x, both for the gradient of y."""
    if len(grads) < 2:
        return ()
    return (0, 1) if grads[1] else (1,)


def added_product(grads: Sequence[bool]) -> tuple[int, ...]:
    """A product that is added to the first operand: for each factor that requires a gradient, the other factor."""
    return tuple(position + 1 for position in crosswise(grads[1:]))


def graded(grads: Sequence[bool]) -> tuple[int, ...]:
    """The operands that require a gradient."""
    return tuple(position for position, grad in enumerate(grads) if grad)


def last_result(*positions: int) -> Row:
    """The operands that the gradient of the last operand needs."""
    return lambda grads: positions if grads[-1] else ()


def index_operands(grads: Sequence[bool]) -> tuple[int, ...]:
    """All operands but the first."""
    return tuple(range(1, len(grads)))


def put(grads: Sequence[bool]) -> tuple[int, ...]:
    """The indices: the operands between the tensor that is written to and the values."""
    return tuple(range(1, len(grads) - 1))


def attention(grads: Sequence[bool]) -> tuple[int, ...]:
    """Queries, keys, values, the mask if there is one, and the result."""
    return (*range(len(grads)), OUT)


def bags(grads: Sequence[bool]) -> tuple[int, ...]:
    """All operands but the table, which is kept only for the gradient of per-sample weights."""
    return (0, *index_operands(grads)) if any(grads[1:]) else index_operands(grads)


def recurrent(states: int) -> Row:
    """The input, the states and, for one layer, its weights; the first of these, which multiplies the input, only where
    the input has a gradient."""
    return lambda grads: (*range(1 + states), *([1 + states] if grads[0] else []), *range(2 + states, len(grads)))


def cell(states: int) -> Row:
    """For each of the two products: for each factor that has a gradient, the other factor. And the second state, which
    a gate multiplies."""
    along = 2 + states

    def kept(grads: Sequence[bool]) -> tuple[int, ...]:
        factors = ((0, along - 1), (1, along))
        others = [
            position for one, other in factors for position, wants in ((one, other), (other, one)) if grads[wants]
        ]
        return (*others, *range(2, 1 + states))

    return kept
