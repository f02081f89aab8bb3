"""The captured graph against the user's own module, on one device, with the same weights and batch and without dropout.

The comparison is in float32: models may cast to it, and not all operators that they call have a float64 kernel. Errors
of capture or of a pass (a wrong mask, a branch of other sizes) are far larger than its rounding. Where the results
differ (batch norms divide by variances over few values), both are compared in float64 too, and agreement in either
dtype counts. Emitted programs are compared with the graph in float64 (`verify.check`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointFunction

from autopar.capture import Captured, lift
from autopar.capture.flags import undropped
from autopar.capture.flexible import plain_flex_attention
from autopar.capture.forwards import InPlaceOf
from autopar.capture.leaves import by_field
from autopar.capture.lift_dtype import lifted
from autopar.capture.outputs import written_key
from autopar.capture.own_backwards import once
from autopar.capture.to_graph import named_leaves
from autopar.runtime.outputs import pack
from autopar.text import first_line
from autopar.verify.case import inputs_of
from autopar.verify.compare import difference
from autopar.verify.randomness import drawn, keep_all
from autopar.verify.reference import train_step
from autopar.verify.report import Row
from passes.switches import evaluate

TOLERANCE = 1e-4
"""Of float32, relative to max(1, the largest value)."""
SINGLE, DOUBLE = torch.float32, torch.float64


def graph_rows(
    model: nn.Module, captured: Captured, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool
) -> tuple[list[Row], list[str]]:
    """Compare `model(*args, **kwargs)` with `captured`: rows of kind "model" for outputs, the structure that they come
    in, gradients and new values of buffers, and notes on what is not compared.

    In training mode, unless the model draws random numbers other than dropout; and in evaluation mode, where that
    differs. A model that does not run in float32 is not compared. The model has its weights, on the CPU, and is not
    changed.
    """
    both = _Both(model, captured, args, kwargs, training)
    drawing, evaluates = drawn(captured.gm), training and captured.evaluation.differs and not captured.evaluation.why
    rows: list[Row] = []
    try:
        if not drawing:
            with undropped():
                rows += _compared(both, keep_all)
        if evaluates:
            with _evaluating(model):
                rows += [replace(row, name=f"{row.name}, in evaluation") for row in _compared(both, evaluate)]
    except _Stopped as stopped:
        return rows, [
            f"the model is not compared with its graph: by itself it does not run in float32 on a CPU ({stopped})"
        ]
    return rows, [
        f"the model draws random numbers ({', '.join(drawing[:3])}): it is {'' if evaluates else 'not '}compared with "
        f"its graph{' in evaluation alone' if evaluates else ''}"
    ] if drawing else []


class _Stopped(RuntimeError):
    """The model itself fails in a dtype; the text is the first line of its error."""


@dataclass(frozen=True)
class _Both:
    """A model and the graph that was captured of it, with the inputs of both; `training`: gradients are compared."""

    model: nn.Module
    captured: Captured
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    training: bool


def _compared(both: _Both, still: Callable[[fx.GraphModule], object]) -> list[Row]:
    """The rows of a comparison in float32; where some are wrong, of each row the better one of float32 and float64.
    `still` brings the graph, in place, into the mode that the model is in."""
    rows = _rows(both, still, SINGLE)
    if all(row.ok for row in rows):
        return rows
    try:
        exact = _rows(both, still, DOUBLE)
    except RuntimeError:  # the model has casts or operators that know no float64
        return rows
    return [min(pair, key=lambda row: row.error) for pair in zip(rows, exact, strict=True)]


def _rows(both: _Both, still: Callable[[fx.GraphModule], object], dtype: torch.dtype) -> list[Row]:
    """The rows of a comparison in `dtype`."""
    model, captured = both.model, both.captured
    gm = lift(captured.gm, dtype)
    still(gm)
    names: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    held = {name: tensor for name, tensor in captured.constants.items() if name in names}
    weights = _cast({**names, **captured.constants}, dtype)
    kinds = [entry["kind"] for entry in gm.meta["outputs"] if entry["kind"] != "mutation"] if both.training else []
    inputs = _cast(inputs_of(captured, both.args, both.kwargs), dtype)
    got = train_step(gm, weights, inputs, training=both.training)
    try:
        result, outputs, gradients, buffers = _model_step(both, held, kinds, dtype)
    except RuntimeError as error:
        raise _Stopped(first_line(error)) from error
    if len(outputs) != len(got["output"]):
        return [_row(f"{len(outputs)} outputs of the model, {len(got['output'])} of its graph", math.inf)]
    rows = [_structure(captured, result)]
    rows += [
        _row(name, difference(value, wanted))
        for (name, value), wanted in zip(got["output"].items(), outputs, strict=True)
    ]
    found = {name: torch.zeros_like(value) for name, value in gradients.items()} | got["gradient"]
    rows += [
        _row(f"gradient of {name}", difference(value, gradients.get(name, torch.zeros_like(value))))
        for name, value in found.items()
    ]
    new = {
        name: value
        for name, value in got["buffer"].items()
        if still is not evaluate or name in captured.evaluation.changing
    }
    changed = [name for name, value in buffers.items() if name in new or not torch.equal(value, weights[name])]
    return rows + [_row(f"new {name}", difference(new.get(name, weights[name]), buffers[name])) for name in changed]


def _row(name: str, error: float) -> Row:
    return Row(name, "model", error, TOLERANCE)


def _structure(captured: Captured, result: Any) -> Row:
    """The row that compares the structure in which the emitted module gives its outputs with that of `result`, what the
    model gives."""
    got, wanted = pack(captured.structure, lambda number: "tensor"), _form(result, captured.left_out)
    same = got == wanted and _keys(got) == _keys(wanted)
    what = "structure of outputs"
    return _row(what, 0.0) if same else _row(f"{what}: {got} of the graph, {wanted} of the model", math.inf)


def _form(tree: Any, left_out: Collection[str], path: str = "") -> Any:
    """The structure of what a model gives, as far as an emitted program can give it again: of dicts and tuples, with
    None for numbers and for what is `left_out`."""
    if path in left_out:
        return None
    if isinstance(tree, Tensor):
        return "tensor"
    if isinstance(tree, Mapping):
        return {
            written_key(key): _form(item, left_out, f"{path}.{key}".removeprefix(".")) for key, item in tree.items()
        }
    if isinstance(tree, (tuple, list)):
        return tuple(_form(item, left_out, f"{path}.{at}".removeprefix(".")) for at, item in enumerate(tree))
    return tree if isinstance(tree, (str, bool)) else None


def _keys(tree: Any) -> list[Any]:
    """The keys of the dicts of a structure, in order, which two dicts that are equal need not share."""
    if isinstance(tree, Mapping):
        return [*tree, *map(_keys, tree.values())]
    return [_keys(item) for item in tree] if isinstance(tree, tuple) else []


def _model_step(
    both: _Both, held: Mapping[str, Tensor], kinds: Sequence[str], dtype: torch.dtype
) -> tuple[Any, list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """One step of the model, with the constants `held` in place of its own: what it gives, dataclasses as dicts; its
    output tensors in order, without those that the graph leaves out; the gradients of its loss, the output whose entry
    in `kinds` is "loss" (none where `kinds` are empty); and after the forward, its buffers and the weights that do not
    train."""
    model = both.model
    own = dict(model.named_parameters())
    leaves = {
        name: tensor.requires_grad_(own[name].requires_grad and bool(kinds))
        for name, tensor in _cast(own, dtype).items()
    }
    buffers = _cast({**dict(model.named_buffers()), **held}, dtype)
    with _as_captured(), torch.set_grad_enabled(bool(kinds)):
        placed = _everywhere(model, {**leaves, **buffers})  # functional_call writes assigned buffers into this dict
        given = tuple(_cast(dict(enumerate(both.args)), dtype).values())
        with InPlaceOf(_by_place(model, placed)):
            result = functional_call(model, placed, given, _cast(both.kwargs, dtype), tie_weights=False)
    result = by_field(result)
    outputs = [
        leaf
        for name, leaf in named_leaves(result).items()
        if isinstance(leaf, Tensor) and not any(f"{name}.".startswith(f"{other}.") for other in both.captured.left_out)
    ]
    if "loss" in kinds and len(kinds) == len(outputs):
        outputs[kinds.index("loss")].backward()
    after = {
        name: placed[name].detach()
        for name in {
            **{name: None for name, tensor in own.items() if not tensor.requires_grad},
            **dict(model.named_buffers()),
        }
        if name in placed
    }
    return (
        result,
        [output.detach() for output in outputs],
        {name: leaf.grad.to_dense() for name, leaf in leaves.items() if leaf.grad is not None},
        after,
    )


def _everywhere(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`values` of parameters and buffers wherever these are registered, in each module once: a module with two names
    would keep the second value (torch 2.13)."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    by_tensor = {id(tensor): values[name] for name, tensor in named if name in values}
    return {
        f"{path}.{key}".removeprefix("."): by_tensor[id(tensor)]
        for path, module in model.named_modules()
        for key, tensor in {**module._parameters, **module._buffers}.items()
        if tensor is not None and id(tensor) in by_tensor
    }


def _by_place(model: nn.Module, placed: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The model's own parameters and buffers, which it may hold in lists too, each with the one that is in its
    place."""
    named = (*model.named_parameters(), *model.named_buffers())
    return [(tensor, placed[name]) for name, tensor in named if name in placed]


def _cast(tensors: Mapping[Any, Any], dtype: torch.dtype) -> dict[Any, Any]:
    """Copies, in `dtype` where they are floating."""
    return {
        name: item.detach().to(lifted(item.dtype, dtype), copy=True) if isinstance(item, Tensor) else item
        for name, item in tensors.items()
    }


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """A context with the model in evaluation mode; afterwards each module has its own mode again."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _as_captured() -> Iterator[None]:
    """A context in which re-entrant checkpoints do not recompute (they would use the model's weights after
    functional_call has put them back), and flex_attention has gradients."""
    with mock.patch.object(CheckpointFunction, "apply", once), plain_flex_attention():
        yield
