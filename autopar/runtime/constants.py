"""constants.pt beside an emitted file: the tensors that no state dict holds, with the digest of their plan.

The files of a saved folder are replaced one by one, constants first. Each has the digest of its plan, so that whoever
reads the folder during a save, or after one that was killed, sees that the files do not belong together and refuses
them.
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
    """The tensors by name, and the digest of their plan (None in a file of an older version); None where `found`, as
    torch.load gave it, is no dict of tensors."""
    plan = found.get("plan") if isinstance(found, dict) else None
    tensors = found.get("tensors") if isinstance(plan, str) else found
    good = isinstance(tensors, dict) and all(isinstance(value, Tensor) for value in tensors.values())
    return (tensors, plan if isinstance(plan, str) else None) if good else None


def plan_of(source: str) -> str | None:
    """The digest of the plan that an emitted file was emitted for, as its first lines say it; None where they do
    not."""
    written = re.search(r"\| plan ([0-9a-f]{12}) \|", source)
    return written.group(1) if written is not None else None


def disagree(file: object, got: str | None, beside: str, wanted: str | None) -> str | None:
    """The text of an error where `file` has the plan digest `got` and the file `beside` it has `wanted`; None where
    they agree or one has no digest."""
    if got is None or wanted is None or got == wanted:
        return None
    return (
        f"{file} was emitted for plan {got}, but {beside} beside it is plan {wanted}: emit the plan again, or bring "
        "back the file that belongs to it"
    )
