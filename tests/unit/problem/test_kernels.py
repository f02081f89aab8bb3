"""Prices of kernels: what alignment does to products."""

from __future__ import annotations

import pytest

from autopar.cluster import Cluster
from autopar.problem.kernels import Kernels
from autopar.problem.options import sections_of, table_of
from autopar.problem.reading import read
from autopar.problem.settings import Settings
from benchmarks.costmodel.predictions import captured
from benchmarks.costmodel.transformer import Config


def products_s(head_dim: int, device: str) -> float:
    """Seconds of the forward of scores and of what they weigh, on one device, per multiplication."""
    sizes = Config(vocab=1024, positions=2048, layers=2, heads=16, kv_heads=16, head_dim=head_dim, hidden=16 * head_dim, ffn=1024, fused_attention=False)
    program = read(captured(sizes, "float16"), {"b": 8, "s": 2048}, training=True, device="cuda")
    table, kernels = table_of(program, 1, sections_of(program, None), None), Kernels(Cluster.parse(device).device, Settings(precision="float16"))
    found = [op for op in program.ops.values() if op.role == "op" and op.flops > 0 and op.scope and "matmul" in op.name]
    assert len(found) == 2
    return sum(kernels.seconds(op, (table[op.name][0],), (1,))[0] for op in found) / head_dim


@pytest.mark.parametrize("device", ["a100-80:1x1", "h100:1x1"])
def test_products_of_activations_with_odd_rows_run_without_tensor_cores(device: str) -> None:
    assert products_s(108, device) > 4 * products_s(112, device)
