"""Which dims of the inputs are symbolic: the batch `b` and the sequence `s`. Found by asked, used by export.

Dim 0 is the batch if all inputs have the same size there. Dim 1 of integer inputs is the sequence if they have the same
size there; not for segmentation labels [b, h, w] of images [b, c, h, w]. Floating inputs with that size in dim 1
(weights of tokens, log-probabilities, embeddings) may have the sequence there or not: export tries both. Export runs at
stand-in sizes where torch would specialise the user's own (size 1, or batch equal to sequence)."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.export import Dim

from autopar.capture.named_dims import assigned
from autopar.errors import CaptureError
from passes.facts import UNBOUNDED

STAND_IN = {"b": 6, "s": 10}  # small sizes that are neither 1 nor each other
# the least sequence: where a model cuts one or two positions off, two are left (torch specialises size 1)
LEAST_POSITIONS = 4


@dataclass
class Dims:
    """The symbolic dims of the flat inputs.

    of       number of the input -> {tensor dim: name of the symbol}
    hints    name of the symbol -> the user's size
    limits   name -> the greatest size
    loose    the symbol whose range is found from the conditions in the graph (torch's Dim.AUTO); "" for none
    own      whether that one is exported at the user's own size, not at a stand-in
    steps    name -> the number that its sizes are multiples of
    also     as `of`: the dims of floating inputs that may be the sequence
    wide     whether these are taken for it"""

    of: dict[int, dict[int, str]] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    loose: str = ""
    steps: dict[str, int] = field(default_factory=dict)
    own: bool = False
    also: dict[int, dict[int, str]] = field(default_factory=dict)
    wide: bool = False

    @property
    def of_samples(self) -> set[str]:
        """The symbols of samples: `b`, or else those that are dim 0 of an input."""
        return {"b"} if "b" in self.hints else {dims[0] for dims in self.of.values() if 0 in dims}

    def loosened(self, name: str, *, own: bool) -> Dims:
        """These dims with the range of symbol `name` to be found from the conditions in the graph, exported at the
        user's size (`own`) or at a stand-in."""
        return replace(self, loose=name, own=own)

    def widened(self) -> list[Dims]:
        """A list of these dims with the dims in `also` symbolic; empty where there are none."""
        of = {i: {**self.of.get(i, {}), **self.also.get(i, {})} for i in {**self.of, **self.also}}
        return [replace(self, of=of, also={}, wide=True)] if self.also else []

    def without(self, name: str) -> Dims:
        """These dims with `name` static."""
        of = {i: {d: n for d, n in dims.items() if n != name} for i, dims in self.of.items()}
        return Dims(of, {n: v for n, v in self.hints.items() if n != name}, self.limits)

    def shapes(self, flat: list[Any]) -> list[Any]:
        """torch.export's `dynamic_shapes` for the flat inputs."""
        least = {
            name: LEAST_POSITIONS if self.wide and self.loose and name not in self.of_samples else 2
            for name in self.hints
        }
        dims: dict[str, Any] = {
            name: Dim(name, min=least[name], max=self.limits[name])
            if name in self.limits
            else Dim(name, min=least[name])
            for name in self.hints
        }
        if self.loose:
            dims[self.loose] = Dim.AUTO
        return [
            {d: dims[n] for d, n in self.of.get(i, {}).items()} or None if isinstance(x, torch.Tensor) else None
            for i, x in enumerate(flat)
        ]

    def stand_ins(self, flat: list[Any]) -> list[Any]:
        """The flat inputs with symbolic dims at their stand-in sizes."""
        return [self._resized(x, self.of.get(i, {})) if isinstance(x, torch.Tensor) else x for i, x in enumerate(flat)]

    def stand_in(self, name: str) -> int:
        """The size at which symbol `name` is exported. For a dim that the user named it is the user's size, unless
        torch would specialise that."""
        others = [size for other, size in self.hints.items() if other != name]
        if name == self.loose and self.own:
            return self.hints[name]
        if name in STAND_IN or self.hints[name] < 2 or self.hints[name] in others:
            return STAND_IN.get(name, 14 + 4 * list(self.hints).index(name))
        return self.hints[name]

    def _resized(self, x: torch.Tensor, dims: Mapping[int, str]) -> torch.Tensor:
        """A tensor like `x` with the stand-in sizes of the symbols `dims`."""
        shape = [self.stand_in(dims[d]) if d in dims else n for d, n in enumerate(x.shape)]
        return torch.zeros(shape, dtype=x.dtype, device=x.device)


def find(flat: list[Any], max_positions: int | None) -> Dims:
    """The batch and the sequence, guessed from the shapes of the flat inputs; `max_positions` limits the sequence."""
    tensors = {i: x for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and x.ndim > 0}
    found = Dims()
    if not tensors:
        return found
    leading = {x.shape[0] for x in tensors.values()}
    if len(leading) == 1:
        found.hints["b"] = leading.pop()
        found.of = {i: {0: "b"} for i in tensors}
    tokens = {i: x for i, x in tensors.items() if x.ndim > 1 and not x.is_floating_point()}
    if any(x.ndim > 3 and x.is_floating_point() for x in tensors.values()) and all(x.ndim > 2 for x in tokens.values()):
        tokens = {}  # labels of the pixels of images
    second = {x.shape[1] for x in tokens.values()}
    if len(second) == 1 and (size := second.pop()) > 1:
        found.hints["s"] = size
        for i in tokens:
            found.of.setdefault(i, {})[1] = "s"
        found.also = {
            i: {1: "s"}
            for i, x in tensors.items()
            if i not in tokens and x.ndim in (2, 3) and x.is_floating_point() and x.shape[1] == size >= LEAST_POSITIONS
        }
        if max_positions is not None:
            found.limits["s"] = max_positions
    return found


def unshared(flat: list[Any]) -> str:
    """A note where `find` finds no batch among several inputs; "" where it does."""
    leading = [x.shape[0] for x in flat if isinstance(x, torch.Tensor) and x.ndim > 0]
    if len(dict.fromkeys(leading)) < 2:
        return ""
    return (
        f"the first sizes of the inputs differ ({', '.join(map(str, leading))}), so none is taken for the batch: the "
        "plan is for these sizes alone, and no pipeline cuts it into microbatches; name the batch in dynamic_shapes, "
        "'b' for the dim of samples of each input that has them (on the command line: let the factory give inputs of "
        "one first size)"
    )


def explicit(
    flat: list[Any], given: Any, inputs: tuple[Any, ...], named: Mapping[str, Any], signature: inspect.Signature
) -> Dims:
    """The user's dynamic_shapes for a forward of this `signature`: for each input `{dim: "name"}`, `{dim: Dim}` or None
    (forms: `named_dims`).

    Raises CaptureError where they do not fit the inputs."""
    shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in flat]
    asked = (
        f"dynamic_shapes is {given!r} for inputs of shapes {shapes}; wanted (args, kwargs), or a dict by the names of "
        f"inputs, with {{dim: name}} or None at each input"
    )
    try:
        by_input = assigned(given, inputs, named, signature)
    except ValueError as error:
        raise CaptureError(f"{asked}: {error}") from error
    found = Dims()
    for index, dims in sorted(by_input.items()):
        shape = shapes[index]
        for dim, said in dims.items():
            if shape is None or not 0 <= dim < len(shape):
                raise CaptureError(f"{asked}: input {index} has no dim {dim}")
            name = _name(said, f"{asked}: dim {dim} of input {index} is {said!r}")
            if found.hints.setdefault(name, shape[dim]) != shape[dim]:
                raise CaptureError(f"{asked}: {name} is {found.hints[name]} and {shape[dim]}")
            found.of.setdefault(index, {})[dim] = name
            least, most = getattr(said, "min", None), getattr(said, "max", None)
            if not (least is None or least <= shape[dim]) or not (most is None or shape[dim] <= most):
                raise CaptureError(
                    f"{asked}: dim {dim} of input {index} has size {shape[dim]}, and {name} is from {least} to {most}"
                )
            if most is not None and most < UNBOUNDED:
                found.limits[name] = int(most)
    return found


def _name(said: Any, what: str) -> str:
    """The name of a size: `said` is text or a torch.export.Dim. Raises CaptureError, which begins with `what`, where it
    has none, or one that is no name in Python."""
    name = said if isinstance(said, str) else getattr(said, "__name__", None)
    if name is None:
        raise CaptureError(
            f"{what}, which has no name; wanted text, as 'b', or a torch.export.Dim, and no entry for a dim that has "
            "one size"
        )
    if not name.isidentifier() or keyword.iskeyword(name):
        raise CaptureError(f"{what}, which is no Python name, and sizes are written with it")
    return name
