"""Recognises products with random factors (stochastic depth, jitter), and replaces each by a call of `ops.noised`.

    x.div(keep) * (keep + torch.rand(b, 1, 1)).floor()
    x * x.new_empty(b, 1, 1).bernoulli_(keep).div_(keep)

Models have them in training only; in evaluation `ops.noised` gives the value without the factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops
from passes.evaluate import UNFILLED, is_random
from passes.switches import SWITCHES

aten = torch.ops.aten

SIZES_READ = (
    aten.empty_like.default,
    aten.full_like.default,
    aten.ones_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.zeros_like.default,
)
"""Operators that read only the sizes of their operand."""
VALUE, PLAIN, DRAWN = range(3)
"""Kinds of values: computed from weights or inputs; from numbers alone; from numbers and random draws."""


def kind_of(read: Iterable[int], *, drawn: bool) -> int:
    """The kind of a value that is computed from values of the kinds `read`; `drawn`: by a random operator."""
    kinds = list(read)
    return VALUE if VALUE in kinds else max([PLAIN, *kinds, *([DRAWN] if drawn else [])])


def noises(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops; `gm.meta["noises"]`, the number of random factors that the model has only in training, if
           it has any.
    does: replaces each product of a value and a random factor by one call.
    gives: `ops.noised`, if as many products are found as `gm.meta["noises"]` says, else no change. `gm.meta["noises"]`
           is then the number of these calls."""
    wanted = gm.meta.pop("noises", 0)
    if not wanted:
        return gm
    kinds: dict[fx.Node, int] = {}
    found = [(node, pair) for node in gm.graph.nodes if (pair := _factors(node, kinds)) is not None]
    if len(found) == wanted:
        for node, (x, noise) in found:
            keep, source = _share(x)
            with edit.before(node):
                edit.replace(node, edit.call(node, ops.noised, source, noise, keep))
        gm.meta["noises"] = wanted
    return edit.finish(gm)


def _factors(node: fx.Node, kinds: dict[fx.Node, int]) -> tuple[fx.Node, fx.Node] | None:
    """The value and the random factor where `node` is their product and shaped as the value; records the kind of
    `node`."""
    kinds[node] = _kind(node, kinds)
    operands = edit.tensor_operands(node) if node.target is aten.mul.Tensor else []
    if len(operands) != 2 or sorted(kinds[x] for x in operands) != [VALUE, DRAWN]:
        return None
    x, noise = sorted(operands, key=kinds.__getitem__)
    return (x, noise) if facts.kind(x) == facts.kind(node) else None


def _kind(node: fx.Node, kinds: dict[fx.Node, int]) -> int:
    """The kind (VALUE, PLAIN or DRAWN) of what `node` gives."""
    if node.op != "call_function":
        return VALUE
    if not facts.tensors(node):
        return PLAIN
    read = (kinds[x] for x in node.all_input_nodes if node.target not in SIZES_READ and facts.tensors(x))
    return kind_of(read, drawn=is_random(node) and node.target not in (*SWITCHES, *UNFILLED))


def _share(x: fx.Node) -> tuple[Any, fx.Node]:
    """(divisor, dividend) where `x` is a tensor divided by a number; else (1, `x`)."""
    if (
        x.target is aten.div.Tensor
        and isinstance(x.args[1], (int, float))
        and isinstance(x.args[0], fx.Node)
        and facts.dtype(x.args[0]) == facts.dtype(x)
    ):
        return x.args[1], x.args[0]
    return 1.0, x
