"""Every private torch name that the passes use, each with its reason: one place to mend when torch moves."""

from __future__ import annotations

# Exported values are fake tensors; to give a new node its value we must run its op under the very same fake mode.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode"]
