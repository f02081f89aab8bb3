"""Samples: arguments for every row of the rule table, written as `T(...)` for tensors and filled with seeded
numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class T:
    """A random tensor. `kind`: "f" normal, "p" positive, "u" inside (-1, 1), "c" normal without gradient, "b" booleans,
    "z" complex, "i7" integers below 7, "k7" all 7, "sig" inside (0, 1), "g" above 1.5, "perm4" a different permutation
    of 0 ... 3 along dim 0, "s" sorted along the last dim, "t" 0 or 1 as floats, "d" symmetric positive definite
    matrices, "n2" booleans of which 2 in each row are true."""

    shape: tuple[int, ...]
    kind: str = "f"


def f(*shape: int) -> T:
    """A float operand."""
    return T(shape)


def i(below: int, *shape: int) -> T:
    """An integer operand."""
    return T(shape, f"i{below}")


@dataclass(frozen=True)
class Case:
    """One call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def case(*args: Any, **kwargs: Any) -> Case:
    return Case(args, kwargs)


Samples = Mapping[Any, Sequence[Case]]


def reseed() -> None:
    """Begin the CPU's random numbers anew. torch.manual_seed does so for each kind of accelerator too, and notes the
    stack for each: for small operators that takes as long as they do."""
    torch.default_generator.manual_seed(0)


def fill(tree: Any) -> Any:
    """Tensors for every `T`."""
    return pytree.tree_map_only(T, _tensor, tree, is_leaf=lambda leaf: isinstance(leaf, T))


def _tensor(wanted: T) -> torch.Tensor:
    shape, kind = wanted.shape, wanted.kind
    if kind == "b":
        return torch.rand(shape) > 0.5
    if kind[0] == "n":
        return torch.rand(shape).argsort(-1) < int(kind[1:])
    if kind[0] == "i":
        return torch.randint(0, int(kind[1:]), shape)
    if kind[0] == "k":
        return torch.full(shape, int(kind[1:]))
    if kind.startswith("perm"):
        return torch.rand(int(kind[4:]), *shape[1:]).argsort(0)[: shape[0]]
    if kind == "c":
        return torch.randn(shape, dtype=torch.float64)
    if kind == "s":
        return torch.randn(shape, dtype=torch.float64).sort(-1).values
    if kind == "t":
        return (torch.rand(shape) > 0.5).double()
    if kind == "z":
        return torch.randn(shape, dtype=torch.complex128).requires_grad_()
    data = torch.randn(shape, dtype=torch.float64)
    if kind == "d":
        return (data @ data.mT + torch.eye(shape[-1], dtype=torch.float64)).requires_grad_()
    data = {"f": data, "p": data.abs() + 0.5, "u": data.tanh() * 0.9, "g": data.abs() + 1.5, "sig": data.sigmoid()}[
        kind
    ]
    return data.requires_grad_()
