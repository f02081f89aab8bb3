"""Functions of single samples (`torch.vmap`), traced as operators on batches.

torch.export traces them as what they say: a dim is taken away, the operators of one sample, the dim is put back. No operator then has its real sizes. While a model
is traced such a function is therefore traced by itself, below the transform, and its operators are run once more in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from autopar._torch import getitem_modes, vmap_replaced
from autopar.capture.aside import aside


@contextmanager
def batched() -> Iterator[None]:
    """Inside, `torch.vmap` is traced as the operators on batches that it makes."""
    tracing = threading.current_thread()

    def run(original: Callable[..., Any], func: Callable[..., Any], *settings: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.current_thread() is not tracing:
            return original(func, *settings, *args, **kwargs)
        return aside(lambda positional, named: original(func, *settings, *positional, **named), (args, kwargs), getitem_modes())

    with vmap_replaced(run):
        yield
