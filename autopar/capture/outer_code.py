"""The outer code of a model as a list of events: every operator outside of blocks, and every call of a block.

Blocks are replaced by stubs, and the model runs on fake tensors while a tape records. Tensors are labelled by their
origin, so the lists of two models can be compared: equal lists are the same straight-line program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar._torch import Watch, pytree
from autopar.capture._torch import tracing
from autopar.capture.devices import on_meta
from autopar.capture.mask_branches import Picking
from autopar.capture.shadow import shadow
from autopar.capture.valueless import valueless

Block = tuple[str, int]  # (container, number of the block)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a block: what it was fed and what it returned, flat."""

    block: Block
    fed: list[Any]
    gave: list[Any]


class Tape:
    """What happened, in order: operators as (name, labels of the arguments), calls of blocks as Call."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.result: list[Any] = []
        self._labels: dict[int, Any] = {}
        self._alive: list[torch.Tensor] = []  # the id of a freed tensor would be used again
        self._operators, self._quiet = 0, False

    @property
    def calls(self) -> list[Call]:
        """The calls of blocks alone."""
        return [event for event in self.events if isinstance(event, Call)]

    def name(self, tree: Any, label: Any) -> None:
        """Label the tensors of a tree, those that have no label yet."""
        for i, leaf in enumerate(pytree.tree_leaves(tree)):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._labels:
                self._labels[id(leaf)] = (label, i)
                self._alive.append(leaf)

    def flat(self, tree: Any) -> list[Any]:
        """Labels of the leaves of a tree: of tensors where they come from, of anything else its text."""
        return [
            self._labels.get(id(leaf), ("unknown", tuple(leaf.shape), leaf.dtype))
            if isinstance(leaf, torch.Tensor)
            else (type(leaf).__name__, repr(leaf))
            for leaf in pytree.tree_leaves(tree)
        ]

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note one operator."""
        if not self._quiet:
            self.events.append((str(func), self.flat((args, kwargs))))
            self.name(result, ("operator", self._operators))
            self._operators += 1

    def call(self, block: Block, fed: Any, result: Any) -> Any:
        """Note one call of a block; gives fresh tensors like `result`."""
        self._quiet = True
        gave = pytree.tree_map(lambda x: x.new_empty(x.shape) if isinstance(x, torch.Tensor) else x, result)
        self._quiet = False
        self.events.append(Call(block, pytree.tree_leaves(fed), pytree.tree_leaves(gave)))
        self.name(gave, ("block", block))
        return gave


class Stub(nn.Module):
    """Stands for one block: notes what it is fed and returns tensors like `result`."""

    def __init__(self, block: Block, result: Any, tape: Tape, like: nn.Module) -> None:
        super().__init__()
        self.block, self.result, self.tape = block, result, tape
        for name, value in vars(like).items():  # outer code may look at plain attributes of a block
            if not name.startswith("_") and not isinstance(value, (torch.Tensor, nn.Module)) and name not in vars(self):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the block would return."""
        return self.tape.call(self.block, (args, kwargs), self.result)


def play(
    model: nn.Module,
    keep: Mapping[str, Mapping[int, int]],
    training: bool,
    inputs: Any,
    result_of: Callable[[Block], Any],
) -> Tape:
    """Run the outer code of `model` with the kept children as stubs; `result_of` says what each (shown number)
    returns."""
    tape = Tape()
    twin = shadow(model, {path: {} for path in keep}).train(training)
    tape.name([t for _, t in (*twin.named_parameters(), *twin.named_buffers())], "weight")
    for path, numbers in keep.items():
        container, children = twin.get_submodule(path), model.get_submodule(path)
        container._modules = {
            str(shown): Stub((path, shown), result_of((path, shown)), tape, children.get_submodule(str(n)))
            for shown, n in numbers.items()
        }
    with torch.no_grad(), valueless(), tracing(), on_meta(), Picking():
        args, kwargs = fake(inputs)
        tape.name((args, kwargs), "input")
        with Watch(tape.operator):
            tape.result = tape.flat(twin(*args, **kwargs))
    return tape


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
