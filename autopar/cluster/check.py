"""Checks of the numbers in a cluster description: type, sign, and a range wide enough for any machine.

The ranges are there to catch slips of unit (GB/s where bytes/s are wanted), not to judge hardware.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from autopar.errors import ClusterError
from autopar.text import near, shown

# field -> (smallest, largest, what the number is)
RANGES: dict[str, tuple[float, float, str]] = {
    "size": (1, 1 << 20, "a count"),
    "units": (1, 1 << 16, "a count"),
    "tile": (1, 4096, "a count"),
    "bandwidth_bytes_s": (1e6, 1e14, "bytes per second: 50 GB/s is 50e9"),
    "memory_bandwidth_bytes_s": (1e8, 1e15, "bytes per second: 3.35 TB/s is 3.35e12"),
    "memory_bytes": (1 << 20, 1 << 50, "bytes: 80 GiB is 85899345920"),
    "peak_flops": (1e8, 1e18, "FLOP per second: 989 TFLOP/s is 989e12"),
    "start_s": (0.0, 1.0, "seconds: 10 us is 10e-6"),
    "hop_s": (0.0, 1.0, "seconds: 1 us is 1e-6"),
    "latency_s": (0.0, 1.0, "seconds: 5 us is 5e-6"),
    "launch_s": (0.0, 1.0, "seconds: 4 us is 4e-6"),
    "dispatch_s": (0.0, 1.0, "seconds: 10 us is 10e-6"),
    "efficiency": (1e-3, 1.0, "a share of the bandwidth, over 0 and at most 1"),
    "achievable": (1e-3, 1.0, "a share of the peak, over 0 and at most 1"),
    "achievable_of": (1e-3, 1.0, "a share of the peak, over 0 and at most 1"),
    "spread": (0.0, 1.0, "a share of the speed, 0 to 1"),
    "attention_width": (0.0, 4096.0, "the width of heads; 0 where any is alike"),
    "flash2": (1e-3, 1.0, "a share of the rate of attention, over 0 and at most 1"),
    "sustained": (1e-3, 1.0, "a share of what is achievable, over 0 and at most 1"),
    "achievable_bandwidth": (1e-3, 1.0, "a share of the bandwidth, over 0 and at most 1"),
    "vector_flops": (0.0, 1e18, "FLOP per second: 60 TFLOP/s is 60e12; 0 where the peak of float32 is meant"),
    "cache_bytes": (0, 1 << 40, "bytes: 1 MiB is 1048576; 0 where none is known"),
    "cache_bandwidth_bytes_s": (0.0, 1e15, "bytes per second: 50 GB/s is 50e9"),
    "update_s": (0.0, 1.0, "seconds: 10 us is 10e-6"),
    "update": (1e-3, 1.0, "a share of the bandwidth, over 0 and at most 1"),
    "action_s": (0.0, 1.0, "seconds: 100 us is 100e-6"),
    "alone": (1.0, 1024.0, "a ratio of speeds, 1 or more"),
    "contention": (0.0, 1.0, "a share of the compute, 0 to 1"),
    "members": (0, 1 << 20, "a count; 0 is any"),
    "spill_bytes": (0.0, 1e15, "bytes: 1 MiB is 1048576"),
    "spill": (1.0, 1000.0, "a ratio of times, 1 or more"),
    "host_memory_bytes": (0, 1 << 50, "bytes: 256 GB is 256000000000; 0 where none is known"),
    "host_link_bytes_s": (0.0, 1e13, "bytes per second: 50 GB/s is 50e9; 0 where none is known"),
    "host_bandwidth_bytes_s": (0.0, 1e13, "bytes per second: 50 GB/s is 50e9; 0 where none is known"),
    "usable_memory": (1e-3, 1.0, "a share of the memory, over 0 and at most 1"),
}
UNKNOWN = ("contention",)
"""What may be none."""

DTYPES = ("float64", "float32", "bfloat16", "float16", "float8", "float4", "int8")
"""What a device may have a rate of."""

INTEGERS = ("size", "units", "tile", "memory_bytes", "cache_bytes", "members", "host_memory_bytes")
TABLES = ("peak_flops", "achievable_of")
"""What has a number for each dtype."""

TEXTS = ("name", "source", "kind", "algorithm", "topology")


def fail(where: str, key: str, got: object, wanted: str) -> NoReturn:
    """Raise ClusterError: what, where, got and wanted."""
    raise ClusterError(f"{where}: {key} is {shown(got)}; wanted {wanted}")


def check_number(where: str, key: str, value: object, rule: str) -> None:
    """Raise ClusterError unless `value` is a number in the range of `rule`."""
    low, high, meaning = RANGES[rule]
    whole = rule in INTEGERS
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        fail(where, key, value, f"{'a whole number' if whole else 'a number'} ({meaning})")
    if not low <= value <= high:
        fail(where, key, value, f"{low:g} to {high:g} ({meaning})")


def whole(data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with whole numbers that are written as floats (`memory_bytes = 80e9`) as ints, where ints are wanted."""
    return {
        key: int(value) if key in INTEGERS and isinstance(value, float) and value.is_integer() else value
        for key, value in data.items()
    }


def check_fields(obj: object, where: str) -> None:
    """Check every field of a dataclass object that RANGES or TEXTS knows."""
    for key, value in vars(obj).items():
        if isinstance(value, Mapping) and key in TABLES:
            for name, number in value.items():
                check_number(where, f"{key}.{name}", number, key)
        elif key in RANGES and not (key in UNKNOWN and value is None):
            check_number(where, key, value, key)
        elif key in TEXTS and not isinstance(value, str):
            fail(where, key, value, "text")


def check_name(name: str, where: str) -> None:
    """Raise ClusterError unless `name` can name a mesh axis (a0, a1, ... are taken by parts of levels)."""
    if not isinstance(name, str) or not name.isidentifier() or re.fullmatch(r"a\d+", name):
        fail(where, "name", name, "an identifier other than a0, a1, ...")


def check_keys(data: Any, where: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Raise ClusterError unless `data` is a table that has the required keys and no unknown ones."""
    if not isinstance(data, Mapping):
        fail(where, "it", data, f"a table with {', '.join(required)}" if required else "a table")
    known = tuple(dict.fromkeys(required + optional))
    unknown = [key for key in data if key not in known]
    if unknown:
        raise ClusterError(
            f"{where}: unknown key {', '.join(map(repr, unknown))}; known: "
            f"{', '.join(known)}{''.join(near(str(key), known) for key in unknown)}"
        )
    missing = [key for key in required if key not in data]
    if missing:
        raise ClusterError(f"{where}: missing key {', '.join(map(repr, missing))}")
