"""What autograd really holds between forward and backward: storages once, what is in memory anyway left out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from autopar._torch import pytree
from autopar.bundle import Bundle
from autopar.runtime import regather, rematerialise, replay


class _Held:
    """One saved tensor as autograd holds it; gone when its node of the graph is."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass
class Kept:
    """Every tensor that was saved; `nbytes` counts those that are still held."""

    anyway: tuple[Tensor, ...]
    held: weakref.WeakSet[_Held] = field(default_factory=weakref.WeakSet)

    def pack(self, value: Any) -> _Held:
        """Takes what autograd saves."""
        held = _Held(value)
        self.held.add(held)
        return held

    def storages(self) -> dict[int, Tensor]:
        """Address -> one tensor of every storage that is held now, beside those in memory anyway."""
        known = dict.fromkeys(t.untyped_storage().data_ptr() for t in self.anyway)
        saved = [h.value[0] if isinstance(h.value, tuple) else h.value for h in self.held]  # a tensor and its version
        found = {t.untyped_storage().data_ptr(): t for t in (*saved, *taped()) if isinstance(t, Tensor)}
        return {address: t for address, t in found.items() if address not in known}

    def nbytes(self) -> int:
        """Bytes of those storages."""
        return sum(t.untyped_storage().nbytes() for t in self.storages().values())


def taped() -> list[Tensor]:
    """The kept results of all blocks that are to be run again."""
    calls = [call for call in gc.get_objects() if type(call) is rematerialise._Call]
    parts = pytree.tree_leaves([call.tape.parts for call in calls])
    return [kept.value for kept in parts if isinstance(kept, replay._Kept) and kept.value is not None]


@contextmanager
def keeping(anyway: Iterable[Any]) -> Iterator[Kept]:
    """Count what autograd saves inside, in the emitted module's own hooks too (the innermost hooks are the only ones
    that run)."""
    kept = Kept(tuple(t for t in anyway if isinstance(t, Tensor)))
    pack: Callable[[Tensor], Any] = regather._pack
    unpack: Callable[[Any], Tensor] = regather._unpack
    inner = {"_pack": lambda tensor: kept.pack(pack(tensor)), "_unpack": lambda held: unpack(held.value)}
    with (
        mock.patch.multiple(regather, **inner),
        torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda held: held.value),
    ):
        yield kept


def kept_on_rank(bundle: Bundle, weights: dict[str, Tensor], batch: dict[str, Tensor]) -> int:
    """Bytes that the forward of an emitted module leaves on this rank, beside parameters, buffers and inputs."""
    gc.freeze()  # what earlier jobs on this rank left is not looked at
    module = bundle.build(weights)
    inputs = module.shard_batch(**batch)
    with keeping([*(held.leaf for held in module._held.values()), *inputs]) as kept:
        outputs = module(*inputs)
        assert outputs is not None
        return kept.nbytes()
