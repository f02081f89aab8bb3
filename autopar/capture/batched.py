"""Functions of single samples (`torch.vmap`), traced as operators on batches.

torch.export traces them as what they say: a dim is taken away, the operators of one sample, the dim is put back. No operator then has its real sizes. While a model
is traced such a function is therefore traced by itself, below the transform, and its operators are run once more in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx

from autopar._torch import below_autograd, getitem_modes, pytree, vmap_replaced
from autopar.capture.devices import on_meta


@contextmanager
def batched() -> Iterator[None]:
    """Inside, `torch.vmap` is traced as the operators on batches that it makes."""
    tracing = threading.current_thread()

    def run(original: Callable[..., Any], func: Callable[..., Any], *settings: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.current_thread() is not tracing:
            return original(func, *settings, *args, **kwargs)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        traced = [isinstance(x, torch.Tensor | torch.SymInt) for x in leaves]
        inputs = [x for x, is_traced in zip(leaves, traced, strict=True) if is_traced]
        shape: list[Any] = []

        def body(*given: Any) -> list[Any]:
            new = iter(given)
            positional, named = pytree.tree_unflatten([next(new) if is_traced else x for x, is_traced in zip(leaves, traced, strict=True)], tree)
            flat, out = pytree.tree_flatten(original(func, *settings, *positional, **named))
            shape[:] = [out]
            return list(flat)

        modes = getitem_modes()
        with ThreadPoolExecutor(1) as outside:
            program = outside.submit(_program, body, inputs, modes).result()
        return pytree.tree_unflatten(fx.Interpreter(program).run(*inputs), shape[0])

    with vmap_replaced(run):
        yield


def _program(body: Callable[..., Any], inputs: list[Any], modes: list[Any]) -> fx.GraphModule:
    with on_meta(), ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        return below_autograd(body, inputs)
