"""Emitted source runs from memory, and torch.compile imports the module of each function that it inlines, to know its globals."""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType
from typing import cast

from torch import nn


def make_importable(thing: type[nn.Module]) -> None:
    """Let `import` find the module of a class whose source ran from memory, with the globals that it has now; it stays for as long as the process, as what is compiled does. Nothing where
    the module is a file's."""
    name = thing.__module__
    if name in sys.modules:
        return
    module, forward = ModuleType(name), cast(FunctionType, thing.forward)
    module.__dict__.update(forward.__globals__)
    sys.modules[name] = module
