"""Torch functions with a training flag (dropout, batch norms, randomised leaky ReLU), as models call them.
`passes.switches` has the operators of captured graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Flag:
    """The training argument of a function: its `name` and position (`place`). Where the argument `of` (name, position)
    is 0 or None, the function computes the same in training and evaluation. `drops`: with the flag off, the result is
    the first argument."""

    name: str
    place: int
    of: tuple[str, int] | None = None
    drops: bool = False

    def is_on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the flag of a call is on, so that it computes as in training."""
        needed = True if self.of is None else _given(*self.of, args, kwargs)
        return (
            bool(_given(self.name, self.place, args, kwargs))
            and needed is not None
            and (isinstance(needed, torch.Tensor) or bool(needed))
        )

    def without(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call without the flag."""
        return (*args[: self.place], *args[self.place + 1 :]), {
            name: value for name, value in kwargs.items() if name != self.name
        }

    def off(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with the flag off."""
        if self.place < len(args):
            return (*args[: self.place], type(args[self.place])(), *args[self.place + 1 :]), dict(kwargs)
        return args, {**kwargs, self.name: type(kwargs.get(self.name, False))()}


_P, _SHARE = ("p", 1), ("dropout", 5)
FLAGS = {
    "batch_norm": Flag("training", 5, ("running_mean", 1)),
    "multi_head_attention_forward": Flag("training", 13, ("dropout_p", 10)),
    "rrelu": Flag("training", 3),
    "scaled_dot_product_attention": Flag("dropout_p", 4),
    **dict.fromkeys(
        ("alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"),
        Flag("training", 2, _P, drops=True),
    ),
    **dict.fromkeys(
        ("alpha_dropout_", "dropout_", "feature_alpha_dropout_", "feature_dropout", "feature_dropout_"),
        Flag("train", 2, _P, drops=True),
    ),
    **dict.fromkeys(("gru", "lstm", "rnn_relu", "rnn_tanh"), Flag("train", 6, _SHARE)),
}
"""Names of functions of torch and torch.nn.functional -> their flag."""
RANDOM = tuple(name for name in FLAGS if name != "batch_norm")
"""The functions that draw random numbers."""


class _Undropped(TorchFunctionMode):
    """A mode that turns the flags of random functions off."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in RANDOM:
            args, kwargs = FLAGS[name].off(args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def undropped() -> Iterator[None]:
    """A context without dropout."""
    with _Undropped():
        yield


def _given(name: str, place: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An argument of a call by name or position; None where it is not given."""
    return kwargs.get(name, args[place] if place < len(args) else None)
