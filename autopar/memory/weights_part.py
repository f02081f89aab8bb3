"""Gradients of weights where a backward has an action of its own for them (runtime.stages.OwnStage). Used by
memory.backward.

torch's `stage_backward_weight` goes over the operators of a stage one by one: it adds the gradients that one makes to
those of the microbatches before, and frees them only when the next operator has made its own. Gradients that rest in a
wider dtype are cast when those of all operators are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(eq=False)
class WeightsPart:
    """The gradients that the operators of one stage make for one microbatch, in bytes.

    counts      scope of a run of blocks -> how many instances the stage has; 1 for operators outside of blocks
    made        (operator, scope) -> the gradient that it makes of each parameter
    narrow      parameter -> its gradients in the dtype of the computation, where they rest in a wider one
    wide        the largest of these gradients in the wider dtype
    """

    counts: Mapping[str, int]
    made: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    narrow: dict[str, float] = field(default_factory=dict)
    wide: float = 0.0

    def add(self, operator: tuple[str, str], parameter: str, nbytes: float, wider: float) -> None:
        """Note that an operator makes a gradient of `nbytes` of a parameter, which takes `wider` times as many bytes at
        rest. Noting it again changes nothing."""
        self.made.setdefault(operator, {})[parameter] = nbytes
        if wider > 1:
            self.narrow[parameter] = nbytes * self.counts.get(operator[1], 1)
            self.wide = max(self.wide, nbytes * wider)

    def bytes_beside(self, kept_bytes: float) -> float:
        """The most bytes that the action for weights allocates. Either the gradients of two operators in a row exist
        (counted are the two largest); or, when they are cast, all gradients in the narrow dtype and the largest in the
        wider one, while the `kept_bytes` that the action has read are freed already."""
        each = sorted(
            sum(gradients.values())
            for (_, scope), gradients in self.made.items()
            for _ in range(min(self.counts.get(scope, 1), 2))
        )
        return max(sum(each[-2:]), sum(self.narrow.values()) + self.wide - kept_bytes)
