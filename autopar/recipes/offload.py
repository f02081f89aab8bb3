"""Named strategies with the optimizer's state on the host, or trained parameters too: another recipe, with the
optimizer's step there (ZeRO-Offload)."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Cluster, Device
from autopar.errors import InfeasibleError, PlanError
from autopar.problem.settings import OFFLOADED, Settings
from autopar.recipes import RECIPES
from autopar.text import gibibytes


@dataclass(frozen=True, slots=True)
class Offload:
    """`base` is the recipe that says how parameters lie, `held` what is on the host (problem.settings.OFFLOADED);
    `about` is one line for users. Raises PlanError where there is no such recipe, or nothing that is held so."""

    name: str
    base: str
    held: str
    about: str

    def __post_init__(self) -> None:
        if self.base not in RECIPES:
            raise PlanError(f"recipe {self.name}: base is {self.base!r}, wanted one of {', '.join(RECIPES)}")
        if self.held not in OFFLOADED[1:]:
            raise PlanError(f"recipe {self.name}: held is {self.held!r}, wanted one of {', '.join(OFFLOADED[1:])}")


_TABLE = (
    Offload(
        "optimizer_offload",
        "zero1",
        "optimizer",
        "ZeRO-1 with optimizer state in the memory of the host, brought to the device for the step",
    ),
    Offload(
        "zero_offload",
        "zero1",
        "parameters",
        "ZeRO-1 with float32 parameters and optimizer state in the memory of the host, where the optimizer steps",
    ),
)

OFFLOADS: dict[str, Offload] = {offload.name: offload for offload in _TABLE}


def checked(name: str, cluster: Cluster, settings: Settings) -> None:
    """Raise PlanError where nothing is trained, or where the cluster does not say what its hosts have."""
    device = cluster.device
    if not settings.training:
        raise PlanError(
            f"recipe {name} puts the state of an optimizer on the host, and mode {settings.mode} has none; use another "
            "recipe"
        )
    if missing := unknown(device):
        raise PlanError(
            f"recipe {name} needs to know the hosts of {cluster.label}, whose device says nothing of "
            f"{', '.join(missing)}: give them in a cluster file (docs/clusters.md)"
        )


def unknown(device: Device) -> list[str]:
    """What the description of `device` does not say of its host."""
    return [
        key for key in ("host_memory_bytes", "host_link_bytes_s", "host_bandwidth_bytes_s") if not getattr(device, key)
    ]


def fits(what: str, host_bytes: float, cluster: Cluster) -> None:
    """Raise InfeasibleError where the host has less than the `host_bytes` that `what` takes for each device."""
    there = cluster.device.host_memory_bytes
    if host_bytes > there:
        raise InfeasibleError(
            f"{what} needs {gibibytes(host_bytes)} of the host for each device, {gibibytes(there)} are there: use "
            "more devices, or keep optimizer state on disk (autopar.runtime.disk_state)",
            missing_bytes=host_bytes - there,
        )
