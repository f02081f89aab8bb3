"""Custom operators (not of torch) that an emitted program calls: a check that they are registered."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.errors import RunError


def registered(operators: Mapping[str, str]) -> None:
    """Raise RunError unless all `operators` are known to torch: "namespace.name.overload" -> the module that registers
    it, "" where that was not known."""
    for name, module in operators.items():
        if not _known(*name.split(".")):
            what = (
                f"import {module}, which registers it"
                if module
                else "import the module, or load the library, that registers it"
            )
            raise RunError(
                f"the program calls operator {name}, which nothing has registered in this process: {what}, in front of "
                "this program: in the script that loads the plan, or at the top of sharded.py"
            )


def _known(namespace: str, name: str, overload: str) -> bool:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return packet is not None and overload in packet.overloads()
