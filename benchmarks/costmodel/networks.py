"""The network between nodes as tables of published runs state it."""

from __future__ import annotations

import re

INSIDE = r"nvlink|nvswitch|xgmi|pcie|infinity fabric"
"""Links inside a node, whose rates are the preset's."""

PORTS_GB_S = {"EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}
"""Gb/s of an InfiniBand port of each generation, of four lanes (InfiniBand Trade Association, roadmap)."""

GENERATION = rf"\b({'|'.join(PORTS_GB_S)})(\d{{3}})?\b"
"""A generation of InfiniBand, and the Gb/s of a port that has fewer lanes (HDR100, NDR200)."""

PORT = rf"\b(?:InfiniBand|IB)\b|{GENERATION}"
RATE = r"(\d+(?:\.\d+)?) ?(?:([GT])(?:b|bit)(?:/s|ps|E)?\b|([GT])B(?:/s|ps)|([GT])\b)"
"""A number, and its unit: of bits, of bytes a second, or without either word, which is bits."""

TIMES = r"\b(\d+) ?x ?(?:[A-Za-z-]+ )*"
OMNIPATH = 0.2
"""Share of four 100 Gb/s OmniPath links that all-reduces of 4 nodes x 8 A100 reach: 15 to 42 Gb/s of algorithm
throughput, twice that on the wire, of 400 (bigscience-workshop/bigscience 9e64edec, experiments/bandwidth)."""


def network_bytes_s(text: str, gpus: int) -> float | None:
    """Bytes per second and device of the network that `text` states for nodes of `gpus`, None where it states none."""
    found = next(
        (
            rate
            for part in re.split(r"[+,;()]| and ", text)
            if not re.search(INSIDE, part, re.I)
            for rate in [_gb_s(part, gpus)]
            if rate
        ),
        None,
    )
    return found * 1e9 / 8 if found else None


def _gb_s(part: str, gpus: int) -> float | None:
    """Gb/s of a device: a number is of each device or of a node where it says so, of each of several ports of a node
    where it says how many; else of an InfiniBand port, of which each device has one as in the nodes of the presets, or
    of a node (clouds state it so)."""
    rate = _stated_gb_s(part)
    if not rate:
        return None
    several = re.search(TIMES + r"(?:\d|[EHNX]DR)", part)
    if several:
        whole = int(several[1]) * rate / gpus
        return whole * OMNIPATH if re.search("OmniPath.*per node", part) else whole
    if re.search(r"(per |/) ?(GPU|device|accelerator)", part, re.I):
        return rate
    of_node = re.search(r"(per |/) ?(node|host|instance|server)", part, re.I) or not re.search(PORT, part)
    return rate / gpus if of_node else rate


def _stated_gb_s(part: str) -> float | None:
    """The number in Gb/s, or that of the generation of InfiniBand."""
    found = re.search(RATE, part)
    if found:
        bits, octets, bare = found.groups()[1:]
        return float(found[1]) * (8 if octets else 1) * (1000 if (bits or octets or bare) == "T" else 1)
    named = re.search(GENERATION, part)
    return float(named[2] or PORTS_GB_S[named[1]]) if named else None
