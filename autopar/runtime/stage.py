"""The base class of emitted stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from autopar.runtime.names import Naming, full_name
from autopar.runtime.outputs import Spread
from autopar.runtime.params import Held
from autopar.runtime.scopes import Block, Scope


class Stage(Scope):
    """One stage; see the module docstring. `held` are the parameters and buffers that it reads."""

    INPUTS: ClassVar[Sequence[str]] = ()
    TOTALS: ClassVar[Sequence[str]] = ()
    RESULTS: ClassVar[Sequence[int]] = ()
    # whether gradients of what is received and of weights can be taken apart (zero bubble)
    SEPARABLE: ClassVar[bool] = True

    def __init__(self, index: int, complete: Callable[[Tensor, str, Sequence[int]], tuple[Tensor, Spread]]) -> None:
        super().__init__()
        self.index, self.held, self.spreads = index, dict[str, Held](), list[Spread]()
        self._complete = complete

    @staticmethod
    def receives(**sizes: int) -> Sequence[tuple[Sequence[int], str, bool]]:
        """Local shape, dtype name and whether there is a gradient, of what comes in at these global sizes."""
        return ()

    def spread(self, value: Tensor, layout: str, shape: Sequence[int]) -> Tensor:
        """A result for the user, as ShardedModule.spread."""
        value, spread = self._complete(value, layout, shape)
        self.spreads.append(spread)
        return value

    @classmethod
    def names(cls) -> dict[str, bool]:
        """Original names of all that the stage reads, and whether each is a parameter that may be trained."""
        tables: list[tuple[Naming, type[Block] | type[Stage]]] = [("", cls)]
        tables += [(naming, kind) for kind, namings in cls.RUNS.values() for naming in namings]
        return {
            full_name(naming, short): info.trainable and table is kind.PARAMS
            for naming, kind in tables
            for table in (kind.PARAMS, kind.BUFFERS)
            for short, info in table.items()
        }
