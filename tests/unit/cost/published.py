"""Published collective measurements, as the tests compare them: (bytes, seconds).

Sources: NVIDIA/dgxc-benchmarking 841f5466 nccl/README.md (H100); stas00/ml-engineering 744d01e1 network/benchmarks
(H200, B200, A100, MI300X); microsoft/SuperScaler fa80ad0 profiler/profiled-time-eurosys (V100); PKU-DAIR/Hetu-Galvatron
cea12ffb galvatron/profile_hardware/hardware_configs (GPU not named there, NVLink3 class); VIA-Research/vTrain f8dda84
trace/a100 (2 and 4 of 8 A100).
"""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Table = list[tuple[float, float]]


def from_us(rows: list[tuple[float, float]]) -> Table:
    """(bytes, microseconds) rows."""
    return [(nbytes, us * 1e-6) for nbytes, us in rows]


def from_bus(rows: list[tuple[float, float]], devices: int) -> Table:
    """(bytes, all-reduce bus bandwidth in GB/s) rows: seconds = 2 (n-1)/n bytes / busbw, as nccl-tests defines it."""
    return [(nbytes, 2 * (devices - 1) / devices * nbytes / (busbw * 1e9)) for nbytes, busbw in rows]


H100_ALL_REDUCE = from_us(
    [
        (8, 13.67),
        (KIB, 16.94),
        (16 * KIB, 17.93),
        (64 * KIB, 19.54),
        (128 * KIB, 19.89),
        (256 * KIB, 20.43),
        (512 * KIB, 20.66),
        (MIB, 27.37),
        (2 * MIB, 42.21),
        (4 * MIB, 54.19),
        (8 * MIB, 83.04),
        (16 * MIB, 123.8),
        (32 * MIB, 199.3),
        (64 * MIB, 324.7),
        (128 * MIB, 586.4),
        (256 * MIB, 1112.5),
        (GIB, 4029),
        (16 * GIB, 62648),
    ]
)
H200_ALL_REDUCE = from_bus(
    [
        (4 * MIB, 107.2),
        (8 * MIB, 155.5),
        (16 * MIB, 219.9),
        (32 * MIB, 275.8),
        (64 * MIB, 346.5),
        (128 * MIB, 401.9),
        (256 * MIB, 436.2),
        (512 * MIB, 450.3),
        (GIB, 463.6),
        (4 * GIB, 473.1),
        (16 * GIB, 482.3),
    ],
    8,
)
H200_4_NODES_ALL_REDUCE = from_bus([(4 * GIB, 364.87)], 32)
B200_ALL_REDUCE = from_bus(
    [
        (32 * KIB, 1.20),
        (128 * KIB, 4.86),
        (256 * KIB, 9.54),
        (512 * KIB, 18.7),
        (MIB, 36.1),
        (2 * MIB, 63.1),
        (4 * MIB, 76.5),
        (8 * MIB, 126.5),
        (16 * MIB, 255.0),
        (32 * MIB, 326.0),
        (64 * MIB, 400.6),
        (128 * MIB, 568.4),
        (256 * MIB, 646.1),
        (512 * MIB, 689.0),
        (GIB, 723.3),
        (4 * GIB, 740.6),
        (8 * GIB, 839.1),
        (16 * GIB, 845.7),
    ],
    8,
)
B200_4_NODES_ALL_REDUCE = from_bus(
    [(512 * MIB, 326.9), (GIB, 362.0), (4 * GIB, 377.3), (8 * GIB, 380.4), (16 * GIB, 381.8)], 32
)
A100_ALL_REDUCE = from_us(
    [
        (32 * KIB, 43.8),
        (64 * KIB, 46.8),
        (128 * KIB, 51.8),
        (256 * KIB, 61.4),
        (512 * KIB, 80.4),
        (MIB, 101.9),
        (2 * MIB, 101.4),
        (4 * MIB, 101.5),
        (8 * MIB, 133.5),
        (16 * MIB, 276.6),
        (32 * MIB, 424),
        (64 * MIB, 684.6),
        (128 * MIB, 1327.6),
        (256 * MIB, 2420.6),
        (512 * MIB, 4218),
        (GIB, 8204),
        (4 * GIB, 32136),
        (16 * GIB, 127997),
    ]
)
A100_SIZES = [MIB * 2**i for i in range(11)]
A100_2_ALL_REDUCE = from_us(
    list(zip(A100_SIZES, (44.2, 53.4, 61.2, 86.9, 131.9, 230.0, 404.7, 763.6, 1455.8, 2838.4, 5442.8), strict=True))
)
A100_4_ALL_REDUCE = from_us(
    list(zip(A100_SIZES, (51.4, 55.7, 77.3, 116.8, 179.6, 284.2, 543.8, 998.6, 1929.0, 3720.0, 7259.4), strict=True))
)
GALVATRON_2_ALL_REDUCE = from_us([(GIB, 5159)])
GALVATRON_4_ALL_REDUCE = from_us([(GIB, 7187)])
V100_SIZES_MB = (20, 40, 80, 160, 320, 480)
V100_ALL_REDUCE = [
    (mb * 1e6, ms * 1e-3) for mb, ms in zip(V100_SIZES_MB, (0.354, 0.635, 1.229, 2.339, 4.650, 6.874), strict=True)
]
# the sizes are those of one rank's tensor, so the whole exchanged tensor is 8 times that
V100_ALL_TO_ALL = [
    (8 * mb * 1e6, ms * 1e-3) for mb, ms in zip(V100_SIZES_MB, (0.513, 0.922, 1.761, 3.329, 6.632, 9.908), strict=True)
]
GALVATRON_ALL_TO_ALL = [
    (8 * MIB * 2**i, ms * 1e-3)
    for i, ms in enumerate((0.1124, 0.1135, 0.1109, 0.1502, 0.2003, 0.243, 0.3997, 0.7135, 1.2981, 2.4822, 4.8151))
]
GALVATRON_ALL_REDUCE = [
    (MIB * 2**i, ms * 1e-3)
    for i, ms in enumerate((0.0790, 0.1094, 0.1333, 0.1827, 0.2941, 0.4157, 0.6519, 1.2826, 2.3584, 4.6768, 8.1409))
]
MI300X_8_ALL_REDUCE = from_bus([(4 * GIB, 312.9)], 8)
MI300X_2_ALL_REDUCE = from_bus([(4 * GIB, 47.7)], 2)
H100_4_ALL_REDUCE = from_bus([(8 * GIB, 363)], 4)
B200_4_ALL_REDUCE = from_bus([(8 * GIB, 673)], 4)

# preset:sizes, collective, devices of the (last) axis, table, relative error that is allowed, whether the preset was
# fitted to it
COMPARED = [
    ("h100:8", "all_reduce", 8, H100_ALL_REDUCE, 0.18, True),
    ("b200:8", "all_reduce", 8, B200_ALL_REDUCE, 0.15, True),
    ("a100-80:8", "all_reduce", 8, A100_ALL_REDUCE, 0.26, True),
    ("a100-80:8", "all_reduce", 2, A100_2_ALL_REDUCE, 0.05, True),
    ("a100-80:8", "all_reduce", 4, A100_4_ALL_REDUCE, 0.07, True),
    ("v100:8", "all_reduce", 8, V100_ALL_REDUCE, 0.03, True),
    ("v100:8", "all_to_all", 8, V100_ALL_TO_ALL, 0.05, True),
    ("a100-80:8", "all_to_all", 8, GALVATRON_ALL_TO_ALL, 0.13, True),
    ("mi300x:8", "all_reduce", 8, MI300X_8_ALL_REDUCE, 0.02, True),
    ("h200:8", "all_reduce", 8, H200_ALL_REDUCE, 0.22, False),
    ("a100-80:8", "all_reduce", 8, GALVATRON_ALL_REDUCE, 0.30, False),
    ("a100-80:8", "all_reduce", 2, GALVATRON_2_ALL_REDUCE, 0.09, False),
    ("a100-80:8", "all_reduce", 4, GALVATRON_4_ALL_REDUCE, 0.04, False),
    ("mi300x:8", "all_reduce", 2, MI300X_2_ALL_REDUCE, 0.08, False),
    ("h100:8", "all_reduce", 4, H100_4_ALL_REDUCE, 0.13, False),
    ("b200:8", "all_reduce", 4, B200_4_ALL_REDUCE, 0.02, False),
    ("h200:4x8", "all_reduce", 32, H200_4_NODES_ALL_REDUCE, 0.03, True),
    ("b200:4x8", "all_reduce", 32, B200_4_NODES_ALL_REDUCE, 0.06, True),
]
