"""The roofline of an operator."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster, Device, presets
from autopar.cost.compute import matmul_efficiency, op_s

# MAMF in TFLOP/s at the best shape, bf16: stas00/ml-engineering 744d01e1 compute/accelerator
MAMF = {"a100-80": 271.2, "h100": 794.5, "h200": 794.5, "b200": 1745, "mi300x": 668.4}
# torch.mm in float32, 1 thread: size, GFLOP/s; the measurement that cpu.toml names
CPU_MATMUL = {32: 29.1, 64: 72.9, 128: 96.4, 256: 103.2, 512: 103.6, 1024: 100.7}

devices = st.sampled_from(presets()).map(lambda name: Cluster.parse(name).device)
dims = st.integers(1, 1 << 15)


def matmul_s(device: Device, m: int, n: int, k: int, dtype: str = "float32", itemsize: int = 4) -> float:
    return op_s(2.0 * m * n * k, itemsize * (m * n + m * k + n * k), dtype, device, matmul=(m, n, k))


@pytest.mark.parametrize("name, tflops", MAMF.items())
def test_the_published_best_matmul_is_reached(name: str, tflops: float) -> None:
    device = Cluster.parse(name).device
    assert device.best_shape is not None
    m, n, k = device.best_shape
    seconds = matmul_s(device, m, n, k, "bfloat16", 2) - device.launch_s
    assert 2e-12 * m * n * k / seconds == pytest.approx(tflops, rel=0.002)


@pytest.mark.parametrize("size, gflops", CPU_MATMUL.items())
def test_matmuls_on_one_core(size: int, gflops: float) -> None:
    seconds = matmul_s(Cluster.parse("cpu").device, size, size, size)
    assert 2e-9 * size**3 / seconds == pytest.approx(gflops, rel=0.25)


@given(devices, dims, dims, dims, st.integers(0, 2), st.integers(1, 64))
def test_larger_matmuls_are_more_efficient_but_never_faster(
    device: Device, m: int, n: int, k: int, grow: int, by: int
) -> None:
    small = (m, n, k)
    large = tuple(size * by if index == grow else size for index, size in enumerate(small))
    least, most = (matmul_efficiency(2.0 * a * b * c, (a, b, c), device) for a, b, c in (small, large))
    assert 0 < least <= most * (1 + 1e-9) <= device.achievable * (1 + 1e-9)
    assert matmul_s(device, *small) <= matmul_s(device, *large) * (1 + 1e-9)


@given(devices, st.floats(0, 1e12), st.floats(1, 1e10), st.floats(1, 10))
def test_monotone_in_flops_and_bytes(device: Device, flops: float, nbytes: float, by: float) -> None:
    seconds = op_s(flops, nbytes, "float32", device)
    assert device.launch_s < seconds <= op_s(flops * by, nbytes, "float32", device)
    assert seconds <= op_s(flops, nbytes * by, "float32", device)
    faster = dataclasses.replace(device, memory_bandwidth_bytes_s=device.memory_bandwidth_bytes_s * by)
    assert op_s(flops, nbytes, "float32", faster) <= seconds


def test_a_batch_of_matmuls_fills_the_device_better() -> None:
    device = Cluster.parse("h100").device
    one = matmul_efficiency(2.0 * 128**3, (128, 128, 128), device)
    many = matmul_efficiency(2.0 * 128**3 * 512, (128, 128, 128), device)
    assert many > 5 * one


@pytest.mark.parametrize("batch", [2, 3, 4])
def test_small_matmuls_beside_each_other_take_no_longer_than_one(batch: int) -> None:
    """Each leaves most of the device idle."""
    device = Cluster.parse("h100").device
    one = matmul_efficiency(2.0 * 128**3, (128, 128, 128), device)
    assert matmul_efficiency(2.0 * 128**3 * batch, (128, 128, 128), device) == pytest.approx(batch * one)


def test_a_view_costs_nothing_and_a_tiny_op_its_launch() -> None:
    device = Cluster.parse("h100").device
    assert op_s(0, 0, "float32", device) == 0.0
    assert op_s(8, 64, "float32", device) == pytest.approx(device.launch_s, rel=1e-3)


def test_pointwise_work_does_not_run_on_the_tensor_cores() -> None:
    device = Cluster.parse("h100").device
    assert op_s(1e12, 0, "bfloat16", device) == pytest.approx(1e12 / 67e12 + device.launch_s)
    assert op_s(1e12, 0, "float64", device) == pytest.approx(1e12 / (67e12 / 2) + device.launch_s)


def test_dtypes_without_a_peak_run_as_float32() -> None:
    v100, h100 = Cluster.parse("v100").device, Cluster.parse("h100").device
    assert v100.flops("torch.bfloat16") == v100.flops("float32") == 15.7e12
    assert h100.flops("float8_e4m3fn") == 1979e12
