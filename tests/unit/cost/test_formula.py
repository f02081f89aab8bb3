"""The formulas are the prices: with numbers filled in they agree."""

from __future__ import annotations

import pytest
import sympy

from autopar.cluster import Cluster, presets
from autopar.cluster.types import COLLECTIVES
from autopar.cost.comm import collective_s
from autopar.cost.compute import op_s
from autopar.cost.formula import (
    comm_formula,
    comm_values,
    evaluate,
    op_formula,
    op_values,
)
from autopar.errors import PlanError

B, S = sympy.symbols("b s", positive=True, integer=True)
SIZES = ({B: 1, S: 16}, {B: 4, S: 512}, {B: 64, S: 8192})


@pytest.mark.parametrize("text", [f"{name}:2x8" for name in presets()])
def test_collectives(text: str) -> None:
    cluster = Cluster.parse(text)
    nbytes = B * S * 4096 * 2 / 8
    whole, parts = cluster.mesh((16,)).axes[0], cluster.mesh((2, 2, 4)).axes
    for axis, several in ((whole, SIZES), *((axis, SIZES[1:2]) for axis in parts)):
        for kind in (*COLLECTIVES, "slice", "mask"):
            formula = comm_formula(kind, nbytes, axis)
            for sizes in several:
                number = float(nbytes.subs(sizes))
                price = collective_s(kind, number, axis)
                assert evaluate(formula, comm_values(axis) | sizes) == pytest.approx(price, rel=1e-6)
                short = comm_formula(kind, nbytes, axis, at_bytes=number)
                assert evaluate(short, comm_values(axis) | sizes) == pytest.approx(price, rel=1e-6)


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_operators(name: str, dtype: str) -> None:
    device = Cluster.parse(name).device
    flops = 2 * S * S * 128 * B * 32
    nbytes = 2 * B * 32 * S * S + 2 * 2 * B * 32 * S * 128
    for matmul in (None, (S, S, 128)):
        formula = op_formula(flops, nbytes, dtype, device, matmul=matmul)
        for sizes in SIZES:
            shape = None if matmul is None else (sizes[S], sizes[S], 128)
            price = op_s(float(flops.subs(sizes)), float(nbytes.subs(sizes)), dtype, device, matmul=shape)
            assert evaluate(formula, op_values(dtype, device) | sizes) == pytest.approx(price, rel=1e-9)


def test_a_formula_shows_sizes_bandwidth_and_latency() -> None:
    axis = Cluster.parse("h100:8").mesh((8,)).axes[0]
    formula = comm_formula("all_gather", 2 * B * S * 4096, axis, at_bytes=1e9)
    assert {str(symbol) for symbol in formula.free_symbols} == {"b", "s", "W_gpu", "H_gpu_ring_simple", "T_gpu_ring_simple"}
    assert sympy.diff(formula, B) > 0


def test_one_device_is_free() -> None:
    axis = Cluster.parse("h100:1").mesh((1,)).axes[0]
    assert comm_formula("all_reduce", 4 * B * S, axis) == 0


def test_a_symbol_without_a_value_is_named() -> None:
    with pytest.raises(PlanError, match="no value for s; given: b"):
        evaluate(4 * B * S, {B: 2})
