"""One call of an operator on one rank, and formulas of bytes in the sizes of its tensors, by which the tables of
temporary memory are written.

2w+m+3o     w: the largest tensor of the call, m: one byte for each of its elements, o: the result, a, b: the first
            and the second operand"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.problem.graph import Op
from autopar.rules.arguments import given, named


@dataclass(frozen=True, slots=True)
class Local:
    """One call on one rank: bytes of its operands and results, bytes that its backward keeps in addition, and whether
    it runs on a CPU."""

    op: Op
    ins: Sequence[float]
    outs: Sequence[float]
    extra: float = 0.0
    on_cpu: bool = False

    @property
    def out(self) -> float:
        return self.outs[0] if self.outs else 0.0

    @property
    def whole(self) -> tuple[float, int]:
        """Bytes of the largest tensor (of the floating ones, if there are any), and of one of its elements."""
        tensors = list(zip((*self.ins, *self.outs), (*self.op.call.ins, *self.op.call.outs), strict=True))
        return max(
            [(nbytes, each.itemsize) for nbytes, each in tensors if each.floating]
            or [(nbytes, each.itemsize) for nbytes, each in tensors],
            default=(0.0, 1),
        )

    def grad(self, operand: int) -> bool:
        """Whether an operand is there and has a gradient."""
        return operand < len(self.op.call.ins) and self.op.call.ins[operand].grad

    @property
    def grads(self) -> int:
        """How many operands have gradients."""
        return sum(each.grad for each in self.op.call.ins)

    def given(self, name: str) -> Any:
        """An argument of the call."""
        return given(self.op.call)[name]


Bytes = Callable[[Local], float]


def nothing(local: Local) -> float:
    """No bytes."""
    return 0.0


def taken(formula: str) -> Bytes:
    """The bytes of a formula such as `2w+m+3o` (module docstring)."""
    parts = [(float(times or 1), what) for times, what in re.findall(r"([\d.]*)([wmoab])", formula)]

    def nbytes(local: Local) -> float:
        whole, itemsize = local.whole
        sizes = {
            "w": whole,
            "m": whole / itemsize,
            "o": local.out,
            "a": local.ins[0] if local.ins else 0.0,
            "b": local.ins[1] if len(local.ins) > 1 else 0.0,
        }
        return sum(times * sizes[what] for times, what in parts)

    return nbytes


def rows(formulas: Mapping[str, str]) -> dict[Any, Bytes]:
    """Formula -> names of operators, as target -> bytes."""
    return {
        target: taken(formula)
        for formula, names in formulas.items()
        for target in named(" ".join(name if "." in name else f"{name}.default" for name in names.split()))
    }
