"""ATen calls as readable Python.

A writer gets the argument texts of one call and gives an expression; ops without a row are written as
`torch.ops.aten.<op>.<overload>(...)`. Ops whose arguments are sizes get the local sizes instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from autopar._torch import OpOverload
from passes import ops

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Written:
    """One call, ready to be written: argument texts, and the local sizes of each output as texts."""

    args: tuple[str, ...]
    kwargs: dict[str, str]
    raw: tuple[Any, ...]  # the arguments themselves, where a writer must look at a value
    outs: tuple[tuple[str, ...], ...]

    def rest(self, start: int) -> str:
        """The remaining arguments, with a leading comma when there are any."""
        parts = [*self.args[start:], *(f"{k}={v}" for k, v in self.kwargs.items())]
        return "".join(f", {p}" for p in parts)


Writer = Callable[[Written], str]


def _infix(symbol: str) -> Writer:
    def write(call: Written) -> str:
        if call.kwargs or len(call.args) > 2:
            raise ValueError(f"no infix form of {call}")
        return f"{call.args[0]} {symbol} {call.args[1]}"

    return write


def _method(name: str) -> Writer:
    return lambda call: f"{call.args[0]}.{name}({call.rest(1)[2:]})"


def _function(name: str) -> Writer:
    return lambda call: f"{name}({call.args[0]}{call.rest(1)})"


def _sized(name: str) -> Writer:
    """A method whose arguments are the local sizes of the output."""
    return lambda call: f"{call.args[0]}.{name}({', '.join(call.outs[0]) or '()'})"


def _split(call: Written) -> str:
    dim = call.raw[2] if len(call.raw) > 2 else 0
    sizes = ", ".join(out[dim] for out in call.outs)
    return f"{call.args[0]}.split(({sizes},), dim={dim})"


def _cast(call: Written) -> str:
    return f"{call.args[0]}.to({call.args[1]})"


def _softmax(name: str) -> Writer:
    def write(call: Written) -> str:
        dtype = f", dtype={call.args[2]}" if len(call.args) > 2 and call.raw[2] is not None else ""
        return f"F.{name}({call.args[0]}, dim={call.args[1]}{dtype})"

    return write


def _attention(call: Written) -> str:
    names = ("attn_mask", "dropout_p", "is_causal")
    plain = {"attn_mask": "None", "dropout_p": "0.0", "is_causal": "False"}
    named = dict(zip(names, call.args[3:], strict=False)) | call.kwargs
    kept = [f"{k}={v}" for k, v in named.items() if plain.get(k) != v]
    return f"F.scaled_dot_product_attention({', '.join([*call.args[:3], *kept])})"


def _embedding(call: Written) -> str:
    padding = call.raw[2] if len(call.raw) > 2 else call.kwargs.get("padding_idx", -1)
    scaled = call.raw[3] if len(call.raw) > 3 else call.kwargs.get("scale_grad_by_freq")
    named = f", padding_idx={padding}" if int(padding) >= 0 else ""
    named += ", scale_grad_by_freq=True" if scaled in (True, "True") else ""
    return f"F.embedding({call.args[1]}, {call.args[0]}{named})"


def _layer_norm(call: Written) -> str:
    return f"F.layer_norm({', '.join(call.args[:5])})"


def _select(call: Written) -> str:
    return f"{call.args[0]}.select({call.args[1]}, {call.args[2]})"


def _slice(call: Written) -> str:
    dim = call.raw[1] if len(call.raw) > 1 else 0
    start = call.args[2] if len(call.args) > 2 and call.raw[2] not in (None, 0) else ""
    stop = call.args[3] if len(call.args) > 3 and call.raw[3] not in (None, 2**63 - 1) else ""
    step = f":{call.args[4]}" if len(call.args) > 4 and call.raw[4] != 1 else ""
    if not isinstance(dim, int) or dim < 0:
        dim = len(call.outs[0]) + int(dim)
    return f"{call.args[0]}[{':, ' * dim}{start}:{stop}{step}]"


_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "remainder": "%",
    "floor_divide": "//",
    "pow": "**",
}
_OVERLOADS = {"pow": ("Tensor_Scalar", "Tensor_Tensor"), "floor_divide": ("default", "Scalar")}

EXPRESSIONS: dict[Any, Writer] = {
    aten.cat.default: _function("torch.cat"),
    aten.detach.default: _method("detach"),
    aten.embedding.default: lambda call: _embedding(call),
    aten.expand.default: _sized("expand"),
    aten.gelu.default: _function("F.gelu"),
    aten.layer_norm.default: _layer_norm,
    aten.linear.default: _function("F.linear"),
    aten.log_softmax.int: _softmax("log_softmax"),
    aten.matmul.default: _infix("@"),
    aten.neg.default: lambda call: f"-{call.args[0]}",
    aten.permute.default: _method("permute"),
    aten.relu.default: _function("F.relu"),
    aten.reshape.default: _sized("reshape"),
    aten.rms_norm.default: _function("F.rms_norm"),
    aten.rsqrt.default: _function("torch.rsqrt"),
    aten.scaled_dot_product_attention.default: _attention,
    aten.select.int: _select,
    aten.silu.default: _function("F.silu"),
    aten.slice.Tensor: _slice,
    aten.softmax.int: _softmax("softmax"),
    aten.split_with_sizes.default: _split,
    aten.sum.dim_IntList: _method("sum"),
    aten.tanh.default: _function("torch.tanh"),
    aten.to.dtype: _cast,
    aten.transpose.int: _method("transpose"),
    aten.unsqueeze.default: _method("unsqueeze"),
    ops.affine: lambda call: f"F.linear({call.args[0]}, {call.args[1]}.t(), {call.args[2]})",
}
for _name, _symbol in _INFIX.items():
    for _overload in _OVERLOADS.get(_name, ("Tensor", "Scalar")):
        if hasattr(getattr(aten, _name), _overload):
            EXPRESSIONS[getattr(getattr(aten, _name), _overload)] = _infix(_symbol)


def write(target: Any, call: Written) -> str:
    """One call as an expression; factory functions get the device of the mesh."""
    writer = EXPRESSIONS.get(target)
    if writer is not None and not (call.kwargs and _is_infix(target)):
        return writer(call)
    named = call.kwargs | ({"device": "MESH.device_type"} if _makes(target) else {})
    return f"{qualified(target)}({', '.join([*call.args, *(f'{k}={v}' for k, v in named.items())])})"


def _makes(target: Any) -> bool:
    """Whether an operator is a factory function: it has a device argument and no tensor arguments (arange, full, eye,
    rand)."""
    if not isinstance(target, OpOverload):
        return False
    arguments = target._schema.arguments
    return any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments)


def _is_infix(target: Any) -> bool:
    return str(target).split(".")[1] in _INFIX


def qualified(target: Any) -> str:
    """How an emitted file names a target: an ATen overload or a plain function."""
    if isinstance(target, OpOverload):
        namespace, name = target._schema.name.split("::")
        return f"torch.ops.{namespace}.{name}.{target._overloadname}"
    return str(target.__name__)


def tuple_text(items: Sequence[str]) -> str:
    """A tuple of `items`, which are source, as source."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def literal(item: Any) -> str:
    """A plain value as source: an argument of an operator or of the model. A member of an enum and a float of numpy are
    the number, or the text, that they are. Raises TypeError for symbolic sizes and tensors."""
    if isinstance(item, (torch.dtype, torch.memory_format, torch.layout)):
        return str(item)
    if isinstance(item, complex):  # as an expression `-0j` is another number
        return f'complex("{item}")'
    if isinstance(item, float) and not math.isfinite(item):
        return f'float("{item}")'
    if isinstance(item, (torch.SymInt, sympy.Expr, torch.Tensor)):
        raise TypeError(f"argument {item!r} has no source form")
    kind: Any = next((kind for kind in (bool, int, float, str) if isinstance(item, kind)), type(item))
    return str(kind.__repr__(item))
