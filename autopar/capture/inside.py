"""Code in forward that a graph of operators cannot contain: argument checks on values, gradients, seeds of random
generators, and inputs that are objects. Used by export."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch

from autopar._torch import copied, pytree
from autopar.capture._torch import masks_unread, redirected, unvalidated_distributions
from autopar.capture.lines import caller
from autopar.errors import CaptureError

UNTRACED = "fake tensor in the exported program constant's list"
"""Text in torch.export's error on a result of a backward, which it does not trace."""

UNKNOWN = "Unsupported input type"
"""Text in torch.export's error on an input that is an object."""

KNOWN = (torch.Tensor, bool, int, float, complex, str, type(None))


@contextmanager
def traced_forward() -> Iterator[list[str]]:
    """A context in which torch.distributions do not check values (there are none), torch.nn's transformers do not ask
    whether a mask is causal, and `inference_mode` is `no_grad` (torch.export does not trace it: what is computed inside
    would have gradients). Gives a list of the user's lines that computed gradients. Raises CaptureError, inside, where
    a backward runs or torch's generator is seeded."""
    original, taken = torch.autograd.grad, list[str]()

    def grad(*args: Any, **kwargs: Any) -> Any:
        taken.append(caller())
        return original(*args, **kwargs)

    with (
        unvalidated_distributions(),
        masks_unread(),
        mock.patch.object(torch.autograd, "grad", grad),
        mock.patch.object(torch.autograd, "backward", _refuse_backward),
        mock.patch.object(torch.Tensor, "backward", _refuse_backward),
        mock.patch.multiple(torch.inference_mode, __enter__=_enter_inference, __exit__=_leave_inference),
        _refusing_seeds(torch.manual_seed),
        _refusing_seeds(torch.seed),
    ):
        yield taken


def _refuse_backward(*_: Any, **__: Any) -> NoReturn:
    raise CaptureError(
        f"{caller()} runs a backward in forward, and a graph has one, behind the loss: its gradients would be missing; "
        "add what it is of to the loss"
    )


def _enter_inference(mode: Any) -> None:
    mode.before = torch.is_grad_enabled()
    torch.set_grad_enabled(not mode.mode)


def _leave_inference(mode: Any, *_: Any) -> None:
    torch.set_grad_enabled(mode.before)


@contextmanager
def _refusing_seeds(function: Callable[..., Any]) -> Iterator[None]:
    """A context in which `function` raises CaptureError in the tracing thread."""
    tracing, function = threading.current_thread(), inspect.unwrap(function)
    original = copied(function)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not tracing:  # code that is tried aside
            return original(*args, **kwargs)
        raise CaptureError(
            f"{caller()} seeds torch's generator in forward, and a graph has no seeds: what it draws would be other "
            "numbers in every step; draw them once, when the model is made, and keep them as a buffer"
        )

    with redirected(function, refuse):
        yield


DERIVED = (
    "derivatives of a whole batch are taken in forward by torch.func (grad, vjp), and torch.export makes constants of "
    "what they are of; take those of each sample, torch.func.vmap(torch.func.grad(f)), use jacrev or hessian, or "
    "write them out as a formula"
)
ARRAYS = "give tensors in place of arrays (torch.from_numpy)"
OBJECTS = "make it in forward, or in the model, of what tensors say (create_block_mask for a BlockMask)"
WRAPPED = ("functorch tensor", "Expected FakeTensor, got <class 'torch.Tensor'>")
"""Texts in torch's errors on the operand of a derivative by torch.func; the second is torch 2.11's."""


def why_untraced(error: BaseException, taken: list[str], inputs: Mapping[str, Any]) -> str:
    """Why tracing failed with `error`, where the cause is that gradients were computed at the lines `taken`, or that
    `inputs` hold objects; "" where it is another."""
    if UNKNOWN in str(error):
        kinds = {
            name: type(leaf).__name__
            for name, value in inputs.items()
            for leaf in pytree.tree_leaves(value)
            if not isinstance(leaf, KNOWN)
        }
        return (
            f"of its inputs {', '.join(f'{name} is a {kind}' for name, kind in kinds.items())}, and a graph takes "
            f"tensors and numbers; {ARRAYS if set(kinds.values()) == {'ndarray'} else OBJECTS}"
        )
    if any(text in str(error) for text in WRAPPED):
        return DERIVED
    if not taken or UNTRACED not in str(error):
        return ""
    return (
        f"gradients are taken in forward (torch.autograd.grad)\nat {taken[0]}; they are not operators of a graph: take "
        "them of a function by torch.func.grad of each sample (under torch.func.vmap), jacrev or hessian, whose "
        "operators are, write them out as a formula, or compile the part of the model that takes none"
    )
