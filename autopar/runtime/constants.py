"""constants.pt beside an emitted file: the tensors that no state dict holds, and the plan that they are of.

The files of a saved folder are replaced one by one, the constants first. Each names its plan, so that a reader who comes in between, or after a write that was
killed, finds files that do not belong together and refuses them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NAME = "constants.pt"


def packed(constants: Mapping[str, Tensor], plan: str) -> bytes:
    """The file, as bytes; `plan` is the digest of the plan."""
    buffer = io.BytesIO()
    torch.save({"plan": plan, "tensors": dict(constants)}, buffer)
    return buffer.getvalue()


def unpacked(found: Any) -> tuple[dict[str, Tensor], str | None] | None:
    """The tensors by name and the digest of their plan, None in a file of an older version; None where there are no tensors by name."""
    plan = found.get("plan") if isinstance(found, dict) else None
    tensors = found.get("tensors") if isinstance(plan, str) else found
    good = isinstance(tensors, dict) and all(isinstance(value, Tensor) for value in tensors.values())
    return (tensors, plan if isinstance(plan, str) else None) if good else None


def plan_of(source: str) -> str | None:
    """The digest of the plan that an emitted file was emitted for, as its first lines say it; None where they do not."""
    written = re.search(r"\| plan ([0-9a-f]{12}) \|", source)
    return written.group(1) if written is not None else None


def disagree(file: object, got: str | None, beside: str, wanted: str | None) -> str | None:
    """What an error says of a file that is of the plan `got`, where the one beside it is of `wanted`; None where nothing speaks against them."""
    if got is None or wanted is None or got == wanted:
        return None
    return f"{file} was emitted for plan {got}, but {beside} beside it is plan {wanted}: emit the plan again, or bring back the file that belongs to it"
