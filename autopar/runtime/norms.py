"""Recomputing the running statistics of batch norms, as torch.optim.swa_utils.update_bn does on one device. That
function itself looks for BatchNorm modules, of which a sharded module has none, so it would do nothing.

A forward sets `running = (1 - momentum) * running + momentum * statistic`, and the momentum is a constant of the
program. So from `running = 0` the statistic of one batch is `running / momentum`. In a pipeline a place has only the
buffers that its stages change, which may be some of those of a norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import RunError
from autopar.runtime.collectives import all_reduce_in_place
from autopar.runtime.mesh import Mesh
from autopar.runtime.params import Held

COUNT, STATISTICS = "num_batches_tracked", ("running_mean", "running_var")


class Normed(Protocol):
    """A built model with batch norms."""

    training: bool

    @property
    def NORMS(self) -> Mapping[str, float]: ...
    @property
    def TRAINS(self) -> bool: ...
    @property
    def MESH(self) -> Mesh: ...
    @property
    def _held(self) -> Mapping[str, Held]: ...

    def train(self, mode: bool = True) -> Any: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@torch.no_grad()
def renew(module: Normed, batches: Iterable[Any]) -> None:
    """Set the running statistics to the means over `batches`; after an error they are as before. Raises RunError where
    the module is planned for inference, a norm has momentum 0 or is called twice in a forward, or there are no
    batches."""
    if not module.TRAINS:
        raise RunError(
            "update_bn: this module is planned for inference and takes no statistics of a batch; call it of the "
            "module that trains, and fill this one with load_full(model.full_state_dict())"
        )
    stuck = [name for name, momentum in module.NORMS.items() if momentum == 0]
    if stuck:
        raise RunError(
            f"update_bn: {', '.join(stuck[:5])} {'has' if len(stuck) == 1 else 'have'} momentum 0, so that no batch "
            "shows in the running statistics; compile the model with another momentum"
        )
    parts = {h: momentum for name, momentum in module.NORMS.items() for h in _buffers_of(module, name, STATISTICS)}
    counts = [h for name in module.NORMS for h in _buffers_of(module, name, (COUNT,))]
    before = {h: h.local.clone() for h in (*parts, *counts)}
    training = module.training
    module.train()
    try:
        made = _means(module, batches, parts, counts)
    except BaseException:
        _set(before)
        raise
    finally:
        module.train(training)
    _set(before | made)


def _buffers_of(module: Normed, norm: str, names: Iterable[str]) -> list[Held]:
    """The buffers of a norm that this rank has."""
    return [module._held[full] for name in names if (full := f"{norm}.{name}") in module._held]


def _means(
    module: Normed, batches: Iterable[Any], parts: Mapping[Held, float], counts: Iterable[Held]
) -> dict[Held, Tensor]:
    """The mean of each running statistic over all batches, and the number of batches for each counter; without norms
    that the forward does not call."""
    means, calls, number = dict[Held, Tensor](), dict[str, int](), 0
    for number, given in enumerate(batches, 1):
        _set({h: torch.zeros_like(h.local) for h in (*parts, *counts)})
        _call(module, given)
        calls = calls or _calls(module)
        for h, momentum in parts.items():
            found = h.local / momentum
            means[h] = found if h not in means else means[h] + (found - means[h]) / number
    if not number:
        raise RunError("update_bn: got no batches, wanted one or more (an iterator that was gone through has none)")
    made = means | {h: torch.full_like(h.local, number) for h in counts}
    return {h: value for h, value in made.items() if calls[h.name.rpartition(".")[0]]}


def _calls(module: Normed) -> dict[str, int]:
    """How often each norm was called in the first forward (maximum over ranks); a collective operation. Raises
    RunError, on all ranks, where that is more than once."""
    found = torch.zeros(len(module.NORMS), dtype=torch.int64)
    for i, name in enumerate(module.NORMS):
        for h in _buffers_of(module, name, (COUNT,)):
            found[i] = h.local
    if module.MESH.ranks > 1:
        found = found.to(module.MESH.device)
        all_reduce_in_place(found, dist.ReduceOp.MAX)
    calls = dict(zip(module.NORMS, found.tolist(), strict=True))
    for name, count in calls.items():
        if count > 1:
            raise RunError(
                f"update_bn: {name} takes the statistics of {count} inputs in one forward, which cannot be told apart "
                "in what it keeps. Load full_state_dict() into the model on one device, use "
                "torch.optim.swa_utils.update_bn there, and load_full its state_dict()"
            )
    return calls


def _call(module: Normed, given: Any) -> None:
    if isinstance(given, Mapping):
        module(**given)
    elif isinstance(given, (tuple, list)):
        module(*given)
    else:
        module(given)


def _set(values: Mapping[Held, Tensor]) -> None:
    for held, value in values.items():
        held.local.copy_(value)
