"""A check that nobody wrote `parameter.data = value`, as code for averages of weights and adversarial training does: a
DTensor takes what the value is (sizes, storage) and keeps its own numbers, in silence.

What gives it away is the storage of the DTensor itself, which holds no numbers: it is the value's then, and the local
tensor is the one that was there before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._torch import local_of
from autopar.errors import RunError
from autopar.runtime.params import Held


@dataclass(frozen=True, slots=True)
class _Seen:
    """A parameter as it was seen last. The storage is held, so that no other one has its address."""

    tensor: Tensor
    local: Tensor
    storage: torch.UntypedStorage


class AssignedData:
    """Watches the parameters among `held`."""

    def __init__(self, held: Mapping[str, Held]) -> None:
        self._held = [one for one in held.values() if isinstance(one.tensor, nn.Parameter)]
        self._seen: dict[str, _Seen] = {}
        self.check()

    def check(self) -> None:
        """Raise RunError where `data` of parameters was assigned since the last time, once for each assignment."""
        if wrong := list(self._assigned()):
            raise RunError(
                f"{wrong[0]}.data = value was written{f', of {len(wrong)} parameters' if len(wrong) > 1 else ''}. A "
                "parameter is a DTensor, which ignores that and has its own numbers still: write them in place, "
                "parameter.data.copy_(value)"
            )

    def _assigned(self) -> Iterable[str]:
        for one in self._held:
            tensor = one.owner.get(one.key)
            if not isinstance(tensor, DTensor):
                continue
            seen, local, storage = self._seen.get(one.name), local_of(tensor), tensor.untyped_storage()
            if seen is not None and seen.storage._cdata == storage._cdata and seen.local is local:
                continue
            self._seen[one.name] = _Seen(tensor, local, storage)
            # another parameter in its place, or one that was cast, has another local tensor too
            if seen is not None and seen.tensor is tensor and seen.local is local:
                yield one.name
