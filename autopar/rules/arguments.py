"""Helpers of the functions that write rules: the arguments of a call by name, and the words of a rule string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from autopar.rules.language import Call, Tensor
from passes.operand_order import BIASED

Spec = Callable[[Call], str]


def given(call: Call) -> dict[str, Any]:
    """All arguments of a call of an ATen overload by name, with defaults filled in."""
    found: dict[str, Any] = {}
    for index, argument in enumerate(call.target._schema.arguments):
        if index < len(call.args):
            found[argument.name] = call.args[index]
        else:
            found[argument.name] = call.kwargs.get(argument.name, argument.default_value)
    return found


def bias_of(call: Call) -> Tensor | None:
    """The bias of a product with a weight; None where it has none."""
    return call.ins[2] if call.target in BIASED and len(call.ins) == 3 else None


def overloads(names: str) -> list[Any]:
    """All functional overloads of the ATen operators in `names` whose operands and results are tensors; names that this
    version of torch lacks are left out."""
    found = []
    for name in names.split():
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            target = getattr(packet, overload)
            if not target._schema.is_mutable and _on_tensors(target):
                found.append(target)
    return found


def named(names: str) -> list[Any]:
    """The ATen overloads in `names` ("amax.default any.dim"); those that this version of torch lacks are left out."""
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
    """One word per dim: `d0 d1 ...`, except for the dims in `special`."""
    return [(special or {}).get(i, f"d{i}") for i in range(rank)]


def line(rank: int, special: dict[int, str] | None = None) -> str:
    """The `words` of one operand, joined by blanks."""
    return " ".join(words(rank, special))


def rule(ins: Iterable[str], outs: Iterable[str]) -> str:
    """A rule string, of the texts of its operands and outputs."""
    return f"{', '.join(ins)} -> {', '.join(outs)}"


def rank_of(call: Call) -> int:
    """The number of dims of the first operand."""
    return len(call.ins[0].shape)


def dims(value: Any, rank: int) -> list[int]:
    """The argument `dim` or `dims` as a list of non-negative numbers; None and the empty list stand for all dims."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return list(range(rank))
    listed: Sequence[int] = value if isinstance(value, (list, tuple)) else [value]
    return [d % rank for d in listed] if rank else []


def replicated(call: Call) -> str:
    """The rule of an operator that cannot be split: all factors are whole."""
    count = len(call.ins)
    parts = [
        line(len(t.shape), {d: f"x{i}n{d}!" for d in range(len(t.shape))})
        for i, t in enumerate((*call.ins, *call.outs))
    ]
    return rule(parts[:count], parts[count:])
