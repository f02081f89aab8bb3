"""The momenta of a model's batch norms, which the emitted module needs beside the graph (runtime.norms). Called by
capture.capture."""

from __future__ import annotations

from torch import nn

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def momenta(model: nn.Module) -> dict[str, float]:
    """The momentum of each batch norm of torch that has running statistics, by its name in `model`."""
    found = {
        name: module.momentum
        for name, module in model.named_modules()
        if isinstance(module, KINDS) and module.running_mean is not None
    }
    # with momentum None the average depends on the module's count of batches, which the graph does not have
    return {name: momentum for name, momentum in found.items() if momentum is not None}
