"""Every private torch name that the passes use, each with its reason, so that a change of torch is handled in one
place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch

# How results of pointwise operators lie in memory, and what is told of values that are traced; torch asks there whether
# sizes are those of a tensor without gaps.
from torch import _prims_common

# How torch writes operators with others where tensors are fake; the table is public in torch, its place is not.
from torch._decomp import decomposition_table

# Operators that torch writes with others see symbolic sizes only under Python's dispatcher.
from torch._dispatch.python import enable_python_dispatcher

# What a call_function target is; there is no public name for the class of `torch.ops.aten.add.Tensor`.
from torch._ops import HigherOrderOperator, OpOverload

# Exported values are fake tensors; to give a new node its value we must run its op under the very same fake mode.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Graph modules of the kind that is asked for by who calls the passes: those that compile their code at once, or when it
# is wanted.
from torch.fx._lazy_graph_module import _make_graph_module as make_graph_module
from torch.fx.experimental import proxy_tensor

# Sizes that are read off tensors (`item`) have symbols like all others; what no run but the model's knows must be told
# apart.
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

# How torch writes sizes that are divided, and numbers that are made of sizes, in its own kinds of sympy functions.
from torch.utils._sympy import functions as size_functions

# export leaves calls of it in graphs; documented, but with an underscore
shape_check: Callable[..., Any] = torch._check

# An assertion on data that a GPU is not waited for; the operator has no public name.
assert_async: Callable[..., Any] = torch._assert_async

# The kernel of `nll_loss` on meta takes its arguments by other names: `reduction` for `size_average` (torch 2.13), and
# losses of each row have no sizes. Without it torch's own decomposition runs. There is no public way to take a kernel
# back.
torch.ops.aten.nll_loss.default.py_kernels.pop(torch._C.DispatchKey.Meta, None)
torch.ops.aten.nll_loss.default._dispatch_cache.clear()

# Of these torch has a decomposition for fake tensors that takes the reduction as a word, where ATen has a number (torch
# 2.13), so that it refuses all of them. Without it the operators that they are made of run.
for _loss in (torch.ops.aten.hinge_embedding_loss.default, torch.ops.aten.margin_ranking_loss.default):
    decomposition_table.pop(_loss, None)


def _aligned(log_probs: torch.Tensor, targets: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels of CTC losses give: a loss for each sample, and for its backward a number for each step and each
    place among the targets."""
    steps, samples, _classes = log_probs.shape
    return log_probs.new_empty(samples), log_probs.new_empty(samples, steps, 2 * targets.shape[-1] + 1)


# torch has none for tensors without values, since the last size of what is kept follows from the lengths of targets:
# nobody but the backward sees that. For some torch 2.11 has one that refuses, which 2.13 replaces unasked.
for _kernel in ("aten::_ctc_loss", "aten::_ctc_loss.Tensor"):
    torch.library.register_fake(_kernel, _aligned, allow_override=True)
for _kernel in ("aten::_ctc_loss_backward", "aten::_ctc_loss_backward.Tensor"):
    torch.library.register_fake(_kernel, lambda grad, log_probs, *_: torch.empty_like(log_probs), allow_override=True)

# Nor for numbers as they are after quantisation, with which of them are in range.
for _kernel in (
    "aten::fake_quantize_per_tensor_affine_cachemask",
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "aten::fake_quantize_per_channel_affine_cachemask",
):
    torch.library.register_fake(
        _kernel,
        lambda operand, *_: (torch.empty_like(operand), torch.empty_like(operand, dtype=torch.bool)),
        allow_override=True,
    )


def _covariance(
    operand: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """`torch.cov` of rows of observations: products of what is left without the mean, over as many as there are, less
    `correction`."""
    rows = operand.reshape(1, -1) if operand.dim() < 2 else operand
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    total = rows.shape[1] if weights is None else weights.sum()
    left = rows - ((rows if weights is None else rows * weights).sum(1) / total).unsqueeze(1)
    off = correction if aweights is None or weights is None else correction * (weights * aweights).sum() / total
    return (left @ (left if weights is None else left * weights).mT.conj() / (total - off)).squeeze()


# torch's own looks at the values of weights, and asks of a number of observations whether it is enough, which it cannot
# where there are none. This one runs only where torch traces.
torch.ops.aten.cov.default.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(_covariance)


def _distances(one: torch.Tensor, other: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> torch.Tensor:
    """`torch.cdist`, of rows of any number."""
    return torch.ops.aten._cdist_forward.default(one, other, p, compute_mode or 0)


# torch's own asks whether there are more than 25 rows, to compute the same with a product then, so that a batch would
# have to stay on one side of that. A graph keeps the operator, which asks again when it runs.
torch.ops.aten.cdist.default.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(_distances)


@contextmanager
def unasked_layouts() -> Iterator[None]:
    """Inside, how results lie in memory is told of sizes as they are, and is no condition of them: `mask[:s, :s]` of 16
    rows lies otherwise where s is 16, and a graph of functional operators has nothing of that. torch asks for the sake
    of its own metadata; there is no public way to leave it."""
    order = _prims_common.compute_elementwise_output_logical_to_physical_perm

    def ordered(*tensors: Any, **settings: Any) -> Any:
        sizes = (
            size for tensor in tensors if isinstance(tensor, torch.Tensor) for size in (*tensor.shape, *tensor.stride())
        )
        symbol = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
        with nullcontext() if symbol is None else symbol.node.shape_env.suppress_guards():
            return order(*tensors, **settings)

    told = partial(proxy_tensor._extract_tensor_metadata, include_contiguity=False)
    with (
        mock.patch.object(proxy_tensor, "_extract_tensor_metadata", told),
        mock.patch.object(_prims_common, "compute_elementwise_output_logical_to_physical_perm", ordered),
    ):
        yield


__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "assert_async",
    "enable_python_dispatcher",
    "free_unbacked_symbols",
    "make_graph_module",
    "shape_check",
    "size_functions",
    "unasked_layouts",
]
