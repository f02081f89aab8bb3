"""The least that a step can take on a cluster, whatever the plan: every operator cut over all devices, at the best rate that the
device has, and nothing sent."""

from __future__ import annotations

from autopar.cluster import Device
from autopar.cost.compute import vector_dtype
from autopar.problem.graph import Op, Program


def floor_s(program: Program, device: Device, devices: int, *, training: bool) -> float:
    """Seconds of all operators of `program`, forward and backward; a bound for microbatches too, because no operator gets
    cheaper per sample when it gets smaller (autopar.cost.compute)."""
    return sum(_op_s(op, device, devices, training) * op.count for op in program.ops.values() if op.role == "op")


def _op_s(op: Op, device: Device, devices: int, training: bool) -> float:
    flops = op.flops + (op.backward_flops if training and any(t.grad for t in op.call.outs) else 0.0)
    if flops <= 0:
        return 0.0
    matmul = sum(len(t.sizes) > 1 for t in op.call.ins) > 1
    rate = device.flops(op.dtype) * device.achievable if matmul else device.flops(vector_dtype(op.dtype, device))
    return flops / (rate * devices)
