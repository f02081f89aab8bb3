"""Autocast in forward. Used by devices and export.

On meta, where models are traced, autocast casts nothing; and torch.export, which records its regions all the same,
forgets the `no_grad` regions inside them. So regions have no effect while a model is traced, and those that would
compute in another dtype than the plan are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from autopar.capture.lines import caller
from autopar.cost.memory import POLICIES
from autopar.errors import CaptureError
from autopar.frontend.loading import dtypes_of

Region = tuple[torch.dtype, str]
"""The dtype of an autocast region, and the user's line that begins it."""
_BEGIN: Callable[..., None] = torch.amp.autocast.__init__
_NARROW = {getattr(torch, dtype): policy for policy, (dtype, _) in POLICIES.items()}


@contextmanager
def without_autocast() -> Iterator[list[Region]]:
    """A context in which autocast has no effect; gives the regions that were to have one. They count whether or not
    this machine has their device, and `autocast(x.device.type)` may be asked for on meta."""
    entered: list[Region] = []

    def begin(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        _BEGIN(self, "cpu" if device_type == "meta" else device_type, dtype, False, cache_enabled)
        self._enabled = enabled

    def enter(self: Any) -> Any:
        if self._enabled and self.fast_dtype in _NARROW:
            entered.append((self.fast_dtype, caller()))
        return self

    with mock.patch.multiple(torch.amp.autocast, __init__=begin, __enter__=enter, __exit__=lambda self, *error: None):
        yield entered


def refuse_regions(name: str, model: nn.Module, entered: list[Region]) -> None:
    """Raise CaptureError where a region was entered whose dtype is not the one that `model`, called `name`, computes
    in."""
    computed = dtypes_of(model)[0]
    for dtype, line in entered:
        if dtype != computed:
            said, own = (str(each).removeprefix("torch.") for each in (dtype, computed))
            raise CaptureError(
                f"{name} cannot be captured: {line} computes in {said} under torch.autocast, and the plan would "
                f"compute it in {own}; compile the model with precision={_NARROW[dtype]!r}, in which all of it is "
                f"computed in {said}, or cast activations and weights there in place of autocast"
            )
