"""Refusal of models that are already distributed (DDP, FSDP, DTensor), compiled to something other than Python
(TorchScript), or not initialised (lazy modules). Called by asked and precision."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from autopar.errors import CaptureError

KINDS: dict[type, str] = {
    nn.parallel.DistributedDataParallel: "give autopar the model inside (`model.module`): the plan has the sums of "
    "gradients",
    FullyShardedDataParallel: "give autopar the model before FullyShardedDataParallel wrapped it: the plan shards the "
    "weights",
    FSDPModule: "give autopar the model before fully_shard: the plan shards the weights",
    torch.jit.ScriptModule: "give autopar the Python module that it was scripted from: torch.export traces Python",
}


def refuse_wrapped(model: nn.Module) -> None:
    """Raise CaptureError where a part of `model` is one of KINDS, a parameter is a DTensor, or a tensor has no size
    yet."""
    for name, module in model.named_modules():
        for kind, advice in KINDS.items():
            if isinstance(module, kind):
                raise CaptureError(
                    f"{f'module {name}' if name else type(model).__name__} is a {kind.__name__}; {advice}"
                )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise CaptureError(
                f"parameter {name} is a DTensor on {parameter.device_mesh}: give autopar the model before it is "
                "distributed; the plan says how its weights lie"
            )
    if lazy := [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]:
        raise CaptureError(
            f"{', '.join(lazy[:3])}{', ...' if lazy[3:] else ''} of {type(model).__name__} "
            f"{'has' if len(lazy) == 1 else 'have'} no size yet (a lazy module): "
            "call the model once on a batch before it is compiled"
        )
