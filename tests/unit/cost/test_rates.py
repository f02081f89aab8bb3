"""Rates that kernels lose or keep by how they are called: rows that begin anywhere, narrow heads, float64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.cost.compute import aligned_share, attention_share, straight_share, vector_rate


def test_rows_at_odd_elements_are_slower_than_those_at_even_ones() -> None:
    h100, cpu = Cluster.parse("h100").device, Cluster.parse("cpu").device
    assert (
        aligned_share((768, 50257), 2, h100)
        == h100.unaligned[0]
        < aligned_share((768, 30522), 2, h100)
        == h100.unaligned[1]
        < 1
    )
    assert (
        aligned_share((768, 50304), 2, h100)
        == aligned_share((768, 50260), 4, h100)
        == aligned_share((767, 50257), 2, cpu)
        == 1
    )
    assert aligned_share((768, 50257), 4, h100) == h100.unaligned[1]


def test_narrow_heads_are_slower_where_exponentials_count() -> None:
    h100, a100 = Cluster.parse("h100").device, Cluster.parse("a100-80").device
    assert h100.attention is not None and a100.attention is not None
    for way in (0, 1):
        assert attention_share(h100, way, 128) == attention_share(h100, way, 256) == h100.attention[way]
        assert attention_share(h100, way, 64) == pytest.approx(0.6 * h100.attention[way])
        assert attention_share(a100, way, 64) == attention_share(a100, way, 128) == a100.attention[way]


def test_a_rate_is_no_more_than_the_peak() -> None:
    assert attention_share(Cluster.parse("a100-80").device, 0, 128, 1.7) == 1.0


def test_slow_memory_is_no_slower_by_rows() -> None:
    h100, l4, cpu = (straight_share(Cluster.parse(name).device) for name in ("h100", "l4", "cpu"))
    assert h100 == pytest.approx(0.6, abs=0.01) and l4 == cpu == 1.0


def test_norms_of_wide_rows_are_faster() -> None:
    h100, cpu = Cluster.parse("h100").device, Cluster.parse("cpu").device
    shares = [straight_share(h100, nbytes) for nbytes in (128, 1536, 2048, 4096, 8192)]
    assert shares == sorted(shares) and shares[0] == shares[1] < straight_share(h100) < shares[3] == shares[4] < 1
    assert straight_share(cpu, 128) == 1.0


@pytest.mark.parametrize("name", ["h100", "a100-80", "mi300x", "v100", "h800", "l4", "cpu"])
def test_vector_units_do_float64_at_half_of_float32_at_best(name: str) -> None:
    device = replace(Cluster.parse(name).device, vector_flops=0.0)
    assert vector_rate("float64", device) <= 0.51 * vector_rate("float32", device)
