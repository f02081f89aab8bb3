"""The machine at hand, as the text of a preset."""

from __future__ import annotations

import os
import re

from autopar import torchrun
from autopar.errors import ClusterError

# device name as the driver reports it, least and most memory in GB -> preset; the first row that fits
KNOWN = (
    (r"V100", 14, 18, "v100-16"),
    (r"V100", 30, 36, "v100"),
    (r"A100.*PCI", 72, 96, "a100-80-pcie"),
    (r"A100-SXM", 36, 48, "a100-40"),
    (r"A100-SXM", 72, 96, "a100-80"),
    (r"A800", 72, 96, "a800"),
    (r"H100 PCI", 72, 90, "h100-pcie"),
    (r"H100 80GB HBM3", 72, 90, "h100"),
    (r"H800", 72, 90, "h800"),
    (r"\bH200$", 130, 160, "h200"),
    (r"GH200", 90, 110, "gh200"),
    (r"\bB200", 170, 200, "b200"),
    (r"\bB300", 260, 300, "b300"),
    (r"GB200", 170, 200, "gb200"),
    (r"GB300", 260, 300, "gb300"),
    (r"MI300X", 180, 215, "mi300x"),
    (r"MI325X", 240, 280, "mi325x"),
    (r"MI355X", 270, 320, "mi355x"),
    (r"\bL4\b", 20, 28, "l4"),
    (r"\bL40S\b", 40, 52, "l40s"),
    (r"\bA10G\b", 20, 28, "a10g"),
    (r"RTX 3090$", 20, 28, "rtx3090"),
    (r"RTX 4090$", 20, 28, "rtx4090"),
    (r"\bA40$", 40, 52, "a40"),
    (r"RTX A6000", 44, 54, "rtx-a6000"),
)


def here() -> str:
    """`"h100:1x8"` for the CUDA devices of this machine, else `"cpu:1x4"` for its cores.

    On ranks, their number is that of the process group, or WORLD_SIZE before there is one; LOCAL_WORLD_SIZE says how
    many are on each node, else as many as there are devices. Raises ClusterError for a device without a preset and for
    devices of several kinds, RunError where the variables are no numbers.
    """
    import torch  # only here: a cluster is plain data everywhere else
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else torchrun.ranks()
    if torch.cuda.is_available():
        each = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        kinds = list(dict.fromkeys(match(device.name, device.total_memory) for device in each))
        if len(kinds) > 1:
            raise ClusterError(
                f"cluster 'here': this machine has devices of several kinds, {' and '.join(kinds)}; show those of one "
                "kind (CUDA_VISIBLE_DEVICES), or name the cluster that is meant"
            )
        return f"{kinds[0]}:{_sizes(ranks, len(each))}"
    return f"cpu:{_sizes(ranks, cores_here())}"


def cores_here() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def match(name: str, memory_bytes: int) -> str:
    """The preset of a device by its name and memory; raises ClusterError where there is none."""
    for pattern, low, high, preset in KNOWN:
        if re.search(pattern, name) and low <= memory_bytes / 1e9 <= high:
            return preset
    raise ClusterError(
        f"cluster 'here': there is no preset for device {name!r} with {memory_bytes / 2**30:.1f} GiB; give the "
        f'preset that is nearest, or a .toml file with base = "..." and what differs'
    )


def machine_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _sizes(ranks: int | None, local: int) -> str:
    """Nodes x devices for so many ranks on machines of `local` devices; one machine where there are no ranks."""
    if ranks is None:
        return f"1x{local}"
    per_node = torchrun.local_ranks() or min(ranks, local)
    if ranks % per_node:
        raise ClusterError(f"cluster 'here': WORLD_SIZE {ranks} is not a multiple of LOCAL_WORLD_SIZE {per_node}")
    return f"{ranks // per_node}x{per_node}"
