"""The least that a step can take on a shape, whatever its plan: every operator cut over all devices, at the best rate that a
device has, and nothing sent."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Device
from autopar.cost.compute import vector_rate
from autopar.problem.graph import Op, Program


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of all operators of a model on one device at its best rates, forward and backward, and of starting them once."""

    rates_s: float
    starts_s: float

    @staticmethod
    def of(program: Program, device: Device, *, training: bool) -> Work:
        """The work of `program`; no operator gets cheaper per sample when it gets smaller (autopar.cost.compute), so that of its
        microbatches is no less."""
        ops = [op for op in program.ops.values() if op.role == "op" and (op.flops > 0 or op.bytes > 0)]
        starts = sum(op.count * (2 if training and any(t.grad for t in op.call.outs) else 1) for op in ops)
        return Work(sum(_work_s(op, device, training) * op.count for op in ops), starts * device.launch_s)

    def step_s(self, devices: int, places: int, microbatches: int) -> float:
        """The least on so many devices, where each place has its part of the operators and starts them for every microbatch."""
        return self.rates_s / devices + self.starts_s * microbatches / places


def _work_s(op: Op, device: Device, training: bool) -> float:
    if op.flops <= 0:
        return 0.0
    flops = op.flops + (op.backward_flops if training and any(t.grad for t in op.call.outs) else 0.0)
    matmul = sum(len(t.sizes) > 1 for t in op.call.ins) > 1
    return flops / (device.flops(op.dtype) * device.achievable if matmul else vector_rate(op.dtype, device))
