"""The proof that shortened runs stand for whole ones: the model's outer code run once with every block replaced by a stub.

    h = embed(ids); for block in blocks: h = block(h, mask); ...

With stubs that return fresh tensors like the first block's output, the run shows what each block is fed. A run is a chain when every
block is called once, in order, and each argument is, for all blocks from the second on, the same thing: the previous
block's output number i, the very object that the previous block got, or an equal plain value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar._torch import fake_mode
from autopar.capture.alike import AlikeRun
from autopar.capture.shadow import shadow


class _Stub(nn.Module):
    """Stands for one block: notes what it is fed and returns tensors like `result`."""

    def __init__(self, number: int, result: Any, calls: list[tuple[int, list[Any], list[Any]]], like: nn.Module) -> None:
        super().__init__()
        self.number, self.result, self.calls = number, result, calls
        for name, value in vars(like).items():  # outer code may look at plain attributes of a block
            if not name.startswith("_") and not isinstance(value, (torch.Tensor, nn.Module)) and name not in vars(self):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fresh = pytree.tree_map(lambda x: torch.empty_like(x) if isinstance(x, torch.Tensor) else x, self.result)
        self.calls.append((self.number, pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(fresh)))
        return fresh


def is_chain(model: nn.Module, short: nn.Module, runs: Sequence[AlikeRun], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """"" when all `runs` of `model` are chains, otherwise why not. `short` is the shortened shadow; inputs are on meta."""
    with fake_mode():
        args, kwargs = pytree.tree_map(lambda x: torch.empty_like(x) if isinstance(x, torch.Tensor) else x, (args, dict(kwargs)))
        results = _first_results(short, runs, args, kwargs)
    whole = shadow(model, {run.path: () for run in runs})
    calls: dict[str, list[tuple[int, list[Any], list[Any]]]] = {}
    for path in dict.fromkeys(run.path for run in runs):
        container, children = whole.get_submodule(path), list(model.get_submodule(path).children())
        assert isinstance(container, (nn.ModuleList, nn.Sequential))
        here = [run for run in runs if run.path == path]
        covered = {run.start + i: (run, i % run.period) for run in here for i in range(run.period * run.count)}
        if len(covered) != len(children):
            return f"{path} holds other blocks beside the alike ones"
        for number, child in enumerate(children):
            run, kind = covered[number]
            container.append(_Stub(number, results[path, run.start + kind], calls.setdefault(path, []), child))
    with torch.no_grad(), fake_mode():
        whole(*args, **kwargs)
    for run in runs:
        if why := _broken(run, calls[run.path]):
            return f"{run.path}: {why}"
    return ""


def _first_results(short: nn.Module, runs: Sequence[AlikeRun], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[tuple[str, int], Any]:
    """What the first block of each kind returns, from one run of the shortened model on meta."""
    found: dict[tuple[str, int], Any] = {}
    handles = []
    for path in dict.fromkeys(run.path for run in runs):
        kept = [number for run in runs if run.path == path for number in run.kept]
        for number, child in zip(kept, short.get_submodule(path).children(), strict=True):
            def note(_: Any, __: Any, result: Any, key: tuple[str, int] = (path, number)) -> None:
                found.setdefault(key, result)
            handles.append(child.register_forward_hook(note))
    with torch.no_grad():
        short(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return found


def _broken(run: AlikeRun, calls: Sequence[tuple[int, list[Any], list[Any]]]) -> str:
    mine = [call for call in calls if run.start <= call[0] < run.start + run.period * run.count]
    if [number for number, _, _ in mine] != list(range(run.start, run.start + run.period * run.count)):
        return "its blocks are not called once each, in order"
    seen: dict[int, list[Any]] = {}
    for at in range(run.period, len(mine)):
        number, fed, _ = mine[at]
        before = mine[at - 1]
        twin = mine[at - run.period]
        how = [_origin(x, before, twin, i, number) for i, x in enumerate(fed)]
        if None in how:
            return f"block {number} is fed something made anew for it (argument {how.index(None)})"
        if seen.setdefault(at % run.period, how) != how:
            return f"block {number} is fed differently from the blocks before it"
    return ""


def _origin(x: Any, before: tuple[int, list[Any], list[Any]], twin: tuple[int, list[Any], list[Any]], index: int, number: int) -> Any:
    """Where one argument comes from, in words that are the same for every block of a chain; None if from nowhere known."""
    if isinstance(x, torch.Tensor):
        for i, result in enumerate(before[2]):
            if x is result:
                return ("output", i)
        return ("same", index) if index < len(twin[1]) and x is twin[1][index] else None
    if isinstance(x, int) and not isinstance(x, bool) and x == number:
        return ("index",)
    return ("equal", index) if index < len(twin[1]) and (x is twin[1][index] or x == twin[1][index]) else None
