"""Ties: operands of operators that jump or have a kink, at the jump. Where a policy still equals its reference, both
log-probabilities are equal but for rounding, which decides which of them is the larger one, or the sign of their
difference. Two right programs differ there, by more than rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar.problem.graph import op_name
from autopar.verify.compare import scale
from passes.interpret import Interpret

aten = torch.ops.aten


def _apart(a: Any, b: Any = 0.0, *_: Any) -> Tensor:
    return a - b


def _between(a: Tensor, low: Any = None, high: Any = None) -> Tensor:
    ends = [end for end in (low, high) if end is not None]
    return torch.stack([(a - end).abs() for end in ends]).amin(0) if ends else torch.ones_like(a)


def _whole(a: Tensor) -> Tensor:
    return a - a.round()


def _half(a: Tensor) -> Tensor:
    return a - a.floor() - 0.5


JUMPS: dict[Any, Callable[..., Tensor]] = {
    **{
        getattr(getattr(aten, name), overload): _apart
        for name in ("eq", "ge", "gt", "le", "lt", "ne")
        for overload in ("Scalar", "Tensor")
    },
    **dict.fromkeys((aten.maximum.default, aten.minimum.default), _apart),
    **dict.fromkeys((aten.abs.default, aten.relu.default, aten.sign.default), lambda a: a),
    **dict.fromkeys((aten.clamp.default, aten.clamp_min.default), _between),
    aten.clamp_max.default: _apart,
    **dict.fromkeys((aten.ceil.default, aten.floor.default), _whole),
    aten.round.default: _half,
}
"""Operator -> how far its operands are from where it jumps or has a kink, element by element."""

SAID = (
    ": {} elements of what {} reads are at its jump but for rounding (as where a policy still equals its reference): "
    "with another rounding another result may be as right. Verify with weights or a batch without ties"
)


class _Ties(Interpret):
    """Interprets a graph, and counts in `ties` the elements of a tie by `node` (`scope/node` in a block)."""

    def __init__(
        self, gm: fx.GraphModule, weights: Mapping[str, Tensor], tolerance: float, scope: str, ties: dict[str, int]
    ) -> None:
        super().__init__(gm, weights)
        self.tolerance, self.scope, self.ties = tolerance, scope, ties

    def body(self, body: fx.GraphModule, name: str) -> Interpret:
        return _Ties(body, self.weights, self.tolerance, name, self.ties)

    def run_node(self, node: fx.Node) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(node)
        if node.target in JUMPS and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            near = JUMPS[node.target](*args).abs() <= self.tolerance * scale(args[0])
            self.ties[op_name(node, self.scope)] = self.ties.get(op_name(node, self.scope), 0) + int(near.sum())
        return super().run_node(node)


@torch.no_grad()
def ties(
    gm: fx.GraphModule, weights: Mapping[str, Tensor], batch: Mapping[str, Tensor], tolerance: float
) -> dict[str, int]:
    """Operator that jumps -> how many elements of its operands are at the jump but for rounding (`tolerance`, relative
    to the largest of them), in a forward on one device."""
    found: dict[str, int] = {}
    _Ties(gm, weights, tolerance, "", found).run_named(batch)
    return {name: count for name, count in found.items() if count}


def explained(first: str, gm: fx.GraphModule, found: Mapping[str, int]) -> str:
    """What is said of the node that differs `first` ("node (value)" or "node (gradient)"), where it, or what reads it,
    is one of the operators with ties that were `found`; else nothing."""
    name = first.partition(" ")[0].partition(":")[0]
    scope, _, own = name.rpartition("/")
    node = next(node for node in gm.get_submodule(scope).graph.nodes if node.name == own)  # type: ignore[union-attr]
    near = [op_name(each, scope) for each in (node, *node.users)]
    return next((SAID.format(found[each], each) for each in near if each in found), "")
