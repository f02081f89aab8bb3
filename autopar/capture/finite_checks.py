"""Checks whether values are finite, while a model runs without values: they are answered as if all values were finite.
Used by value_checks.

    # transformers' DETR and what is made of it
    if not torch.isfinite(hidden).all(): hidden = torch.clamp(hidden, -most, most)
    if torch.isnan(loss): ...

A graph has one branch; the one of finite values is right for every run without overflow. Not answered in float16, where
models clamp values beyond 65504 in ordinary steps, nor of what an infinite number was just written into (scores with
-inf where a mask hides).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.capture.by_tensor import UntilChanged
from autopar.capture.devices import changed

ANSWERS = {"isfinite": True, "isinf": False, "isnan": False, "isneginf": False, "isposinf": False}
"""Function -> its result in all elements where all values are finite."""
REDUCED = {True: "all", False: "any"}
"""Value in all elements -> the reduction that preserves it for any number of elements, none included."""
NEGATED = ("bitwise_not", "invert", "logical_not")
BOTH = ("and", "bitwise_and", "bitwise_or", "logical_and", "logical_or", "or")
"""Functions of two tensors that give the common value of both where these have one value in all elements."""


class Finite(TorchFunctionMode):
    """Remembers which tensors are true, or false, everywhere where values are finite."""

    def __init__(self) -> None:
        super().__init__()
        self._known = UntilChanged[bool]()
        self._infinite = UntilChanged[bool]()  # true: some elements may have been given a number that is not finite

    def of(self, tensor: Tensor) -> bool | None:
        """The value that `tensor` has in all elements (True or False); None where it is not derived from such a
        check."""
        return self._known.get(tensor)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if args and isinstance(args[0], Tensor):
            name = getattr(func, "__name__", "").strip("_")
            answer = self._answer(name, args) if isinstance(result, Tensor) else None
            for tensor in changed(func, args, kwargs):
                self._known.forget(tensor)
                self._infinite.forget(tensor)
            if answer is not None:
                self._known.keep(result, answer)
        if any(isinstance(item, float) and not math.isfinite(item) for item in (*args, *kwargs.values())):
            for tensor in (result, *changed(func, args, kwargs)):
                if isinstance(tensor, Tensor):
                    self._infinite.keep(tensor, True)
        return result

    def _answer(self, name: str, args: tuple[Any, ...]) -> bool | None:
        first = args[0]
        if name in ANSWERS:
            return None if first.dtype is torch.float16 or self._infinite.get(first) else ANSWERS[name]
        known = self.of(first)
        if known is None:
            return None
        if name in BOTH:
            return known if isinstance(args[1], Tensor) and self.of(args[1]) is known else None
        return known if name == REDUCED[known] else not known if name in NEGATED else None
