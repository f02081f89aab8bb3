"""What running the blocks of a run again takes, operator by operator, when some of their results are kept.

A block's forward is run again as far as the last operator that saves something for the backward, on every rank. Of the
operators up to there:

    again     run again: something needs their results, or what they themselves save for the backward
    kept      their results are stored, in the layouts in which their readers take them
    skipped   nobody needs their results again, because what comes of them is kept or comes after the last one

An operator that is split by an algorithm of the runtime is neither kept nor skipped: the algorithm makes of the
operands what autograd saves (a convolution's rows with the borders of other ranks), and its communication is part of
what runs. Operators pass through autograd whether or not they are run, so the operands that they save are needed again
in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from autopar.errors import PlanError
from autopar.problem.graph import Op, Program
from autopar.problem.view_ops import makes_view
from autopar.rules import RULES
from autopar.rules.arguments import given
from autopar.rules.experts import INSIDE
from passes import ops
from passes.operand_order import ORDERED
from passes.saved import SAVED

aten = torch.ops.aten
KEEPABLE = (
    aten.addmm.default,
    aten.bmm.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
    aten.scaled_dot_product_attention.default,
    ops.affine,
)
"""Operators whose results can be kept although several readers or their own backward need them: one kernel makes all of
them."""

SOMETIMES_VIEWS = (aten.contiguous.default, aten.reshape.default, ops.as_complex)
"""Operators that copy or look, as it comes: what copies in the whole may be a view of the shard of a rank, with one
head left of several. Stored views would hold what they look at, so that views run again, and would look at what is not
there."""


@dataclass(frozen=True)
class Rerun:
    """The operators of one scope by what becomes of them; `reads` are the (operator, operand) whose values are needed
    again. `order` has the position of every op, `last` is that of the last one that saves something, -1 where none
    does."""

    again: Mapping[str, None]
    kept: Mapping[str, None]
    skipped: Mapping[str, None]
    reads: Mapping[tuple[str, int], None]
    order: Mapping[str, int]
    last: int

    def reached(self, name: str) -> bool:
        """Whether the second run comes to an operator: it ends with the last one that saves something."""
        return self.order[name] <= self.last

    def stops_before(self, name: str) -> bool:
        """Whether a second forward that ends as soon as everything is saved (torch.utils.checkpoint without reentrance)
        ends before this operator. An operator that saves operands alone saves them before its kernel starts, so that
        the last one to save anything does not run then."""
        return not self.reached(name) or (self.order[name] == self.last and name in self.skipped)


def rerun(program: Program, scope: str, kept: Collection[str], split: Collection[str] = ()) -> Rerun:
    """What becomes of the operators of `scope` where the results of `kept` are kept; those of `split` have
    algorithms."""
    ops = [op for op in program.ops.values() if op.scope == scope]
    order = {op.name: i for i, op in enumerate(ops)}
    last = max((order[op.name] for op in ops if op.role == "op" and _saves(op)), default=-1)
    always = dict.fromkeys(split)
    named = {name: None for name in kept if name not in always}
    reads: dict[tuple[str, int], None] = {}
    needed: dict[str, None] = {}
    again: dict[str, None] = {}
    found: dict[str, None] = {}
    skipped: dict[str, None] = {}
    for op in reversed(ops):
        if op.role != "op" or order[op.name] > last:
            continue
        needs_run = op.name in needed or op.name in always or saves_results(op)
        runs = needs_run and op.name not in named
        if needs_run and not runs:
            found[op.name] = None
        elif runs:
            again[op.name] = None
        else:
            skipped[op.name] = None
        for index, (name, _) in enumerate(op.operands):
            if runs or index in op.read_back:
                reads[op.name, index] = None
                needed[name] = None
    return Rerun(again, found, skipped, reads, order, last)


def _saves(op: Op) -> bool:
    """Whether autograd saves anything of `op`."""
    return bool(op.read_back) or saves_results(op)


def saves_results(op: Op) -> bool:
    """Whether the backward of `op` needs what running it gives: results, statistics, masks, copies of operands; but not
    those that are made in front of the kernel, as where it is skipped (runtime.replay)."""
    own = any(index >= len(op.operands) for index in op.saves)
    return (
        own
        or _untried(op)
        or bool(op.extra_bytes or (op.copies and op.target not in ORDERED))
        or (op.target in INSIDE and op.graded)
    )


def _untried(op: Op) -> bool:
    """Whether nobody knows what the backward of `op` keeps: an operator of the user's, or one of torch that no table
    has."""
    return op.graded and op.target not in RULES and op.target not in SAVED


def keepable(op: Op) -> bool:
    """Whether the results of `op` can be kept: it computes something, in one kernel if its backward needs what comes of
    it."""
    if (
        op.role != "op"
        or makes_view(op)
        or op.target in SOMETIMES_VIEWS
        or op.copies
        or op.target in INSIDE
        or not op.graded
    ):
        return False
    if op.target is aten.scaled_dot_product_attention.default and given(op.call)["dropout_p"]:
        return False  # draws random numbers beside its kernel
    return op.target in KEEPABLE or not saves_results(op)


def heavy(op: Op) -> bool:
    """Whether the work of `op` is worth its memory by common practice: products, convolutions and attention."""
    return keepable(op) and op.target in KEEPABLE


def check(program: Program, remat: Mapping[str, Collection[str]]) -> None:
    """Raises PlanError where a plan's `remat` names a run of blocks or an operator that does not exist, or a result
    that cannot be kept."""
    for scope, kept in remat.items():
        if scope not in program.runs:
            raise PlanError(
                f"remat names {scope!r}, which is no run of blocks; the graph has {', '.join(program.runs) or 'none'}"
            )
        for name in kept:
            op = program.ops.get(name)
            if op is None or op.scope != scope or not keepable(op):
                raise PlanError(
                    f"remat keeps {name!r} of {scope}, which is no operator there whose result can be kept; these are: "
                    f"{', '.join(op.name for op in program.ops.values() if op.scope == scope and keepable(op))}"
                )
