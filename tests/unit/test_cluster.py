"""Clusters: presets, text and files, the exact round trip, meshes on levels, and what bad input says."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import types
from pathlib import Path
from typing import Any

import pytest

from autopar.cluster import Cluster, Device, presets
from autopar.cluster.check import RANGES
from autopar.cluster.this_machine import here, match
from autopar.errors import ClusterError

PRESETS = (
    "a100-40",
    "a100-80",
    "a100-80-pcie",
    "a10g",
    "a40",
    "a800",
    "b200",
    "b300",
    "cpu",
    "gb200",
    "gb300",
    "gh200",
    "h100",
    "h100-96",
    "h100-pcie",
    "h200",
    "h800",
    "l4",
    "l40s",
    "mi300x",
    "mi325x",
    "mi355x",
    "rtx-a6000",
    "rtx3090",
    "rtx4090",
    "v100",
    "v100-16",
    "v100-quad",
)


def test_the_presets_are_there() -> None:
    assert presets() == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    cluster = Cluster.parse(name)
    numbers = {
        f.name
        for f in dataclasses.fields(cluster.device)
        if f.name in RANGES and getattr(cluster.device, f.name) != f.default
    }
    numbers = {name for name in numbers if getattr(cluster.device, name) != {}}
    numbers |= {name for name in ("best_shape", "attention") if getattr(cluster.device, name) is not None}
    numbers |= {"unaligned"} if cluster.device.unaligned != Device.unaligned else set()
    assert set(cluster.device.sources) == numbers
    texts = [*cluster.device.sources.values(), *(level.source for level in cluster.levels)]
    texts += [protocol.source for level in cluster.levels for protocol in level.protocols]
    assert all(len(text) > 5 for text in texts)


@pytest.mark.parametrize("name", PRESETS)
def test_every_accelerator_has_a_host_that_takes_time(name: str) -> None:
    """A third of them had none: small layers in eager mode took what their kernels take, on MI355X an eighth of the
    time that they take on H100."""
    device = Cluster.parse(name).device
    assert (device.dispatch_s > 0) is (device.kind == "cuda")


@pytest.mark.parametrize("text", [*PRESETS, "h100:8x8", "mi300x:3x8"])
def test_round_trip_is_exact_and_json(text: str) -> None:
    cluster = Cluster.parse(text)
    data = cluster.to_dict()
    assert json.loads(json.dumps(data)) == data
    again = Cluster.from_dict(json.loads(json.dumps(data)))
    assert again == cluster and again.to_dict() == data and hash(again) == hash(cluster)


@pytest.mark.parametrize(
    "text, sizes",
    [("h100:8x8", (8, 8)), ("a100-80:16", (1, 16)), ("cpu:1x4", (1, 4)), ("l4", (1, 8)), ("gh200:32", (1, 32))],
)
def test_parse_sizes(text: str, sizes: tuple[int, ...]) -> None:
    cluster = Cluster.parse(text)
    assert tuple(level.size for level in cluster.levels) == sizes
    assert cluster.devices == math.prod(sizes)
    assert cluster.label == f"{text.split(':')[0]}:{sizes[0]}x{sizes[1]}"
    assert cluster.label in cluster.describe() and "GB/s" in cluster.describe()


def test_nothing_of_a_cluster_imports_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from autopar.cluster import Cluster; Cluster.parse('h100:2x8').meshes(); print('torch' in "
        "sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_here_is_a_cluster_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert here().endswith(":2x4")
    assert Cluster.parse("here").devices == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ClusterError, match="WORLD_SIZE 8 is not a multiple of LOCAL_WORLD_SIZE 3"):
        here()


def test_here_has_devices_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """All were taken for the first one."""
    import torch

    devices = [types.SimpleNamespace(name="NVIDIA L40S", total_memory=48e9)] * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: devices[index])
    assert here() == "l40s:1x2"
    devices.append(types.SimpleNamespace(name="NVIDIA L4", total_memory=24e9))
    with pytest.raises(ClusterError, match="'here': this machine has devices of several kinds, l40s and l4; show"):
        here()


@pytest.mark.parametrize(
    "name, gib, preset",
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80"),
        ("NVIDIA H200", 139.8, "h200"),
        ("AMD Instinct MI300X", 191.7, "mi300x"),
        ("NVIDIA H100 PCIe", 79.6, "h100-pcie"),
        ("NVIDIA A100 80GB PCIe", 79.3, "a100-80-pcie"),
        ("NVIDIA GH200 480GB", 95.0, "gh200"),
        ("NVIDIA GB200", 184.0, "gb200"),
        ("NVIDIA B200", 178.4, "b200"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16"),
        ("NVIDIA L40S", 44.5, "l40s"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"),
        ("NVIDIA GeForce RTX 3090", 23.6, "rtx3090"),
        ("NVIDIA A40", 44.4, "a40"),
        ("NVIDIA A800-SXM4-80GB", 79.3, "a800"),
    ],
)
def test_devices_are_known_by_name_and_memory(name: str, gib: float, preset: str) -> None:
    assert match(name, int(gib * 2**30)) == preset


@pytest.mark.parametrize(
    "name, gib",
    [
        ("NVIDIA GeForce RTX 3060", 12),
        ("NVIDIA H100 NVL", 93.6),
        ("NVIDIA A100-PCIE-40GB", 39.4),
        ("NVIDIA GH200 144G HBM3e", 141.0),
    ],
)
def test_an_unknown_device_says_what_to_do(name: str, gib: float) -> None:
    """Also one whose links are not those of the preset of like name."""
    with pytest.raises(ClusterError, match=r"no preset for device .*base = "):
        match(name, int(gib * 2**30))


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_over_a_base_changes_only_what_it_names(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'name = "mine"\nbase = "h100:4x8"\n[device]\nusable_memory = 0.8\npeak_flops = {float16 = 5e14}\n'
        '[[levels]]\nname = "node"\nbandwidth_bytes_s = 12.5e9\n',
    )
    mine, base = Cluster.parse(str(path)), Cluster.parse("h100:4x8")
    assert mine.label == "mine:4x8" and mine.levels[1] == base.levels[1]
    assert mine.levels[0] == dataclasses.replace(base.levels[0], bandwidth_bytes_s=12.5e9)
    assert Cluster.parse(f"{path}:2x4").label == "mine:2x4" and Cluster.parse(f"{path}:2x4").device == mine.device
    assert Cluster.parse(f"{path}:2x4+h100:1x8").devices == 16
    assert mine.device.usable_memory == 0.8 and mine.device.flops("float16") == 5e14
    assert mine.device.flops("bfloat16") == base.device.flops("bfloat16")


def test_a_file_takes_away_what_its_device_has_not(tmp_path: Path) -> None:
    """Ampere's tensor cores have no float8: presets listed it at the rate of bfloat16."""
    path = write(
        tmp_path,
        'name = "mine"\nbase = "h100:4x8"\n[device]\npeak_flops = {float8 = false}\nachievable_of = {float8 = false}\n',
    )
    mine = Cluster.parse(str(path)).device
    assert mine.flops("float8") == mine.flops("float32") and mine.best_share("float8") == mine.achievable
    assert all("float8" not in Cluster.parse(name).device.peak_flops for name in ("a100-80", "a10g", "rtx-a6000"))


def test_a_level_may_state_only_a_latency(tmp_path: Path) -> None:
    path = write(tmp_path, 'name = "mine"\nbase = "h100"\n[[levels]]\nname = "node"\nsize = 2\nlatency_s = 30e-6\n')
    level = Cluster.parse(path).levels[0]
    assert level.latency_s == pytest.approx(60e-6)
    assert {p.algorithm for p in level.protocols} == {"ring", "tree", "direct"}


def test_whole_numbers_may_be_written_as_floats(tmp_path: Path) -> None:
    text = 'name = "mine"\nbase = "h100:2x8"\n[device]\nmemory_bytes = {}\n[[levels]]\nname = "node"\nsize = {}\n'
    floats, ints = (
        Cluster.parse(write(tmp_path, text.format(*numbers))) for numbers in (("80e9", "4.0"), ("80000000000", "4"))
    )
    assert floats == ints and floats.to_dict() == ints.to_dict()
    assert type(floats.device.memory_bytes) is type(floats.levels[0].size) is int


BAD_TEXTS = [
    ("h900:8x8", "there is no preset 'h900'; known: a100-40, a100-80, a100-80-pcie"),
    ("h100:", "does not name sizes of node x gpu"),
    ("h100:0x8", "does not name sizes"),
    ("h100:2x2x2", "wanted for example h100:2x2"),
    ("h100:-2", "does not name sizes"),
    ("h100:9999999", "size is 9999999; wanted 1 to"),
    (8, r"cluster 8 \(int\): wanted text, as 'h100:1x8'"),
    (None, "cluster None"),
    ("nowhere.toml", "cluster file nowhere.toml: cannot be read: No such file"),
    ("nowhere.toml:1x8", "cluster file nowhere.toml: cannot be read: No such file"),
]


@pytest.mark.parametrize("text, message", BAD_TEXTS)
def test_bad_text(text: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.parse(text)


def _set(data: dict[str, Any], path: str, value: Any) -> None:
    *way, last = path.split("/")
    target: Any = data
    for key in way:
        target = target[int(key)] if isinstance(target, list) else target[key]
    target[last] = value


BAD_VALUES = [
    ("device/memry_bytes", 5, "device: unknown key 'memry_bytes'; known: name, kind"),
    ("extra", 5, "cluster: unknown key 'extra'; known: name, device, levels"),
    ("levels/0/speed", 5, "level 'node': unknown key 'speed'"),
    ("levels/0/protocols/0/speed", 5, "level 'node', protocol: unknown key 'speed'"),
    (
        "levels/0/bandwidth_bytes_s",
        50,
        "bandwidth_bytes_s is 50; wanted 1e.06 to 1e.14 .bytes per second: 50 GB/s is 50e9",
    ),
    ("levels/0/bandwidth_bytes_s", -50e9, "bandwidth_bytes_s is -50000000000.0"),
    ("levels/0/bandwidth_bytes_s", float("nan"), "bandwidth_bytes_s is nan"),
    ("levels/0/bandwidth_bytes_s", "50 GB/s", "bandwidth_bytes_s is '50 GB/s'; wanted a number"),
    ("levels/0/size", 0, "level 'node': size is 0; wanted 1"),
    ("levels/0/size", 2.5, "size is 2.5; wanted a whole number"),
    ("levels/0/size", True, "size is True; wanted a whole number"),
    ("levels/0/name", "a1", "name is 'a1'; wanted an identifier other than a0, a1"),
    ("levels/0/name", "gpu", "levels is .'gpu', 'gpu'.; wanted at least one level, with distinct names"),
    ("levels/0/bandwidth_bytes_s", {}, "bandwidth_bytes_s is {}; wanted a number"),
    ("levels/0/size", {"float32": 8}, "size is {'float32': 8}; wanted a whole number"),
    ("device/contention", {}, "contention is {}; wanted a number"),
    ("levels/0/topology", "torus", "topology is 'torus'; wanted switch or mesh"),
    ("levels/0/protocols", [], "protocols is ..; wanted at least one ring or direct that serves all_reduce"),
    ("levels/0/latency_s", 1e-6, "level 'node': give either latency_s or protocols"),
    ("levels/0/protocols/0/start_s", 14, "start_s is 14; wanted 0 to 1 .seconds: 10 us is 10e-6"),
    ("levels/0/protocols/0/efficiency", 80, "efficiency is 80; wanted 0.001 to 1 .a share"),
    ("levels/0/protocols/0/algorithm", "star", "algorithm is 'star'; wanted one of ring, tree, switch, direct"),
    ("levels/0/protocols/0/kinds", ["all_to_all"], "kinds is 'all_to_all'; wanted collectives of ring"),
    ("levels/0/protocols/0/kinds", "all_reduce", "kinds is 'all_reduce'; wanted a list"),
    ("levels", {}, "levels is {}; wanted a list"),
    ("levels", [], "wanted at least one level"),
    ("device", [], r"device: it is \[\]; wanted a table"),
    ("device/memory_bytes", 80, "memory_bytes is 80; wanted .* .bytes: 80 GiB is 85899345920"),
    ("device/kind", "tpu", "kind is 'tpu'; wanted cuda or cpu"),
    ("device/peak_flops", {"float32": 67}, "peak_flops.float32 is 67; wanted 1e.08 to 1e.18"),
    ("device/peak_flops", {"bfloat16": 1e15}, "peak_flops is .'bfloat16'.; wanted at least float32"),
    ("device/peak_flops", 1e15, "peak_flops is 1000000000000000.0; wanted a table"),
    ("device/best_shape", [1, 2], "best_shape is .1, 2.; wanted three positive sizes"),
    ("device/best_shape", "1x2x3", "best_shape is '1x2x3'; wanted a list of three whole numbers"),
    ("device/achievable", 0.0, "achievable is 0.0"),
    ("device/memory_bytes", None, "memory_bytes is None; wanted a whole number"),
    ("device/alone", None, "alone is None; wanted a number"),
    ("device/contention", 1.5, "contention is 1.5; wanted 0 to 1 .a share"),
    ("name", 5, "name is 5; wanted text"),
    ("device", "h100", "device: it is 'h100'; wanted a table with name, kind"),
    ("device/unaligned", None, "unaligned is None; wanted a list of two shares"),
    ("device/sources/memory_bytes", 5, "sources.memory_bytes is 5; wanted text"),
    ("device/sources/memory_byte", "measured", "sources is 'memory_byte'; wanted the name of a field .*near: memory_b"),
]


@pytest.mark.parametrize("path, value, message", BAD_VALUES)
def test_bad_values(path: str, value: Any, message: str) -> None:
    data = copy.deepcopy(Cluster.parse("h100:2x8").to_dict())
    _set(data, path, value)
    with pytest.raises(ClusterError, match=message):
        Cluster.from_dict(data)


def test_a_missing_key_is_named() -> None:
    data = Cluster.parse("h100").to_dict()
    del data["device"]["memory_bytes"]
    with pytest.raises(ClusterError, match="device: missing key 'memory_bytes'"):
        Cluster.from_dict(data)


@pytest.mark.parametrize(
    "text, message",
    [
        ("name = ", "mine.toml: is not TOML: "),
        ('name = "m"\n', "mine.toml: cluster: missing key 'device', 'levels'"),
        ('name = "m"\nbase = "h900"\n', "mine.toml: cluster 'h900': there is no preset"),
        ('name = "m"\nbase = "other.toml"\n', "base is 'other.toml'; wanted a preset"),
        ('name = "m"\nbase = "h100"\n[[levels]]\nname = "rack"\n', "name is 'rack'; wanted a level of h100: node, gpu"),
        ('name = "m"\nbase = "h100"\n[device]\nwatts = 700\n', "device: unknown key 'watts'; known: [^(]*$"),
        (
            'name = "m"\nbase = "h100"\n[device]\nusable_memry = 0.8\n',
            r"device: unknown key 'usable_memry'; known: .* \(near: usable_memory.*\)$",
        ),
        (
            'name = "m"\nbase = "h100"\n[device]\nusable_memry = 0.8\nsustaned = 0.9\n',
            r"unknown key 'usable_memry', 'sustaned'; .* \(near: usable_memory.*\) \(near: sustained\)$",
        ),
        ('name = "m"\nbse = "h100"\n', r"cluster: unknown key 'bse'; known: .* \(near: base\)$"),
        ("prts = []\n", r"cluster: unknown key 'prts'; known: .* \(near: parts\)$"),
        ('name = "m"\nbase = "h100"\n[[levels]]\nname = "nodes"\n', r"name is 'nodes'; .* \(near: node\)$"),
        (
            'name = "m"\nbase = "h100"\n[device]\npeak_flops = {bf16 = 1e15}\n',
            r"peak_flops is \['bf16'\]; wanted dtypes of .* \(near: bfloat16.*\)$",
        ),
        ('name = "m"\nbase = "h100"\n[device]\nmemory_bytes = 80.5e0\n', "memory_bytes is 80.5; wanted a whole number"),
        (
            'name = "m"\nbase = "h100"\n[[level]]\nname = "node"\n',
            r"the file: unknown key 'level'; known: base, name, device, levels \(near: levels\)$",
        ),
        ('name = "m"\nbase = "h10:4x8"\n', r"cluster 'h10:4x8': there is no preset 'h10'; .* \(near: h100, .*\)$"),
        ('name = "m"\nbase = "h100"\nsize = 3\n', "the file: unknown key 'size'"),
        (
            'name = "m"\nbase = "h100"\nlevels = 3\n',
            r"levels is 3; wanted a list of levels; in a file each begins with \[\[levels\]\]",
        ),
        (
            'name = "m"\nbase = "h100"\n[levels]\nname = "gpu"\n',
            r"levels is {'name': 'gpu'}; wanted a list of levels; in a file each begins with \[\[levels\]\]",
        ),
        (
            'name = "m"\nbase = "h100"\n[[levels]]\nname = ["gpu"]\n',
            r"levels: name is \['gpu'\]; wanted a level of h100: node, gpu",
        ),
        ('name = "m"\nbase = "h100"\ndevice = 3\n', "device: it is 3; wanted a table$"),
        (
            'name = "m"\nbase = "h100"\n[device.memory_bytes]\ngib = 80\n',
            "memory_bytes is {'gib': 80}; wanted a whole number",
        ),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.parse(write(tmp_path, text))


def test_rates_of_devices_that_differ_from_what_they_are_based_on() -> None:
    mi355x, b200 = (Cluster.parse(name).device for name in ("mi355x", "b200"))
    assert mi355x.flops("float8") == 2 * mi355x.flops("bfloat16") == pytest.approx(256 * 8192 * 2.4e9, rel=0.01)
    assert mi355x.flops("bfloat16") * mi355x.best_share("bfloat16") == pytest.approx(1565e12, rel=1e-3)
    for name in ("b300", "gb300"):
        device = Cluster.parse(name).device
        assert device.flops("float64") == 10e12 / 8 < b200.flops("float64") / 20 and device.flops(
            "float32"
        ) == b200.flops("float32")
    host, grace = Cluster.parse("h100").device, [Cluster.parse(name).device for name in ("gh200", "gb200", "gb300")]
    assert [device.dispatch_s for device in grace] == pytest.approx(
        [host.dispatch_s * linear_us / 13.48 for linear_us in (33.17, 37.08, 37.08)], rel=2e-3
    )


def test_protocols_for_a_number_of_members_serve_the_nearest_too() -> None:
    base = Cluster.parse("cpu:1x8").levels[1]
    measured = [dataclasses.replace(base.serving("all_reduce", 8)[0], name=f"on{n}", members=n) for n in (2, 8)]
    level = dataclasses.replace(base, protocols=(*measured, *base.protocols[1:]))
    served = {n: [p.name for p in level.serving("all_reduce", n)] for n in (2, 3, 4, 8, 64)}
    assert served == {2: ["on2"], 3: ["on2"], 4: ["on2"], 8: ["on8"], 64: ["on8"]}
    assert level.serving("all_gather", 3) == base.serving("all_gather", 3)
