"""Operators that are not run a second time: their results are stored, or nobody needs them.

    matmul = keep(lambda: h @ self.w["up.weight"])      stored: the second time the same values, without the work
    summed = skip(lambda: x @ self.w["down.weight"])    nobody needs it the second time: memory of the same shape, without content
    enough()                                            the second run ends here: the backward needs nothing of what follows

Inside a block that runs under `rematerialise.remat`; anywhere else, and in compiled code, both just call and `enough` does nothing. The second time the operators
still pass through autograd, so that what their backward needs of their operands is there: only their kernels do not run. Of what `skip` is
around, that is the last kernel alone: a product of several dims copies its operands into order, and autograd saves the copies. Views
always run: a stored view would hold what it looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar._torch import TorchDispatchMode, pytree
from autopar.errors import RunError

T = TypeVar("T")


@dataclass(eq=False)
class Tape:
    """What the kept and skipped parts of one forward gave, part by part; `at` is the part that is next when they come again."""

    parts: list[list[Any]] = field(default_factory=list)
    again: bool = False
    at: int = 0

    def part(self) -> list[Any]:
        """The part that begins: a new one, or the next one of before."""
        if not self.again:
            self.parts.append([])
            return self.parts[-1]
        self.at += 1
        return self.parts[self.at - 1]


_tapes: list[Tape] = []  # of the blocks that are running, innermost last
_regions: list[_Region] = []  # `keep` and `skip` that are running


def keep(run: Callable[[], T]) -> T:
    """`run()`; its results are stored, so that the second time nothing is computed or sent. Raises RunError where it is a view, which is not stored: the second time
    it would look at what nobody has computed again."""
    return _marked(run, stores=True)


def skip(run: Callable[[], T]) -> T:
    """`run()`; the second time it gives uninitialised memory: whoever emits this knows that nobody looks."""
    return _marked(run, stores=False)


def _marked(run: Callable[[], T], *, stores: bool) -> T:
    if torch.compiler.is_compiling() or not _tapes:
        return run()
    tape = _tapes[-1]
    region = _Region(tape.part(), stores=stores, again=tape.again)
    _regions.append(region)
    try:
        with region:
            result = run()
        if stores and not region.part and any(leaf.numel() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)):
            raise RunError("an operator whose result is to be kept for the backward gave a view, which is not stored; please report this plan")
        return result
    finally:
        _regions.pop()


class Enough(Exception):
    """What ends a second run; `rematerialise` takes it."""


def enough() -> None:
    """The end of a second run. It is a place in the program, the same on all ranks: how many tensors a rank saves, and so when it has them all
    again, depends on its shards (attention saves nothing of an empty one)."""
    if not torch.compiler.is_compiling() and running_again():
        raise Enough


def running_again() -> bool:
    """Whether a block is running for the second time."""
    return bool(_tapes) and _tapes[-1].again


def once(run: Callable[[], Tensor]) -> Tensor:
    """`run()`, one result of what is kept or skipped around it: for what does more than call operators (communication)."""
    return _regions[-1].once(run) if _regions else run()


@contextmanager
def recording(tape: Tape, *, again: bool) -> Iterator[None]:
    """Where `keep` and `skip` use `tape`: for the first time, or `again`."""
    tape.again, tape.at = again, 0
    _tapes.append(tape)
    try:
        yield
    finally:
        _tapes.pop()


class _Region(TorchDispatchMode):
    """Stores what kernels give, or gives what was stored."""

    def __init__(self, part: list[Any], *, stores: bool, again: bool) -> None:
        super().__init__()
        self.part, self.stores, self.again = part, stores, again
        self.at, self.inside = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """One kernel. Raises RunError for communication, which must be part of what `once` runs: its buffers would be taken for results."""
        if func.namespace == "c10d" and not self.inside:
            raise RunError(f"{func} was called inside of {'keep' if self.stores else 'skip'}, which stores results of kernels: an operator that communicates "
                           "runs again; please report this plan")
        run = lambda: func(*args, **(kwargs or {}))  # noqa: E731
        return run() if self.inside or _is_view(func) else self._result(run)

    def once(self, run: Callable[[], Tensor]) -> Tensor:
        """`run()` as if it were one kernel."""
        self.inside = True
        try:
            result: Tensor = self._result(run)
            return result
        finally:
            self.inside = False

    def _result(self, run: Callable[[], Any]) -> Any:
        if self.again:
            self.at += 1
            if not self.stores and self.at < len(self.part):
                return run()  # what prepares operands for the last kernel, such as their order in memory: autograd saves that instead of them
            return pytree.tree_map_only(_Kept, _Kept.tensor, self.part[self.at - 1])
        made = run()
        self.part.append(pytree.tree_map_only(Tensor, self._kept, made))
        return made

    def _kept(self, tensor: Tensor) -> _Kept:
        about = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        return _Kept(tensor.detach() if self.stores else None, about)


@dataclass(frozen=True, slots=True)
class _Kept:
    """One result: its values, or only what they look like."""

    value: Tensor | None
    about: tuple[Any, ...]

    def tensor(self) -> Tensor:
        """The result again, as a tensor of its own: autograd writes on it."""
        if self.value is not None:
            return self.value.detach()
        size, stride, dtype, device = self.about
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _is_view(func: Any) -> bool:
    """Whether a kernel's result shares the memory of an operand (of `_unsafe_view` the schema does not say so)."""
    return func is torch.ops.aten._unsafe_view.default or any(r.alias_info is not None for r in func._schema.returns)
