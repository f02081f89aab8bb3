"""The private torch names that the passes use, each with its reason, so that a change of torch is handled in one
place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch

# The function that computes the memory order of pointwise results (`unasked_layouts` replaces it). It compares sizes,
# which would become conditions on symbolic sizes.
from torch import _prims_common

# The table of decompositions that torch uses for fake tensors; its module is private.
from torch._decomp import decomposition_table

# Operators that torch composes of others keep symbolic sizes only under Python's dispatcher.
from torch._dispatch.python import enable_python_dispatcher

# The classes of targets of call_function nodes, as of `torch.ops.aten.add.Tensor`; they have no public name.
from torch._ops import HigherOrderOperator, OpOverload

# Exported values are fake tensors; to give a new node its value we must run its op under the very same fake mode.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Makes a GraphModule that compiles its code at once, or (where the caller has asked for that) when it is first run.
from torch.fx._lazy_graph_module import _make_graph_module as make_graph_module
from torch.fx.experimental import proxy_tensor

# Traces a function as the operators that it runs below autograd.
from torch.fx.experimental.proxy_tensor import make_fx

# Tells the symbols of sizes that depend on values of tensors (`item`, nonzero) from those of sizes of inputs.
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

# torch's own sympy functions, in expressions of sizes that are divided or converted to floats.
from torch.utils._sympy import functions as size_functions

# A check whose calls export leaves in graphs; it is documented, but its name has an underscore.
shape_check: Callable[..., Any] = torch._check

# An assertion on values that does not wait for the GPU; the operator has no public name.
assert_async: Callable[..., Any] = torch._assert_async

# The meta kernel of `nll_loss` has wrong argument names (`size_average` where the schema has `reduction`, torch 2.13),
# and gives no sizes for losses without reduction. Without that kernel torch's own decomposition runs. There is no
# public way to unregister a kernel.
torch.ops.aten.nll_loss.default.py_kernels.pop(torch._C.DispatchKey.Meta, None)
torch.ops.aten.nll_loss.default._dispatch_cache.clear()

# torch's decompositions of these losses for fake tensors expect the reduction as text, but ATen passes a number (torch
# 2.13), so that every call fails. Without them the operators that the losses are composed of run.
for _loss in (torch.ops.aten.hinge_embedding_loss.default, torch.ops.aten.margin_ranking_loss.default):
    decomposition_table.pop(_loss, None)


def _aligned(log_probs: torch.Tensor, targets: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A fake kernel for CTC losses: a loss for each sample, and what the backward keeps, a number for each step and
    each place among the targets."""
    steps, samples, _classes = log_probs.shape
    return log_probs.new_empty(samples), log_probs.new_empty(samples, steps, 2 * targets.shape[-1] + 1)


# torch has no fake kernels for CTC losses, because the last size of a result that the backward alone reads depends on
# the lengths of targets. Some versions (2.11) have one that raises: allow_override.
for _kernel in ("aten::_ctc_loss", "aten::_ctc_loss.Tensor"):
    torch.library.register_fake(_kernel, _aligned, allow_override=True)
for _kernel in ("aten::_ctc_loss_backward", "aten::_ctc_loss_backward.Tensor"):
    torch.library.register_fake(_kernel, lambda grad, log_probs, *_: torch.empty_like(log_probs), allow_override=True)

# Fake quantisation: the quantised values, and a mask of those in range. torch has no fake kernels for these either.
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
    """`torch.cov` without reading values: with rows of n observations, the products of the centred rows divided by n -
    `correction`."""
    rows = operand.reshape(1, -1) if operand.dim() < 2 else operand
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    total = rows.shape[1] if weights is None else weights.sum()
    left = rows - ((rows if weights is None else rows * weights).sum(1) / total).unsqueeze(1)
    off = correction if aweights is None or weights is None else correction * (weights * aweights).sum() / total
    return (left @ (left if weights is None else left * weights).mT.conj() / (total - off)).squeeze()


# torch's own implementation reads the values of weights, and compares the number of observations with a constant, which
# is not possible for tensors without values. This one runs only where torch traces.
torch.ops.aten.cov.default.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(_covariance)


def _distances(one: torch.Tensor, other: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> torch.Tensor:
    """`torch.cdist` for any number of rows."""
    return torch.ops.aten._cdist_forward.default(one, other, p, compute_mode or 0)


# torch's own implementation uses a matmul for more than 25 rows, which would become a condition on a symbolic batch.
# The graph keeps the operator, which makes that choice when it runs.
torch.ops.aten.cdist.default.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(_distances)


@contextmanager
def unasked_layouts() -> Iterator[None]:
    """A context in which the memory order of traced results is computed without becoming a condition on symbolic sizes.
    `mask[:s, :s]` of 16 rows has other strides where s is 16; a graph of functional operators does not depend on that.
    torch compares for the sake of its own metadata, and there is no public way to leave that out."""
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
    "make_fx",
    "make_graph_module",
    "shape_check",
    "size_functions",
    "unasked_layouts",
]
