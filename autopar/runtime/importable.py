"""Emitted source that was executed from memory, made importable: torch.compile imports the module of each function that
it inlines, to read its globals."""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType
from typing import cast

from torch import nn


def make_importable(thing: type[nn.Module]) -> None:
    """Add to sys.modules the module of class `thing`, whose source was executed from memory, with its present globals.
    It stays there until the process ends, as compiled code does. Does nothing where the module is imported already."""
    name = thing.__module__
    if name in sys.modules:
        return
    module, forward = ModuleType(name), cast(FunctionType, thing.forward)
    module.__dict__.update(forward.__globals__)
    sys.modules[name] = module
