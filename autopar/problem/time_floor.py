"""The least that a step can take on a shape, whatever its plan: every operator cut over all devices, at the best rates
that a device has, and nothing sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.cluster import Device
from autopar.cost.compute import BACKWARD, attention_share, vector_rate
from autopar.problem.graph import ATTENTION, Op, Program
from autopar.problem.kernels import matmul_dtype, multiplies
from autopar.problem.settings import Settings


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of all operators of a model on one device at its best rates, forward and backward, and of starting them
    once."""

    rates_s: float
    starts_s: float

    @staticmethod
    def of(program: Program, device: Device, settings: Settings, again: Collection[str] = ()) -> Work:
        """The work of `program`, the operators of `again` run forward twice; no operator gets cheaper per sample when
        it gets smaller (autopar.cost.compute), so that of its microbatches is no less."""
        return _whole(by_piece(program, device, settings, again))

    @staticmethod
    def mixed(
        program: Program, devices: Sequence[tuple[Device, int]], settings: Settings, again: Collection[str] = ()
    ) -> Work:
        """The work of a pipeline on so many of each device: on one that is as fast as all are on average.

        Device d weighs w_d, in proportion to how fast it does all of the work, 1 on average. However pieces (operators
        and blocks) are dealt to places, the last one ends no sooner than the mean of w_d times what each has to do, and
        so than each piece's least of w_d times its work on d.
        """
        each = [by_piece(program, device, settings, again) for device, _ in devices]
        alone_s = [_whole(own).rates_s for own in each]
        count, pace = (
            sum(n for _, n in devices),
            sum(n / seconds for (_, n), seconds in zip(devices, alone_s, strict=True)),
        )
        weights = [count / seconds / pace for seconds in alone_s]
        return _whole(
            {
                name: Work(
                    min(w * own[name].rates_s for w, own in zip(weights, each, strict=True)),
                    min(w * own[name].starts_s for w, own in zip(weights, each, strict=True)),
                )
                for name in each[0]
            }
        )

    def step_s(self, devices: int, places: int, microbatches: int) -> float:
        """The least on so many devices, where each place has its part of the operators and starts them for every
        microbatch."""
        return self.rates_s / devices + self.starts_s * microbatches / places


def by_piece(program: Program, device: Device, settings: Settings, again: Collection[str] = ()) -> dict[str, Work]:
    """The work of each piece by name, all instances of a block together, on one device, the operators of `again` run
    forward twice."""
    found: dict[str, Work] = {}
    for op in program.ops.values():
        if op.role == "op" and (op.flops > 0 or op.bytes > 0):
            ways = (0,) * (1 + (op.name in again)) + (1,) * (settings.training and op.graded)
            rates_s = op.count * sum(_direction_s(op, direction, device, settings) for direction in ways)
            starts = op.count * len(ways) if op.leads or not settings.fused else 0
            before = found.get(op.scope or op.name, Work(0.0, 0.0))
            found[op.scope or op.name] = Work(before.rates_s + rates_s, before.starts_s + starts * device.launch_s)
    return found


def _whole(each: Mapping[str, Work]) -> Work:
    return Work(sum(work.rates_s for work in each.values()), sum(work.starts_s for work in each.values()))


def least_wait(paces: Sequence[float], microbatches: int) -> float:
    """The length of a step over its work where each place runs one stage, with whole backwards: how long places wait
    for each other at least.

    Place q does x_q of the work, sum x_q = 1, at `paces` s_q: t_q = x_q / s_q of a microbatch. Before its first and
    behind its last one the places in front of it have to do theirs: a step takes at least m t_q + sum of t_p over p <
    q, for each q; and so at least their mean with any weights w_q, sum w_q = 1, which is sum over q of x_q / s_q (m w_q
    + sum of w_p over p > q). The weights that make all terms of this sum alike (or, where that wants w_q < 0, none
    smaller) give a bound that holds for all x.
    """
    behind = 0.0
    for pace in reversed(paces):
        behind += max(0.0, pace - behind) / microbatches
    return sum(paces) / microbatches / behind


def _direction_s(op: Op, direction: int, device: Device, settings: Settings) -> float:
    """Seconds of one Op forward (0) or backward (1) on one device: no cut has less to calculate or to move than its
    even share."""
    flops = (op.flops, op.backward_flops)[direction]
    moved = ((op.bytes, op.backward_bytes), (op.fused_bytes, op.fused_backward_bytes))[settings.fused][direction]
    bandwidth_bytes_s = max(
        device.cache_bandwidth_bytes_s, device.memory_bandwidth_bytes_s * device.achievable_bandwidth
    )
    return max(flops / _best_rate(op, direction, device, settings), moved / bandwidth_bytes_s)


def _best_rate(op: Op, direction: int, device: Device, settings: Settings) -> float:
    """FLOP/s that no shard of `op` is above: what Prices has for sizes that fill the device."""
    if not multiplies(op):
        return vector_rate(op.dtype, device)
    dtype = matmul_dtype(op, settings)
    if op.target is ATTENTION and device.attention is not None:
        return device.flops(dtype) * attention_share(device, direction, op.call.ins[0].sizes[-1], settings.attention)
    turned = BACKWARD[device.kind] if direction and any(op.weight) else 1.0
    return device.flops(dtype) * device.best_share(dtype) * device.sustained * turned
