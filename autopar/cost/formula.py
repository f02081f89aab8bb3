"""The prices of this package as sympy formulas, for display: in batch, sequence, bandwidths and latencies.

Each formula is built from the same parts as the number it stands for, and `comm_values` and `op_values` give its hardware
symbols on this cluster, so that `evaluate(formula, values | sizes)` is the price.

    W_gpu       bandwidth of level gpu, bytes/s    T_gpu_ring_ll, H_gpu_ring_ll    start and hop of protocol ll, s
    F_bfloat16  peak FLOP/s of the device          M, T                            memory bandwidth, bytes/s, launch floor, s
"""

from __future__ import annotations

from typing import Any, TypeAlias

import sympy

from autopar.cluster import Device, MeshAxis, Protocol, Span
from autopar.cost.comm import Part, Way, fastest_ways, way_line
from autopar.cost.compute import VECTOR_DTYPE, best_factor, shape_factor, vector_bound
from autopar.errors import PlanError
from autopar.layout import LOCAL

Size: TypeAlias = "int | sympy.Expr"
Values: TypeAlias = "dict[sympy.Symbol, float]"


def evaluate(formula: sympy.Expr, values: Values) -> float:
    """The number that `formula` is when every symbol has its value. Raises PlanError that names symbols without one."""
    missing = sorted(symbol.name for symbol in formula.free_symbols - values.keys())
    if missing:
        raise PlanError(f"the formula has no value for {', '.join(missing)}; given: {', '.join(sorted(map(str, values)))}")
    # not subs: it replaces one symbol at a time and tries to simplify in between, which takes seconds
    return float(formula.xreplace({symbol: sympy.Float(value, 17) for symbol, value in values.items()}))


def op_formula(flops: sympy.Expr, nbytes: sympy.Expr, dtype: str, device: Device, *,
               matmul: tuple[Size, Size, Size] | None = None) -> sympy.Expr:
    """`compute.op_s` as a formula; symbols as in `op_values`."""
    rate: sympy.Expr = _peak(dtype) if matmul else _vector(dtype, device)
    if matmul:
        m, n, k = map(sympy.sympify, matmul)
        batch = _extreme(sympy.Max, [sympy.Integer(1), flops / (2 * m * n * k)])
        factor = shape_factor(m, n, k, batch, device) / best_factor(device)
        rate = rate * device.achievable * _extreme(sympy.Min, [sympy.Integer(1), factor])
    return _symbol("T") + _extreme(sympy.Max, [flops / rate, _memory(nbytes, device)])


def op_values(dtype: str, device: Device) -> Values:
    """The values of the symbols of `op_formula`."""
    return {_peak(name): device.flops(name) for name in (dtype, VECTOR_DTYPE)} | _device_values(device)


def comm_formula(kind: str, nbytes: sympy.Expr, axis: MeshAxis, *, at_bytes: float | None = None) -> sympy.Expr:
    """`comm.collective_s` as a formula; symbols as in `comm_values`.

    With `at_bytes` only the way that is fastest at that size, which is what a reader wants to see; else the minimum of
    those that are fastest at some size.
    """
    if axis.size == 1:
        return sympy.Integer(0)
    if kind in LOCAL:
        return _symbol("T") + _memory(2 * nbytes, axis.device)
    choices = fastest_ways(kind, axis)
    if at_bytes is not None:
        choices = (min(choices, key=lambda way: _way_s(way, at_bytes)),)
    return _extreme(sympy.Min, [_way_formula(way, nbytes) for way in choices])


def comm_values(axis: MeshAxis) -> Values:
    """The values of the symbols of `comm_formula`."""
    out = _device_values(axis.device)
    for span in axis.spans:
        out[_bandwidth(span)] = span.bandwidth_bytes_s
        for protocol in span.level.protocols:
            start, hop = _latencies(span, protocol)
            out |= {start: protocol.start_s, hop: protocol.hop_s}
    return out


def _way_s(way: Way, nbytes: float) -> float:
    return way_line(way).seconds(nbytes)


def _way_formula(way: Way, nbytes: sympy.Expr) -> sympy.Expr:
    starts = _extreme(sympy.Max, [_latency(part)[0] for part in way])
    hops = sum((part.hops * _latency(part)[1] for part in way if part.hops), sympy.Integer(0))
    line = way_line(way)
    spilled = line.more_s * _extreme(sympy.Max, [sympy.Integer(0), nbytes - line.spill_bytes]) if line.more_s else sympy.Integer(0)
    return starts + hops + _extreme(sympy.Max, [_transfer(part, nbytes) for part in way]) + spilled


def _extreme(function: Any, terms: list[sympy.Expr]) -> sympy.Expr:
    # comparing symbolic terms with each other takes sympy seconds, and they are only decided by numbers
    return function(*terms, evaluate=False) if len(terms) > 1 else terms[0]


def _transfer(part: Part, nbytes: sympy.Expr) -> sympy.Expr:
    share = sympy.nsimplify(part.share, rational=True) if part.share != 1 else sympy.Integer(1)
    return share * nbytes / (part.protocol.efficiency * _bandwidth(part.span))


def _latency(part: Part) -> tuple[sympy.Symbol, sympy.Symbol]:
    return _latencies(part.span, part.protocol)


def _latencies(span: Span, protocol: Protocol) -> tuple[sympy.Symbol, sympy.Symbol]:
    suffix = "_".join(dict.fromkeys((span.level.name, protocol.algorithm, protocol.name)))
    return _symbol(f"T_{suffix}"), _symbol(f"H_{suffix}")


def _bandwidth(span: Span) -> sympy.Symbol:
    return _symbol(f"W_{span.level.name}")


def _peak(dtype: str) -> sympy.Symbol:
    return _symbol(f"F_{dtype.removeprefix('torch.')}")


def _vector(dtype: str, device: Device) -> sympy.Expr:
    """The rate of what is no matmul: a number where it was measured."""
    bound, share = vector_bound(dtype, device)
    return sympy.Float(device.vector_flops) if device.vector_flops else _peak(bound) * share if share < 1 else _peak(bound)


def _memory(nbytes: Size, device: Device) -> sympy.Expr:
    """`Device.memory_s` as a formula."""
    bandwidth = _symbol("M") * device.achievable_bandwidth
    if not device.cache_bytes:
        return nbytes / bandwidth
    cached = _extreme(sympy.Min, [sympy.sympify(nbytes), sympy.Integer(device.cache_bytes)])
    return cached / device.cache_bandwidth_bytes_s + (nbytes - cached) / bandwidth


def _device_values(device: Device) -> Values:
    return {_symbol("M"): device.memory_bandwidth_bytes_s, _symbol("T"): device.launch_s}


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, positive=True)
