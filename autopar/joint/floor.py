"""The least that a step can take on a shape, whatever its plan: every operator cut over all devices, at the best rates that a
device has, and nothing sent."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopar.cluster import Device
from autopar.cost.compute import BACKWARD, vector_rate
from autopar.problem.graph import Op, Program
from autopar.problem.kernels import ATTENTION, matmul_dtype, multiplies
from autopar.problem.settings import Settings


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of all operators of a model on one device at its best rates, forward and backward, and of starting them once."""

    rates_s: float
    starts_s: float

    @staticmethod
    def of(program: Program, devices: Sequence[tuple[Device, int]], settings: Settings, again: Collection[str] = ()) -> Work:
        """The work of `program` on so many of each device, the operators of `again` run forward twice; no operator gets cheaper per sample when it gets smaller (autopar.cost.compute), so
        that of its microbatches is no less.

        Of several kinds it is that of one which is as fast as all are on average: device d weighs w_d, in proportion to how fast it does all of the
        work, 1 on average. However operators are dealt to devices, the last one ends no sooner than the mean of w_d times what each has to do,
        and so than each operator's least of w_d times its seconds on d.
        """
        ops = [op for op in program.ops.values() if op.role == "op" and (op.flops > 0 or op.bytes > 0)]
        runs = {op.name: (0,) * (1 + (op.name in again)) + (1,) * (settings.training and op.graded) for op in ops}
        leads = [op for op in ops if op.leads or not settings.fused]
        starts = sum(op.count * len(runs[op.name]) for op in leads)
        each = [[op.count * sum(_direction_s(op, direction, device, settings) for direction in runs[op.name]) for op in ops]
                for device, _ in devices]
        if len(devices) == 1:
            return Work(sum(each[0]), starts * devices[0][0].launch_s)
        count, whole = sum(n for _, n in devices), sum(n / sum(own) for (_, n), own in zip(devices, each, strict=True))
        weights = [count / sum(own) / whole for own in each]
        rates_s = sum(min(w * seconds for w, seconds in zip(weights, of_op, strict=True)) for of_op in zip(*each, strict=True))
        return Work(rates_s, starts * min(w * device.launch_s for w, (device, _) in zip(weights, devices, strict=True)))

    def step_s(self, devices: int, places: int, microbatches: int) -> float:
        """The least on so many devices, where each place has its part of the operators and starts them for every microbatch."""
        return self.rates_s / devices + self.starts_s * microbatches / places


def _direction_s(op: Op, direction: int, device: Device, settings: Settings) -> float:
    """Seconds of one Op forward (0) or backward (1) on one device: no cut has less to calculate or to move than its even share."""
    flops = (op.flops, op.backward_flops)[direction]
    moved = ((op.bytes, op.backward_bytes), (op.fused_bytes, op.fused_backward_bytes))[settings.fused][direction]
    bandwidth_bytes_s = max(device.cache_bandwidth_bytes_s, device.memory_bandwidth_bytes_s * device.achievable_bandwidth)
    return max(flops / _best_rate(op, direction, device, settings), moved / bandwidth_bytes_s)


def _best_rate(op: Op, direction: int, device: Device, settings: Settings) -> float:
    """FLOP/s that no shard of `op` is above: what Prices has for sizes that fill the device."""
    if not multiplies(op):
        return vector_rate(op.dtype, device)
    dtype = matmul_dtype(op, settings)
    if op.target is ATTENTION and device.attention is not None:
        return device.flops(dtype) * min(1.0, settings.attention * device.attention[direction])
    turned = BACKWARD if direction and any(op.weight) else 1.0
    return device.flops(dtype) * device.best_share(dtype) * device.sustained * turned
