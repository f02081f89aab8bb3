"""The arguments of a call by name, and words for its dims: what the functions that write rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from autopar.rules.language import Call, Tensor
from passes.operand_order import BIASED

Spec = Callable[[Call], str]


def given(call: Call) -> dict[str, Any]:
    """All arguments of a call of an ATen overload by name, defaults filled in."""
    found: dict[str, Any] = {}
    for index, argument in enumerate(call.target._schema.arguments):
        if index < len(call.args):
            found[argument.name] = call.args[index]
        else:
            found[argument.name] = call.kwargs.get(argument.name, argument.default_value)
    return found


def bias_of(call: Call) -> Tensor | None:
    """What a product with a weight adds to its rows, if it adds any."""
    return call.ins[2] if call.target in BIASED and len(call.ins) == 3 else None


def overloads(names: str) -> list[Any]:
    """Every functional overload of the ATen operators in `names` that takes and gives tensors; names that this torch
    does not have are left out."""
    found = []
    for name in names.split():
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            target = getattr(packet, overload)
            if not target._schema.is_mutable and _on_tensors(target):
                found.append(target)
    return found


def named(names: str) -> list[Any]:
    """The ATen overloads in `names` ("amax.default any.dim"), those that this torch has."""
    found = []
    for name in names.split():
        packet, overload = name.split(".")
        target = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if target is not None:
            found.append(target)
    return found


def _on_tensors(target: Any) -> bool:
    takes = any("Tensor" in str(a.type) for a in target._schema.arguments)
    kinds = [str(r.type) for r in target._schema.returns]
    return takes and bool(kinds) and all(kind == "Tensor" for kind in kinds)


def words(rank: int, special: dict[int, str] | None = None) -> list[str]:
    """A word per dim: `d0 d1 ...`, but those in `special`."""
    return [(special or {}).get(i, f"d{i}") for i in range(rank)]


def line(rank: int, special: dict[int, str] | None = None) -> str:
    """`words` as one operand."""
    return " ".join(words(rank, special))


def rule(ins: Iterable[str], outs: Iterable[str]) -> str:
    """A rule string from its operands."""
    return f"{', '.join(ins)} -> {', '.join(outs)}"


def rank_of(call: Call) -> int:
    """The number of dims of the first operand."""
    return len(call.ins[0].shape)


def dims(value: Any, rank: int) -> list[int]:
    """A dim or dims of an argument, counted from the front; None or an empty list stands for all."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return list(range(rank))
    listed: Sequence[int] = value if isinstance(value, (list, tuple)) else [value]
    return [d % rank for d in listed] if rank else []


def replicated(call: Call) -> str:
    """Nothing can be cut: each rank computes the whole."""
    count = len(call.ins)
    parts = [
        line(len(t.shape), {d: f"x{i}n{d}!" for d in range(len(t.shape))})
        for i, t in enumerate((*call.ins, *call.outs))
    ]
    return rule(parts[:count], parts[count:])
