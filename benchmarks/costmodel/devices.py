"""The cluster of a published run: what its table calls devices, nodes and networks."""

from __future__ import annotations

import re
from dataclasses import replace

from autopar.cluster import Cluster
from benchmarks.costmodel.networks import network_bytes_s
from benchmarks.costmodel.tables import Line, Refused, count

FORMS = (
    (r"A100(?!.*PCI).*\b40", "a100-40"), (r"A100(?!.*PCI).*\b80", "a100-80"),
    (r"A100.*\b80.*PCI|A100.*PCI.*\b80", "a100-80-pcie"), (r"A800(?!.*PCI)", "a800"),
    (r"V100(?!.*PCI).*\b16", "v100-16"), (r"V100(?!.*PCI).*\b32", "v100"), (r"H100.*\b96", "h100-96"),
    (r"H100.*(\b64|\b94|NVL)", ""), (r"H100.*PCI", "h100-pcie"), (r"H100", "h100"),
    (r"H800(?!.*PCI)", "h800"), (r"GH200", "gh200"), (r"GB200", "gb200"), (r"GB300", "gb300"),
    (r"H200(?!.*NVL)", "h200"), (r"B200", "b200"), (r"B300", "b300"), (r"L40S", "l40s"), (r"L4\b", "l4"),
    (r"A10G", "a10g"), (r"(RTX[- ]?)?A6000", "rtx-a6000"), (r"(RTX[- ]?)?4090(?! ?D\b)", "rtx4090"),
    (r"A40\b", "a40"), (r"(RTX[- ]?)?3090(?! ?TI\b)", "rtx3090"),
    (r"MI300X", "mi300x"), (r"MI325X", "mi325x"), (r"MI355X", "mi355x"),
)  # fmt: skip
"""How tables name devices, whatever stands around that ("H100-SXM5-80GB", "NVIDIA A100 80G"), and their presets: the
first row that fits. Those that there are in several forms name one; of H100 without a word it is that of 80 GB on
SXM."""

NODES = {("v100", 4): "v100-quad"}
"""Presets of devices in nodes of so many, where their links are others then."""

RACK = 64
"""Devices of a rack-scale NVLink domain that jobs take, in whole trays, of its 72."""


def preset_of(text: str) -> str:
    """The preset of the devices that `text` names. Raises Refused where there is none, or `text` does not say which
    form it is."""
    name = re.sub(
        r"(?<![A-Z])(\d{2,3}) ?GI?B?\b", r"\1", re.sub(r"^\d+ ?X ?(?=[A-Z])", "", text.upper().replace("_", "-"))
    )
    found = next((preset for pattern, preset in FORMS if re.search(rf"(?<![A-Z0-9]){pattern}", name)), "")
    if not found:
        raise Refused(f"there is no preset for {text}")
    return found


def cluster_of(line: Line, gpus: int) -> Cluster:
    """Nodes of the devices of a line with the network that it states."""
    preset = preset_of(line["gpu"])
    inside = RACK if "NVL72" in f"{line['interconnect']} {line['gpu']}".upper() else count(line, "gpus_per_node", 8)
    cluster = Cluster.parse(f"{NODES.get((preset, inside), preset)}:{max(1, -(-gpus // inside))}x{min(inside, gpus)}")
    outer, *inner = cluster.levels
    rate = network_bytes_s(line["interconnect"], inside)
    return replace(cluster, levels=(replace(outer, bandwidth_bytes_s=rate), *inner)) if rate else cluster
