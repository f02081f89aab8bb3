"""A model in another floating dtype, as `model.to(dtype)` would make it, without touching the model or copying its
weights. Called by api and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from autopar.capture.capture import capture
from autopar.capture.captured import Captured
from autopar.capture.shadow import shadow
from autopar.capture.targets import refuse_untrained
from autopar.capture.wrapped import refuse_wrapped
from autopar.cost.memory import POLICIES, computes_in, rests_in
from autopar.errors import PlanError
from autopar.frontend import loading


def computation(precision: str, mode: str) -> tuple[torch.dtype, str]:
    """The dtype of the computation, and the precision that a plan states: in training the name of a policy, else that
    dtype. Raises PlanError for what is neither a policy nor a floating dtype."""
    found = getattr(torch, computes_in(precision), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise PlanError(
            f"precision {precision!r} is neither mixed precision ({', '.join(POLICIES)}) nor a floating dtype of torch "
            "(as float32, bfloat16, float16), which all of the model gets"
        )
    return found, precision if precision in POLICIES and mode == "train" else str(found).removeprefix("torch.")


def resting(precision: str, mode: str) -> torch.dtype:
    """The dtype of stored weights for a model computed in `precision`. Raises PlanError as `computation` does."""
    dtype, stated = computation(precision, mode)
    return cast(torch.dtype, getattr(torch, rests_in(str(dtype), stated)))


def capture_in(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    precision: str | None,
    mode: str,
    **options: Any,
) -> tuple[Captured, str]:
    """`capture(model, args, kwargs, mode=mode, **options)` with the model computed in `precision` (None: its own
    dtype), and the precision that a plan states.

    Under a mixed precision policy buffers, and values computed from them alone, keep the buffers' dtypes; under a dtype
    all have that dtype. Raises CaptureError as `capture` does, and where a training step would train nothing."""
    refuse_wrapped(model)
    captured, stated = _captured_in(model, args, kwargs, precision, mode, options)
    if mode == "train":
        refuse_untrained(captured.gm, model)
    return captured, stated


def _captured_in(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    precision: str | None,
    mode: str,
    options: Mapping[str, Any],
) -> tuple[Captured, str]:
    dtype, stated = computation(
        str(loading.dtypes_of(model)[0]).removeprefix("torch.") if precision is None else precision, mode
    )
    typed = model if precision is None else in_dtype(model, dtype)
    if typed is model:
        return capture(model, args, kwargs, mode=mode, **options), stated
    args, kwargs = loading.cast((args, dict(kwargs)), dtype)
    if stated in POLICIES:
        return capture(typed, args, kwargs, mode=mode, rests=model, **options), stated
    return with_values(capture(typed, args, kwargs, mode=mode, **options), model, dtype), stated


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`model` itself where all its floating parameters have `dtype`, else a copy on meta that has."""
    same = all(p.dtype == dtype for p in model.parameters() if p.is_floating_point())
    return model if same else loading.in_dtype(shadow(model), dtype)


def with_values(captured: Captured, model: nn.Module, dtype: torch.dtype) -> Captured:
    """A capture of `in_dtype(model, dtype)` with the values that `model` has for its constants, in `dtype`."""
    held = {name: b for name, b in model.named_buffers() if not b.is_meta}
    values = {
        name: (held[name].to(dtype) if held[name].is_floating_point() else held[name]).detach().cpu()
        if name in held
        else value
        for name, value in captured.constants.items()
    }
    found = {name: held[name] for name in captured.valueless if name in held}
    values |= {name: (b.to(dtype) if b.is_floating_point() else b).detach().cpu() for name, b in found.items()}
    return replace(
        captured, constants=values, valueless=tuple(name for name in captured.valueless if name not in found)
    )
