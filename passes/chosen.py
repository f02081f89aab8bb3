"""Facts about the expert indices that tokens choose: whether they are distinct for each token, and within the number of
experts. Used by expert_loops and sorted_rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten

DISTINCT = (aten.topk.default, aten.sort.default)
"""Operators whose second result has no index twice in a row."""
PARTS = (aten.reshape.default, aten.slice.Tensor, aten.select.int)
"""Operators whose result has no other numbers than their operand."""


def distinct(chosen: Any) -> bool:
    """Whether in `chosen [..., k]` no row has a number twice."""
    return not _of_many(chosen) and edit.call_of(_ranked(chosen), *DISTINCT) is not None


def in_range(chosen: Any, count: int) -> bool:
    """Whether all elements of `chosen` are known to be in range(count)."""
    ranked = _ranked(chosen)
    numbers = None if ranked is None else facts.shape(ranked.args[0])[edit.args_of(ranked)["dim"]]  # type: ignore[arg-type]
    return isinstance(numbers, int) and numbers <= count


def _of_many(chosen: Any) -> bool:
    """Whether the last dim of `chosen` is one of tokens, because one of the choices of each was selected."""
    part: Any = chosen
    while (seen := edit.call_of(part, *PARTS)) is not None:
        part = seen.args[0]
        if seen.target is aten.select.int and seen.args[1] in (-1, facts.rank(part) - 1):
            return True
    return False


def _ranked(chosen: Any) -> fx.Node | None:
    """The operator (topk, sort, argmax, ...) that ranks all experts for each token and of whose result `chosen` is a
    part; None where it comes from something else."""
    part: Any = chosen
    while (seen := edit.call_of(part, *PARTS)) is not None:
        if seen.target is aten.reshape.default and _last_size(seen) != _last_size(seen.args[0]):
            break
        part = seen.args[0]
    best = edit.call_of(part, aten.argmax.default) or edit.call_of(edit.part_of(part, 1), aten.max.dim)
    if best is not None:
        return best if edit.args_of(best)["dim"] is not None else None
    ranked = edit.call_of(edit.part_of(part, 1), *DISTINCT)
    return ranked if ranked is not None and edit.args_of(ranked)["dim"] in (-1, facts.rank(part) - 1) else None


def _last_size(node: Any) -> facts.Size:
    """The size of the last dim."""
    return facts.shape(node)[-1]
