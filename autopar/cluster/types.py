"""The types of a cluster description. Numbers are checked when an object is made, so no nonsense gets further."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cluster.check import DTYPES, TABLES, check_fields, check_name, fail
from autopar.text import near

if TYPE_CHECKING:
    from autopar.cluster.mesh import Mesh
    from autopar.cluster.places import Places

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send")
ALGORITHMS = {
    "ring": ("all_reduce", "reduce_scatter", "all_gather", "broadcast"),
    "tree": ("all_reduce", "broadcast"),
    "switch": ("all_reduce",),  # the switch itself adds, as NVLink SHARP does
    "direct": ("all_to_all", "send"),
}


@dataclass(frozen=True)
class Protocol:
    """One way in which a level runs collectives; the library in use is taken to pick the fastest for each size.

    A collective costs `start_s` + hops x `hop_s` + moved bytes / (level bandwidth x `efficiency`). Small-message
    protocols start fast and carry little, large-message ones the reverse; the minimum of them is the size-dependent
    efficiency. `kinds` narrows the collectives that it serves; empty means all that `algorithm` can do (ALGORITHMS).
    `members` says that it is for groups of that many parts of the level (0: any), which a calibration has measured;
    other groups take the nearest. Bytes of a collective above `spill_bytes` cost `spill` times as much as those below,
    where they leave the caches of a CPU.
    """

    name: str
    algorithm: str
    start_s: float
    hop_s: float
    efficiency: float
    source: str = ""
    kinds: tuple[str, ...] = ()
    members: int = 0
    spill_bytes: float = 0.0
    spill: float = 1.0

    def __post_init__(self) -> None:
        where = f"protocol {self.name!r}"
        check_fields(self, where)
        if self.algorithm not in ALGORITHMS:
            fail(where, "algorithm", self.algorithm, f"one of {', '.join(ALGORITHMS)}")
        for kind in self.kinds:
            if kind not in ALGORITHMS[self.algorithm]:
                fail(where, "kinds", kind, f"collectives of {self.algorithm}: {', '.join(ALGORITHMS[self.algorithm])}")

    def serves(self, kind: str) -> bool:
        """Whether it can run the collective `kind`."""
        return kind in (self.kinds or ALGORITHMS[self.algorithm])


@dataclass(frozen=True)
class Level:
    """One level of the machine: `size` parts joined by links of `bandwidth_bytes_s`, one direction, per device.

    On a node level this is the network bandwidth *per device* of the node (8 devices and 4 x 100 Gb/s: 6.25e9), so
    devices of one node that run the same collective in different groups do not compete.
    `topology` is "switch" (any pair gets the full bandwidth) or "mesh" (each pair has its own link, so a group of n out
    of `size` gets (n - 1) / (size - 1) of it, as on MI300X).
    """

    name: str
    size: int
    bandwidth_bytes_s: float
    protocols: tuple[Protocol, ...]
    topology: str = "switch"
    source: str = ""

    def __post_init__(self) -> None:
        where = f"level {self.name!r}"
        check_name(self.name, where)
        check_fields(self, where)
        if self.topology not in ("switch", "mesh"):
            fail(where, "topology", self.topology, "switch or mesh")
        for kind in COLLECTIVES:
            if not any(p.serves(kind) and p.algorithm in ("ring", "direct") for p in self.protocols):
                fail(
                    where,
                    "protocols",
                    [p.name for p in self.protocols],
                    f"at least one ring or direct that serves {kind}",
                )

    def serving(self, kind: str, members: int) -> tuple[Protocol, ...]:
        """The protocols that run the collective `kind` in groups of `members`: those for any number, and those for this
        one or, where there are none, for the nearest."""
        able = [p for p in self.protocols if p.serves(kind)]
        nearest = min((p.members for p in able if p.members), key=lambda n: (abs(math.log(n / members)), n), default=0)
        return tuple(p for p in able if p.members in (0, nearest))

    @property
    def latency_s(self) -> float:
        """Seconds of the smallest message between two neighbours."""
        return min(p.start_s + p.hop_s for p in self.protocols)

    def pair_bandwidth_bytes_s(self, members: int) -> float:
        """Bytes per second and direction of one device in a group of `members` (2 or more) of this level."""
        if self.topology == "mesh" and self.size > 1:
            return self.bandwidth_bytes_s * min(1.0, (members - 1) / (self.size - 1))
        return self.bandwidth_bytes_s


DEVICE_KINDS = ("cuda", "cpu")
"""What ranks can run on: torch's device types with a backend here."""

CONTENTION = {"cuda": 20 / 132, "cpu": 1.0}
"""Seconds that a hidden collective adds to the compute over it, per second, by kind of device: its kernels take
multiprocessors, 20 of an H800's 132 in DeepSeek-V3's training (https://arxiv.org/abs/2412.19437, section 3.2.2); the
cores of a CPU do both."""


@dataclass(frozen=True)
class Device:
    """One device: `kind` is "cuda" (ROCm too) or "cpu" (one rank of one thread).

    peak_flops            dense FLOP/s by dtype name (float32, bfloat16, float16, float8, float64)
    achievable            share of the peak that the best matmul shape reaches, and `best_shape` that (m, n, k), where
                          known
    units, tile           multiprocessors, and the edge of the output tile that one of them works on
    memory_bytes          memory of the device; `usable_memory` is the share left by context, libraries and
                          fragmentation
    achievable_bandwidth  share of `memory_bandwidth_bytes_s` that large copies reach
    launch_s              floor of one operator
    dispatch_s            seconds of the host for one operator of an eager forward (0: hidden); the device waits where
                          it has less to do
    sustained             share of `achievable`, and of `attention`, that is left over a whole training step, whose
                          clocks the power limit sets
    spread                standard deviation of the speed of alike devices in different nodes, which wait for the
                          slowest of them
    attention             share of the peak that fused attention reaches on long sequences and heads 128 wide, forward
                          and backward
    attention_width       of heads whose exponentials take as long as their products: w wide they have w / (w + it) of
                          the rate of those without (0: any width is alike)
    flash2                what FlashAttention-2 reaches, as a share of `attention`, where torch runs another kernel
    unaligned             share of a matmul's rate that is left where rows of 16-bit operands begin at odd elements, and
                          where at even ones, but not at multiples of 16 bytes
    achievable_of         `achievable` of dtypes that have another one
    vector_flops          FLOP/s of what is no matmul (GELU, softmax, norms), FLOPs as `passes.annotate_flops` counts
                          them; 0: the peak of float32
    cache_bytes           bytes that an operator may move at `cache_bandwidth_bytes_s`; what is above goes to memory
    update_s              seconds of the host for each parameter tensor in the optimizer's step, beside its bytes
    update                share of the memory's bandwidth that the optimizer's step reaches, counting one pass (below 1:
                          it makes several)
    action_s              seconds of the host for one action of a pipeline schedule (a microbatch forward or backward in
                          a stage), receiving included
    alone                 how many times as fast a rank is when the others of its machine wait: more than 1 where ranks
                          outnumber cores
    contention            share of its compute that a collective takes which runs under it; 1: they share its cores and
                          nothing hides (none: CONTENTION of the kind)
    host_memory_bytes     memory of the host for each device; 0: not known, and nothing is put there
    host_link_bytes_s     rate of copies between device and host, one direction, when all devices of the host copy
    host_bandwidth_bytes_s  bytes per second that a device's share of the host's cores reads and writes in an
                            optimizer's step
    sources               field name -> where the number comes from
    """

    name: str
    kind: str
    peak_flops: dict[str, float] = field(hash=False)
    achievable: float
    units: int
    tile: int
    memory_bytes: int
    usable_memory: float
    memory_bandwidth_bytes_s: float
    achievable_bandwidth: float
    launch_s: float
    best_shape: tuple[int, int, int] | None = None
    dispatch_s: float = 0.0
    sustained: float = 1.0
    spread: float = 0.0
    attention: tuple[float, float] | None = None
    attention_width: float = 0.0
    flash2: float = 1.0
    unaligned: tuple[float, float] = (0.36, 0.36)
    achievable_of: dict[str, float] = field(default_factory=dict, hash=False)
    vector_flops: float = 0.0
    cache_bytes: int = 0
    cache_bandwidth_bytes_s: float = 0.0
    update_s: float = 0.0
    update: float = 1.0
    action_s: float = 0.0
    alone: float = 1.0
    contention: float | None = None
    host_memory_bytes: int = 0
    host_link_bytes_s: float = 0.0
    host_bandwidth_bytes_s: float = 0.0
    sources: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        check_fields(self, where)
        if self.kind not in DEVICE_KINDS:
            fail(where, "kind", self.kind, "cuda or cpu")
        if "float32" not in self.peak_flops:
            fail(where, "peak_flops", sorted(self.peak_flops), "at least float32")
        for key in TABLES:
            if unknown := [dtype for dtype in getattr(self, key) if dtype not in DTYPES]:
                hints = "".join(near(str(dtype), DTYPES) for dtype in unknown)
                fail(where, key, unknown, f"dtypes of {', '.join(DTYPES)}{hints}")
        if self.attention is not None and not (
            len(self.attention) == 2 and all(0 < share <= 1 for share in self.attention)
        ):
            fail(where, "attention", self.attention, "two shares of the peak, forward and backward")
        if (
            self.cache_bytes
            and self.cache_bandwidth_bytes_s < self.memory_bandwidth_bytes_s * self.achievable_bandwidth
        ):
            fail(
                where,
                "cache_bandwidth_bytes_s",
                self.cache_bandwidth_bytes_s,
                "at least what large copies reach, where cache_bytes is given",
            )
        if not all(0 < share <= 1 for share in self.unaligned) or len(self.unaligned) != 2:
            fail(where, "unaligned", self.unaligned, "two shares of the rate, of rows at odd and at even elements")
        if self.best_shape is not None and (len(self.best_shape) != 3 or min(self.best_shape) < 1):
            fail(where, "best_shape", self.best_shape, "three positive sizes m, n, k")

    @property
    def usable_memory_bytes(self) -> int:
        """Bytes that a plan may fill."""
        return int(self.memory_bytes * self.usable_memory)

    @property
    def contended(self) -> float:
        """`contention`, or that of its kind where none is known."""
        return CONTENTION[self.kind] if self.contention is None else self.contention

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s of `dtype` ("bfloat16", "torch.bfloat16", "float8_e4m3fn"); dtypes without an entry run as
        float32."""
        return self.peak_flops.get(_family(dtype), self.peak_flops["float32"])

    def memory_s(self, nbytes: float) -> float:
        """Seconds to read and write `nbytes` in all."""
        cached = min(nbytes, self.cache_bytes)
        near_s = cached / self.cache_bandwidth_bytes_s if cached else 0.0
        return near_s + (nbytes - cached) / (self.memory_bandwidth_bytes_s * self.achievable_bandwidth)

    def best_share(self, dtype: str) -> float:
        """Share of the peak of `dtype` that the best matmul reaches."""
        return self.achievable_of.get(_family(dtype), self.achievable)


def _family(dtype: str) -> str:
    """The name of a dtype in `peak_flops`: all kinds of float8 are one."""
    key = dtype.removeprefix("torch.")
    return "float8" if key.startswith("float8") else key


@dataclass(frozen=True)
class Cluster:
    """Levels, outermost first, of alike devices. Raises ClusterError on anything malformed.

    A cluster of several `parts` (autopar.cluster.mixed), joined by `link` or the slower of their own networks, has its
    ranks part by part; `levels` and `device` are then what all ranks amount to in lockstep.
    """

    name: str
    levels: tuple[Level, ...]
    device: Device
    parts: tuple[Cluster, ...] = ()
    link: Level | None = None

    def __post_init__(self) -> None:
        where = f"cluster {self.name!r}"
        names = [level.name for level in self.levels]
        if not names or len(set(names)) != len(names):
            fail(where, "levels", names, "at least one level, with distinct names")
        check_fields(self, where)

    @staticmethod
    def parse(text: str | Path) -> Cluster:
        """`"h100:8x8"` (8 nodes of 8), `"a100-80:16"` (one node), `"h100"`, `"cpu:1x4"`, a .toml file, also with sizes
        (`"ours.toml:2x8"`), or `"here"`; with + between them parts of one cluster: `"h100:2x8+a100-80:2x8"`
        (two kinds), `"h100:1x8+h100:1x4"` (unequal nodes)."""
        from autopar.cluster.read import parse

        return parse(text)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Cluster:
        """The inverse of `to_dict`; also the form of the TOML files. Raises ClusterError on unknown or missing keys."""
        from autopar.cluster.read import from_dict

        return from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        from autopar.cluster.read import to_dict

        return to_dict(self)

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return math.prod(level.size for level in self.levels)

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s of all devices together in `dtype`."""
        return sum(part.devices * part.device.flops(dtype) for part in self.parts or (self,))

    @property
    def label(self) -> str:
        """`"h100:8x8"`; of parts the name of them all, `"h100:2x8+a100-80:2x8"` if nothing else is said."""
        return self.name if self.parts else f"{self.name}:{'x'.join(str(level.size) for level in self.levels)}"

    def mesh(self, sizes: tuple[int, ...]) -> Mesh:
        """The devices as a row-major grid: the first axis varies slowest, so it is the one across nodes.

        Raises ClusterError when `sizes` do not multiply to the number of devices, or an axis straddles a level.
        """
        from autopar.cluster.mesh import make_mesh

        return make_mesh(self, sizes)

    def places(self, count: int, sizes: tuple[int, ...]) -> Places:
        """`count` groups of devices that hold different pipeline stages, each with a mesh of `sizes`. Raises
        ClusterError as `mesh`, and where one would lie in two parts."""
        from autopar.cluster.places import Places

        return Places(self, count, tuple(sizes))

    def line(self, count: int) -> Cluster:
        """`count` devices side by side on the innermost level, whether it has as many or not."""
        return replace(self, levels=(replace(self.levels[-1], size=count),), parts=(), link=None)

    def meshes(self, max_axes: int = 3) -> list[tuple[int, ...]]:
        """The axis sizes worth trying: at most `max_axes` axes, none of size 1, none that straddles a level.

        Deterministic; fewer axes first, then those whose axes lie on levels, then parts of levels, then crossings.
        """
        from autopar.cluster.mesh import candidates

        return candidates(self, max_axes)

    def describe(self) -> str:
        """A few lines for people."""
        from autopar.cluster.words import describe

        return describe(self)
