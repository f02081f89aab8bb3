"""What a model returns: the user's pytree, with values by name or attribute, and how each lies on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import RunError
from autopar.layout import Layout


class Outputs(dict[Any, Any]):
    """A dict whose values are attributes too: `out.loss`, `out["logits"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no output {name!r}; outputs are {', '.join(map(str, self))}") from None


@dataclass(frozen=True, slots=True)
class Spread:
    """How an output lies: layout on the mesh, and its global shape."""

    layout: Layout
    shape: tuple[int, ...]


def pack(structure: Any, leaf: Callable[[int], Any]) -> Any:
    """The user's pytree: `structure` with each int replaced by `leaf(int)`; other leaves stay as they are."""
    if is_number(structure):
        return leaf(structure)
    if isinstance(structure, Mapping):
        return Outputs({key: pack(item, leaf) for key, item in structure.items()})
    if isinstance(structure, (tuple, list)):
        return type(structure)(pack(item, leaf) for item in structure)
    return structure


def is_number(leaf: Any) -> bool:
    """Whether a leaf of a structure is the number of an output; True and False are outputs of their own, and equal to 1
    and 0."""
    return isinstance(leaf, int) and not isinstance(leaf, bool)


def by_name(names: tuple[str, ...]) -> Any:
    """The structure of a model that does not say more: a dict by name."""
    return {name or f"output{index}": index for index, name in enumerate(names)}


def leaves(outputs: Any) -> list[Any]:
    """The leaves of a pytree of dicts, lists and tuples, in order."""
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    if isinstance(outputs, (tuple, list)):
        return [leaf for item in outputs for leaf in leaves(item)]
    return [outputs]


class _Ungraded(torch.autograd.Function):
    """Identity on `value`, whose backward raises RunError: a gradient came back to the output `name`, and `why` there
    is no way for it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, name: str, why: str) -> Tensor:
        ctx.said = f"a gradient came back to output {name!r}, and {why}"
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise RunError(ctx.said)


OTHER = (
    "a plan has ways for the gradient of its loss alone: through other outputs ranks would give their weights parts of "
    "a gradient, or none. Compute what you make of outputs in the model's forward, as part of the loss that it "
    "returns, or in loss_fn=, and compile it so; where it is only looked at, detach() it"
)
STAGED = (
    "the forward of a pipeline keeps nothing for a backward: call train_step(*batch), which is forward and backward, "
    "microbatch by microbatch, and gives the loss; where the output is only looked at, detach() it"
)
"""Why outputs of a program without stages, and of a pipeline, have no way for a gradient."""


def ungraded(value: Tensor, name: str, why: str) -> Tensor:
    """`value`, detached; where gradients are recorded, a backward through it raises RunError."""
    if not torch.is_grad_enabled():
        return value
    marked: Tensor = _Ungraded.apply(torch.zeros((), requires_grad=True), value.detach(), name, why)
    return marked
