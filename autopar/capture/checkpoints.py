"""Parts of a model in `torch.utils.checkpoint` that change buffers: torch runs them twice in a training step, and a
sharded module once. Used by tape."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint

from autopar._torch import copied
from autopar.capture._torch import redirected
from autopar.capture.lines import caller


@contextmanager
def checkpoints_watched(state: Callable[[], object]) -> Iterator[dict[str, None]]:
    """A context that gives the user's lines that call a checkpoint in which `state()` changes."""
    function, lines = inspect.unwrap(checkpoint.checkpoint), dict[str, None]()
    original = copied(function)

    def watched(*args: Any, **kwargs: Any) -> Any:
        before, line = state(), caller()
        result = original(*args, **kwargs)
        if state() != before:
            lines[line] = None
        return result

    with redirected(function, watched):
        yield lines
