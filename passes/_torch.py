"""Every private torch name that the passes use, each with its reason: one place to mend when torch moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# What a call_function target is; there is no public name for the class of `torch.ops.aten.add.Tensor`.
from torch._ops import HigherOrderOperator, OpOverload

# Exported values are fake tensors; to give a new node its value we must run its op under the very same fake mode.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

shape_check: Callable[..., Any] = torch._check  # export leaves calls of it in graphs; documented, but with an underscore

__all__ = ["FakeTensor", "FakeTensorMode", "HigherOrderOperator", "OpOverload", "shape_check"]
