"""Optimizers that run on the host."""

from __future__ import annotations

from autopar.cluster import Device
from autopar.errors import PlanError
from benchmarks.costmodel.predict.setup import Software

COPIED_BYTES = 2
"""Of a weight on its way to the host's device: in 16 bits."""


def host_update_s(device: Device, software: Software, owned: float) -> float:
    """Seconds of an update of the elements that a rank owns: gradients go to the host, the optimizer's pass runs there,
    weights come back. Raises PlanError where nothing is known of the host."""
    link, memory = device.host_link_bytes_s, device.host_bandwidth_bytes_s
    if not link or not memory:
        raise PlanError(f"the optimizer runs on the host of {device.name}, of whose memory nothing is known")
    return owned * ((software.gradient_bytes + COPIED_BYTES) / link + software.optimizer_bytes / memory)
