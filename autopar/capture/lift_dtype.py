"""All floating computation of a captured graph in one dtype. Called by verify.

Casts to float32 are baked into captured graphs (logits, norms), and their rounding would hide errors of 1e-8. A check
in float64 therefore lifts every float dtype: of placeholders, of casts, of factories. Floats that are computed of
integers (`arange(n) + 0.5`) have torch's default dtype: run what is lifted inside of `by_default`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes._torch import OpOverload


def lift(gm: fx.GraphModule, dtype: torch.dtype = torch.float64) -> fx.GraphModule:
    """A copy of `gm` that computes in `dtype` wherever it computed in a floating point dtype."""
    lifted = copy.deepcopy(gm)
    lifted.meta.update(gm.meta)
    for node in edit.nodes(lifted):
        _lift_node(node, dtype)
    for graph in edit.graphs(lifted):
        graph.recompile()
    return lifted


@contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    """A context in which `dtype` is torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _lift_node(node: fx.Node, dtype: torch.dtype) -> None:
    if _of_default_dtype(node):
        node.kwargs = {**node.kwargs, "dtype": dtype}
    node.args = fx.node.map_aggregate(node.args, lambda item: _lift(item, dtype))
    node.kwargs = fx.node.map_aggregate(node.kwargs, lambda item: _lift(item, dtype))
    if "val" in node.meta and facts.tensors(node):
        held = node.meta["val"]
        node.meta["val"] = (
            tuple(_value(v, dtype) for v in held) if isinstance(held, (tuple, list)) else _value(held, dtype)
        )


def _of_default_dtype(node: fx.Node) -> bool:
    """Whether `node` makes floating numbers from sizes and literals alone, in torch's default dtype."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.kwargs.get("dtype") is not None:
        return False
    made = node.meta.get("val")
    takes = any(argument.name == "dtype" and argument.kwarg_only for argument in node.target._schema.arguments)
    return (
        takes
        and isinstance(made, torch.Tensor)
        and made.is_floating_point()
        and not any(map(facts.tensors, node.all_input_nodes))
    )


def lifted(own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype in the lifted graph for a tensor of dtype `own`: `dtype`, or complex numbers with parts of it; integers
    keep theirs."""
    return dtype if own.is_floating_point else dtype.to_complex() if own.is_complex else own


def _lift(item: Any, dtype: torch.dtype) -> Any:
    """A dtype as `lifted`, and a number that `dtype` cannot hold (`torch.finfo(torch.float64).min`, in float32) as the
    nearest one that it can: operators refuse others."""
    if isinstance(item, float) and math.isfinite(item):
        return min(max(item, torch.finfo(dtype).min), torch.finfo(dtype).max)
    return lifted(item, dtype) if isinstance(item, torch.dtype) else item


def _value(value: Any, dtype: torch.dtype) -> Any:
    """A fake tensor of another dtype with the same sizes and strides. A cast would make an expanded tensor contiguous,
    but its strides say whether a reshape copies."""
    if not isinstance(value, torch.Tensor) or (wanted := lifted(value.dtype, dtype)) == value.dtype:
        return value
    return value.new_empty_strided(value.shape, value.stride(), dtype=wanted).requires_grad_(value.requires_grad)
