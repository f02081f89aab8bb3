"""Code of a model that is traced separately, below autograd, and whose operators are then run in the trace of the
model. Used by batched and own_backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from autopar._torch import pytree
from autopar.capture._torch import below_autograd
from autopar.capture.devices import on_meta
from autopar.tensors import differentiable

detach = torch.ops.aten.detach.default
cast = torch.ops.aten._to_copy.default


def aside(
    call: Callable[..., Any],
    args: Sequence[Any],
    modes: Sequence[AbstractContextManager[Any]] = (),
    *,
    detaching: bool = True,
) -> Any:
    """The result of `call(*args)`, for pytrees of traced values, traced separately below autograd under `modes` (the
    modes of the trace are not active there). With `detaching`, code that runs without gradients or detaches stays so;
    otherwise gradients flow back to all `args` that have one."""
    leaves, tree = pytree.tree_flatten(list(args))
    inputs = [x for x in leaves if _traced(x)]
    said: list[Any] = []

    def body(*given: Any) -> list[Tensor]:
        new = iter(given)
        flat, shape = pytree.tree_flatten(
            call(*pytree.tree_unflatten([next(new) if _traced(x) else x for x in leaves], tree))
        )
        said[:] = [[None if isinstance(x, Tensor) else (x,) for x in flat], shape]
        return [x for x in flat if isinstance(x, Tensor)]

    with ThreadPoolExecutor(1) as outside:  # modes are a thread's
        program = outside.submit(_program, body, inputs, [*modes, *([_Unrecorded()] if detaching else [])]).result()
    if not detaching:
        for node in program.graph.find_nodes(op="call_function", target=detach):
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
        program.recompile()
    made = iter(fx.Interpreter(program).run(*inputs))
    others, shape = said
    return pytree.tree_unflatten([next(made) if other is None else other[0] for other in others], shape)


def _traced(item: Any) -> bool:
    return isinstance(item, Tensor | torch.SymInt)


def _program(
    body: Callable[..., Any], inputs: Sequence[Any], modes: Sequence[AbstractContextManager[Any]]
) -> fx.GraphModule:
    """The graph of `body(*inputs)`, traced on meta under `modes`."""
    with on_meta(), ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        return _plain_numbers(below_autograd(body, inputs))


def _plain_numbers(program: fx.GraphModule) -> fx.GraphModule:
    """Undo torch.vmap's casts of Python numbers to the dtype of the tensor that they are combined with."""
    for node in program.graph.find_nodes(op="call_function", target=cast):
        if isinstance(node.args[0], bool | int | float):
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    program.recompile()
    return program


class _Unrecorded(TorchFunctionMode):
    """A mode that detaches results computed without gradients: a trace below autograd does not record that."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return (
            result
            if torch.is_grad_enabled()
            else pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) and differentiable(x) else x, result)
        )
