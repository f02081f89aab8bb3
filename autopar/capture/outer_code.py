"""The outer code of a model as a list of events: every operator outside of blocks, and every call of a block.

Blocks are replaced by facades, and the model runs on fake tensors while a Recording lists what it does. Tensors are
labelled by their origin, so the lists of two models can be compared: equal lists are the same straight-line program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar._torch import Watch, pytree
from autopar.capture._torch import tracing
from autopar.capture.by_tensor import ByTensor
from autopar.capture.devices import on_meta
from autopar.capture.mask_branches import Picking
from autopar.capture.shadow import in_mode, shadow
from autopar.capture.valueless import valueless

Block = tuple[str, int]  # (container, number of the block)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a block: the leaves of its arguments and of its result."""

    block: Block
    fed: list[Any]
    gave: list[Any]


class Recording:
    """The events of one run, in order: an operator as (name, labels of the arguments), a call of a block as `Call`."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.result: list[Any] = []
        self._labels = ByTensor[Any]()
        self._operators, self._quiet = 0, False

    @property
    def calls(self) -> list[Call]:
        """The calls of blocks."""
        return [event for event in self.events if isinstance(event, Call)]

    def name(self, tree: Any, label: Any) -> None:
        """Label the tensors of a tree that have no label yet."""
        for i, leaf in enumerate(pytree.tree_leaves(tree)):
            if isinstance(leaf, torch.Tensor) and self._labels.get(leaf) is None:
                self._labels.keep(leaf, (label, i))

    def flat(self, tree: Any) -> list[Any]:
        """The leaves of a tree in comparable form: the label of a tensor, type and text of anything else."""
        return [
            self._labels.get(leaf) or ("unknown", tuple(leaf.shape), leaf.dtype)
            if isinstance(leaf, torch.Tensor)
            else (type(leaf).__name__, repr(leaf))
            for leaf in pytree.tree_leaves(tree)
        ]

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record one operator."""
        if not self._quiet:
            self.events.append((str(func), self.flat((args, kwargs))))
            self.name(result, ("operator", self._operators))
            self._operators += 1

    def call(self, block: Block, result: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Record one call of a block. Returns new tensors like those in `result`, what it would return."""
        self._quiet = True
        gave = pytree.tree_map(lambda x: x.new_empty(x.shape) if isinstance(x, torch.Tensor) else x, result)
        self._quiet = False
        self.events.append(Call(block, pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(gave)))
        self.name(gave, ("block", block))
        return gave


def _part_called(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("outer code calls a part of a block")


class Facade(nn.Module):
    """What outer code may look at of a block, or of a module in one: plain attributes and the training flag. It has no
    tensors, and only the block itself can be called."""

    def __init__(self, like: nn.Module, called: Callable[..., Any] = _part_called) -> None:
        super().__init__()
        self.training = like.training
        self.forward = called
        seen = ((name, value) for name, value in vars(like).items() if not isinstance(value, (torch.Tensor, nn.Module)))
        parts = ((name, Facade(child)) for name, child in like.named_children())
        for name, value in (*seen, *parts):
            if not name.startswith("_") and name not in vars(self):
                setattr(self, name, value)


def play(
    model: nn.Module,
    keep: Mapping[str, Mapping[int, int]],
    training: bool,
    inputs: Any,
    result_of: Callable[[Block], Any],
) -> Recording:
    """Run the outer code of `model` with facades for the children that `keep` lists. `result_of` gives the result of
    each (by its number in the shortened model)."""
    recording = Recording()
    twin = shadow(model, {path: {} for path in keep})
    recording.name([t for _, t in (*twin.named_parameters(), *twin.named_buffers())], "weight")
    for path, numbers in keep.items():
        container, children = twin.get_submodule(path), model.get_submodule(path)
        container._modules = {
            str(shown): Facade(
                children.get_submodule(str(n)), partial(recording.call, (path, shown), result_of((path, shown)))
            )
            for shown, n in numbers.items()
        }
    in_mode(twin, training)
    with torch.no_grad(), valueless(), tracing(), on_meta(), Picking():
        args, kwargs = fake(inputs)
        recording.name((args, kwargs), "input")
        with Watch(recording.operator):
            recording.result = recording.flat(twin(*args, **kwargs))
    return recording


def results(model: nn.Module, paths: list[str], inputs: Any) -> dict[Block, Any]:
    """What each child of some containers returned in its first call, from one run on fake tensors."""
    found: dict[Block, Any] = {}
    handles = []
    for path in paths:
        for name, child in model.get_submodule(path).named_children():

            def note(_: Any, __: Any, result: Any, key: Block = (path, int(name))) -> None:
                found.setdefault(key, result)

            handles.append(child.register_forward_hook(note))
    with torch.no_grad(), valueless(), tracing(), on_meta(), Picking():
        args, kwargs = fake(inputs)
        model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return found


def fake(inputs: Any) -> Any:
    """(args, kwargs) with fake tensors, in the mode that is on."""
    return pytree.tree_map(lambda x: torch.empty_like(x) if isinstance(x, torch.Tensor) else x, inputs)
