"""Roles that cut the sequence everywhere: long contexts on few samples. They differ in what attention does.

    context   keys and values go round the ring (or stay whole where an attention has no ring: cross-attention)
    ulysses   all-to-all from rows to heads around the attention, which then sees all rows
              (https://arxiv.org/abs/2309.14509)

Every rank uses whole weights and their gradients are summed over the axis, as in data parallelism; they rest whole or,
where memory is short, cut (ZeRO-3).
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.problem.at_rest import is_gathered
from autopar.problem.clusters import Allow
from autopar.problem.graph import ATTENTION, Op, Program
from autopar.recipes.kinds import ATTRIBUTE, PARAMETER, PARTIAL, REPLICATE, cuts_sequence, kind
from autopar.rules import options_for
from autopar.rules.language import Option

Wish = Callable[[Op, Option], bool]


def context(ways: int) -> Allow:
    """Context parallel: the sequence is cut everywhere, attention by the ring."""
    return _wishes(ways, _ring, cuts_sequence)


def ulysses(ways: int) -> Allow:
    """The sequence is cut everywhere but in attention and the views around it, where heads are."""
    return _wishes(ways, _heads, _rows_or_heads)


def attends(program: Program) -> bool:
    """Whether some attention has rows of a sequence whose length may vary."""
    ops = [op for op in program.ops.values() if op.target is ATTENTION]
    return any(not isinstance(op.call.ins[0].shape[-2], int) for op in ops)


def _wishes(ways: int, *wishes: Wish) -> Allow:
    """Each operator does what the first wish says that it can fulfil; what it cannot cut it computes whole."""
    chosen: dict[Op, Wish] = {}

    def choose(op: Op) -> Wish:
        if op.role == "port":
            return cuts_sequence if _has_sequence(op, ways) else _still
        options = options_for(op.call, ways, rules=op.rules)
        return next((wish for wish in wishes if any(wish(op, option) for option in options)), _still)

    def allow(op: Op, option: Option) -> bool:
        if op.role == "input":
            return not option.split
        if op.role not in ("op", "port"):
            return op.role != "param" or not is_gathered(option)
        if op not in chosen:
            chosen[op] = choose(op)
        return chosen[op](op, option)

    return allow


def _has_sequence(op: Op, ways: int) -> bool:
    tensor = op.call.outs[0]
    return any(
        not isinstance(n, int) and d not in op.batch[0] and tensor.sizes[d] % ways == 0
        for d, n in enumerate(tensor.shape)
    )


def _still(op: Op, option: Option) -> bool:
    return kind(op, option) in (REPLICATE, PARTIAL)


def _ring(op: Op, option: Option) -> bool:
    return option.run == "ring"


def _rows_or_heads(op: Op, option: Option) -> bool:
    contraction = any(weight and len(t.shape) > 1 for weight, t in zip(op.weight, op.call.ins, strict=True))
    if not option.split and not any(op.batch):
        return True  # tables of positions (cos, sin) meet whole rows around attention, cut ones elsewhere
    return cuts_sequence(op, option) or (kind(op, option) in (ATTRIBUTE, PARAMETER) and not contraction)


def _heads(op: Op, option: Option) -> bool:
    attention = op.target is ATTENTION
    return (
        attention
        and kind(op, option) == ATTRIBUTE
        and not cuts_sequence(op, option)
        and option.ins[0].value == option.outs[0].value != "R"
    )
