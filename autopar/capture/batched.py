"""Functions of single samples (`torch.vmap`), traced as operators on batches. Used by export.

torch.export records such a function literally: remove the batch dim, the operators of one sample, add the batch dim. No
recorded operator then has its batched sizes. So while a model is traced, such a function is traced separately, below
the vmap transform, and the resulting batched operators are recorded in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.autograd import Function

from autopar.capture._torch import functions_applied, getitem_modes, vmap_replaced
from autopar.capture.lines import caller
from autopar.capture.own_backwards import is_torchs
from autopar.capture.traced_apart import aside
from autopar.errors import CaptureError


@contextmanager
def batched(*, training: bool) -> Iterator[None]:
    """A context in which `torch.vmap` is recorded as operators on batches. Raises CaptureError, inside, where a
    torch.autograd.Function is mapped in a model that trains: only its forward would be recorded."""
    tracing = threading.current_thread()

    def run(
        original: Callable[..., Any],
        func: Callable[..., Any],
        *settings: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if threading.current_thread() is not tracing:
            return original(func, *settings, *args, **kwargs)
        with functions_applied(_refused) if training else nullcontext():
            return aside(
                lambda positional, named: original(func, *settings, *positional, **named),
                (args, kwargs),
                getitem_modes(),
            )

    with vmap_replaced(run):
        yield


def _refused(original: Callable[..., Any], cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """`cls.apply(*args, **kwargs)` of torch's own functions; raises CaptureError for others."""
    if is_torchs(cls):
        return original(cls, *args, **kwargs)
    raise CaptureError(
        f"{caller()} maps {cls.__module__}.{cls.__qualname__}, a torch.autograd.Function, over samples "
        "(torch.vmap), where its backward cannot be kept: call it on whole batches"
    )
