"""torch.compile of a whole sharded module is refused: what it does between blocks (prefetching, counting steps,
watching gradients) is Python that must run. `ShardedModule.compile_blocks` compiles what computes."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from autopar.errors import RunError

_WHY = (
    "torch.compile of a sharded module as a whole: what starts collectives between its blocks is Python, which no "
    "compiler may take apart. Call the module as it is, with its blocks compiled: model.module.compile_blocks() (its "
    "arguments are those of torch.compile) on all ranks"
)


@torch.compiler.disable(reason=_WHY)
def _refuse() -> NoReturn:
    raise RunError(_WHY)


def check_uncompiled() -> None:
    """Raise RunError where torch.compile is at work on the caller."""
    if torch.compiler.is_compiling():
        _refuse()


def not_compiled(self: Any, *_: Any, **__: Any) -> NoReturn:
    """In place of nn.Module.compile. Raises RunError."""
    raise RunError(_WHY)
