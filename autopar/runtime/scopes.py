"""The base classes of emitted modules: a Scope has the parameters and constants of its graph, a Block is the body of a
run of blocks, a Stage is one of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_of

from autopar.runtime import rng
from autopar.runtime.importable import make_importable
from autopar.runtime.names import Naming, full_name
from autopar.runtime.outputs import Spread
from autopar.runtime.params import Held, Param
from autopar.runtime.prefetch import within


class Block(nn.Module):
    """One instance of a repeated block; its parameters are registered with the model. `w` and `b` hold the local parts
    of parameters and buffers by their names in the block. `MUTATES` are the buffers whose new values forward returns
    last."""

    PARAMS: ClassVar[Mapping[str, Param]] = {}
    BUFFERS: ClassVar[Mapping[str, Param]] = {}
    MUTATES: ClassVar[Sequence[str]] = ()

    def __init__(self, naming: Naming = "") -> None:
        super().__init__()
        self.naming = naming
        self.number = 0  # in its run
        self.w: dict[str, Tensor] = {}
        self.b: dict[str, Tensor] = {}
        # of a compiled block: its forward, run again in the backward
        self.compiled_again: Callable[..., Any] | None = None
        self.ready: Callable[[], None] | None = None  # waits for leaves on their way

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, as soon as its leaves are there."""
        if self.ready is not None:
            self.ready()
        with within(self), rng.in_block(self.number):
            return super().__call__(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As nn.Module.compile. A compiled forward cannot be recomputed by a checkpoint around it, so the checkpointed
        forward is compiled too."""
        make_importable(type(self))
        super().compile(*args, **kwargs)
        self.compiled_again = torch.compile(partial(checkpoint_of, self.forward, use_reentrant=False), *args, **kwargs)


class Scope(nn.Module):
    """What holds runs of blocks beside parameters of its own: a model, or one stage of it."""

    PARAMS: ClassVar[Mapping[str, Param]] = {}
    BUFFERS: ClassVar[Mapping[str, Param]] = {}
    RUNS: ClassVar[Mapping[str, tuple[type[Block], Sequence[Naming]]]] = {}
    FIRST: ClassVar[Mapping[str, int]] = {}  # of runs that begin elsewhere: the number of the first block that is here

    def __init__(self) -> None:
        super().__init__()
        self.w: dict[str, Tensor] = {}
        self.b: dict[str, Tensor] = {}
        self.runs: dict[str, list[Block]] = {}  # a plain dict: blocks are no part of the original names
        self.mutations: list[tuple[str, Tensor]] = []  # new values of buffers of blocks in the running forward

    def changed(self, block: Block, values: Sequence[Tensor]) -> None:
        """New values of the buffers that `block` mutates; they are taken when the forward has ended."""
        self.mutations += [
            (full_name(block.naming, name), value) for name, value in zip(block.MUTATES, values, strict=True)
        ]

    def _blocks(self) -> list[Block]:
        """All blocks, in the order in which they run."""
        return [block for blocks in self.runs.values() for block in blocks]


class Stage(Scope):
    """One stage of a pipeline; see runtime.pipeline. `held` are the parameters and buffers that it reads."""

    INPUTS: ClassVar[Sequence[str]] = ()
    TOTALS: ClassVar[Sequence[str]] = ()
    RESULTS: ClassVar[Sequence[int]] = ()
    # whether gradients of what is received and of weights can be taken apart (zero bubble)
    SEPARABLE: ClassVar[bool] = True

    def __init__(self, index: int, complete: Callable[[Tensor, str, Sequence[int]], tuple[Tensor, Spread]]) -> None:
        super().__init__()
        self.index, self.held, self.spreads = index, dict[str, Held](), list[Spread]()
        self.ready: Callable[[], None] | None = None  # waits for leaves on their way
        self._complete = complete

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage, as soon as the leaves are there that it reads outside of blocks."""
        if self.ready is not None:
            self.ready()
        return super().__call__(*args, **kwargs)

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
