"""Operators that a recomputed block does not run again, since their results are stored or not needed.

    matmul = keep(lambda: h @ self.w["up.weight"])      stored: the second run gets the stored values
    summed = skip(lambda: x @ self.w["down.weight"])    not needed: the second run gets uninitialised memory of the same
                                                        shape
    enough()                                            the second run ends here: the backward needs nothing of what
                                                        follows

They act in a block that runs under `rematerialise.remat`; anywhere else, and in compiled code, `keep` and `skip` just
call and `enough` does nothing. In the second run the operators still pass through autograd, so that it saves what their
backward needs; only their kernels do not run. Of several kernels inside of `skip` only the last is left out: a batched
matmul first copies its operands into contiguous memory, and autograd saves the copies. Views always run: a stored view
would keep its whole base alive.
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
    """The results of the kept and skipped parts of one forward, in order; `at` is the number of the next part in a
    second run."""

    parts: list[list[Any]] = field(default_factory=list)
    again: bool = False
    at: int = 0

    def part(self) -> list[Any]:
        """The part that begins: a new one in the first run, else the next recorded one."""
        if not self.again:
            self.parts.append([])
            return self.parts[-1]
        self.at += 1
        return self.parts[self.at - 1]


_tapes: list[Tape] = []  # of the blocks that are running, innermost last
_regions: list[_Region] = []  # `keep` and `skip` that are running


def keep(run: Callable[[], T]) -> T:
    """`run()`, whose results are stored for the second run, which then computes and sends nothing here. Raises RunError
    where the result is a view, which is not stored: its base would not be recomputed."""
    return _marked(run, stores=True)


def skip(run: Callable[[], T]) -> T:
    """`run()`; in the second run uninitialised memory: the emitter has made sure that it is not read."""
    return _marked(run, stores=False)


def _marked(run: Callable[[], T], *, stores: bool) -> T:
    """`run()`, recorded on the tape or replayed from it; `stores`: as `keep` does, else as `skip` does."""
    if torch.compiler.is_compiling() or not _tapes:
        return run()
    tape = _tapes[-1]
    region = _Region(tape.part(), stores=stores, again=tape.again)
    _regions.append(region)
    try:
        with region:
            result = run()
        if (
            stores
            and not region.part
            and any(leaf.numel() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
        ):
            raise RunError(
                "an operator whose result is to be kept for the backward gave a view, which is not stored; please "
                "report this plan"
            )
        return result
    finally:
        _regions.pop()


class Enough(Exception):
    """Raised by `enough` to end a second run; caught by `rematerialise`."""


def enough() -> None:
    """End a second run. A point of the program, the same on all ranks: when all saved tensors have been recomputed
    depends on a rank's shards (attention saves nothing of an empty one)."""
    if not torch.compiler.is_compiling() and running_again():
        raise Enough


def running_again() -> bool:
    """Whether a block is running for the second time."""
    return bool(_tapes) and _tapes[-1].again


def once(run: Callable[[], Tensor]) -> Tensor:
    """`run()` as one kernel of the `keep` or `skip` around it: for code that communicates, whose buffers are no
    results."""
    return _regions[-1].once(run) if _regions else run()


@contextmanager
def recording(tape: Tape, *, again: bool) -> Iterator[None]:
    """A context in which `keep` and `skip` record on `tape`, or (`again`) replay it."""
    tape.again, tape.at = again, 0
    _tapes.append(tape)
    try:
        yield
    finally:
        _tapes.pop()


class _Region(TorchDispatchMode):
    """One running `keep` or `skip`: records the results of kernels, or returns the recorded ones."""

    def __init__(self, part: list[Any], *, stores: bool, again: bool) -> None:
        super().__init__()
        self.part, self.stores, self.again = part, stores, again
        self.at, self.inside = 0, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One kernel. Raises RunError for communication outside of `once`: its buffers would be taken for results."""
        if func.namespace == "c10d" and not self.inside:
            raise RunError(
                f"{func} was called inside of {'keep' if self.stores else 'skip'}, which stores results of kernels: an "
                "operator that communicates runs again; please report this plan"
            )
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
        """The result of one kernel: run and recorded in the first run, the recorded one in the second."""
        if self.again:
            self.at += 1
            if not self.stores and self.at < len(self.part):
                return run()  # copies of operands for the last kernel: autograd saves these
            return pytree.tree_map_only(_Kept, _Kept.tensor, self.part[self.at - 1])
        made = run()
        self.part.append(pytree.tree_map_only(Tensor, self._kept, made))
        return made

    def _kept(self, tensor: Tensor) -> _Kept:
        about = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        return _Kept(tensor.detach() if self.stores else None, about)


@dataclass(frozen=True, slots=True)
class _Kept:
    """One recorded result: its values (of `keep`), or only size, stride, dtype and device (of `skip`)."""

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
