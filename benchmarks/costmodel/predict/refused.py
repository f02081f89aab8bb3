"""Checks that a model can be split as a configuration asks: an axis that splits nothing of what its role is for would
make each of its ranks compute the whole. Called by predict.layouts."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.problem.build import Decisions
from autopar.problem.graph import Op, Program
from autopar.recipes.kinds import REPLICATE, SAMPLE, kind
from benchmarks.costmodel.predict.axes import Axis, in_attention
from passes import ops

WANTED = {
    "tp": "a number of ranks that divides the heads of attention, those of keys and values too",
    "cp": "a number of ranks that divides the sequence",
    "ep": "a number of ranks that divides the experts",
}
"""What each axis wants of the sizes of a model."""


def check_cut(program: Program, decisions: Decisions, used: Sequence[Axis]) -> None:
    """Raises PlanError where attention is whole on tensor-parallel or context-parallel ranks, or experts on those of
    expert parallelism."""
    for op in program.ops.values():
        for axis, option in zip(used, decisions[op.name], strict=True):
            if op.role == "op" and _whole(op, axis.name, kind(op, option)):
                sizes = " and ".join(f"[{', '.join(map(str, tensor.sizes))}]" for tensor in op.call.ins)
                wanted = WANTED["ep" if op.target is ops.experts else axis.name]
                raise PlanError(
                    f"setup: {axis.name} over {axis.ways} ranks, each of which would compute {op.name} of {sizes} "
                    f"whole; wanted {wanted}"
                )


def _whole(op: Op, axis: str, how: str) -> bool:
    if op.target is ops.experts:
        return axis != "" and how in (REPLICATE, SAMPLE)
    return axis in ("cp", "tp") and in_attention(op) and how == REPLICATE
