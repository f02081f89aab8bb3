"""A lower bound on the seconds of a step of any plan: every operator divided evenly over all devices, at the best rates
that a device has, and nothing sent. Called by the planner and autopar.joint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.cluster import Device
from autopar.cost.compute import BACKWARD, attention_share, vector_rate
from autopar.problem.branches import Branches
from autopar.problem.graph import ATTENTION, Op, Program
from autopar.problem.kernels import matmul_dtype, multiplies
from autopar.problem.settings import Settings


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a model on one device, forward and backward: seconds of its operators at the device's best rates, and
    seconds in which one rank launches each of them once, or its even share of branches that may work side by side.
    `through_s` and `through_starts_s` are the parts of these that samples go through one stage after the other: without
    the gradients of weights, for which no other stage waits."""

    rates_s: float
    starts_s: float
    through_s: float
    through_starts_s: float

    @staticmethod
    def of(
        program: Program, branches: Branches, device: Device, settings: Settings, again: Collection[str] = ()
    ) -> Work:
        """The work of `program`, where the operators of `again` run forward twice. No operator gets cheaper per sample
        when it gets smaller (autopar.cost.compute), so n microbatches have at least this work together."""
        return _whole(by_piece(program, branches, device, settings, again))

    @staticmethod
    def mixed(
        program: Program,
        branches: Branches,
        devices: Sequence[tuple[Device, int]],
        settings: Settings,
        again: Collection[str] = (),
    ) -> Work:
        """The work of a pipeline on several kinds of devices, (device, number of them), as work on one average device.

        Device d gets the weight w_d, in proportion to its speed on the whole model, with mean 1. The slowest place
        takes at least the mean over all places of w_d times the time of its pieces (operators and blocks). So whichever
        place a piece is on, it adds at least the least of w_d times its work on d, over all d.
        """
        each = [by_piece(program, branches, device, settings, again) for device, _ in devices]
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
                    min(own[name].through_s for own in each),
                    min(own[name].through_starts_s for own in each),
                )
                for name in each[0]
            }
        )

    def step_s(self, devices: int, places: int, microbatches: int) -> float:
        """A lower bound of a step on `devices` devices in so many places: each place has a part of the operators, and
        launches them for every microbatch."""
        return self.rates_s / devices + self.starts_s * microbatches / places

    def chain_s(self, devices: int, places: int, microbatches: int) -> float:
        """A lower bound of a step of several places: one microbatch goes through all of them and back, and each place
        works on it alone."""
        return self.through_s * places / (devices * microbatches) + self.through_starts_s


NO_WORK = Work(0.0, 0.0, 0.0, 0.0)


def by_piece(
    program: Program, branches: Branches, device: Device, settings: Settings, again: Collection[str]
) -> dict[str, Work]:
    """The work of each piece by name, all instances of a block together, on one device, the operators of `again` run
    forward twice."""
    found: dict[str, Work] = {}
    for op in program.ops.values():
        if op.role == "op" and (op.flops > 0 or op.bytes > 0):
            ways = (0,) * (1 + (op.name in again)) + (1,) * (settings.training and op.graded)
            each_s = [least_s(op, direction, device, settings) for direction in ways]
            rates_s, weighs = op.count * sum(each_s), _weights_share(op) if ways[-1] else 0.0
            start_s = device.launch_s / branches.beside(op.name) if op.leads or not settings.fused else 0.0
            before = found.get(op.scope or op.name, NO_WORK)
            found[op.scope or op.name] = Work(
                before.rates_s + rates_s,
                before.starts_s + op.count * len(ways) * start_s,
                before.through_s + rates_s - op.count * weighs * each_s[-1],
                before.through_starts_s + op.count * (len(ways) - weighs) * start_s,
            )
    return found


def _whole(each: Mapping[str, Work]) -> Work:
    """The sum of the work of all pieces."""
    return Work(
        sum(work.rates_s for work in each.values()),
        sum(work.starts_s for work in each.values()),
        sum(work.through_s for work in each.values()),
        sum(work.through_starts_s for work in each.values()),
    )


def _weights_share(op: Op) -> float:
    """The share of the backward of all instances of `op` that is for gradients of weights: in a first block, whose
    input has no gradient, all of it may be."""
    first = 1.0 if op.first_share < 1.0 else op.weights_share
    return (first + (op.count - 1) * op.weights_share) / op.count


def least_wait(paces: Sequence[float], microbatches: int) -> float:
    """A lower bound of (seconds of a step) / (seconds of the work on all places together), where each place runs one
    stage with whole backwards: how long the places of a pipeline wait for each other at least. `paces`: the relative
    speeds s_q of the places, first to last. `microbatches`: m.

    Place q does the share x_q of the work, sum x_q = 1, and takes t_q = x_q / s_q per microbatch. Before its first and
    after its last microbatch the places in front of it have to do theirs, so a step takes at least

        m t_q + sum over p < q of t_p        for each q

    and so at least the mean of these with any weights w_q >= 0, sum w_q = 1, which is

        sum over q of x_q / s_q (m w_q + sum over p > q of w_p)

    The weights are chosen such that all factors of x_q are equal (or, where that needs w_q < 0, such that none is
    smaller). The mean then has the same lower bound for all x.
    """
    behind = 0.0
    for pace in reversed(paces):
        behind += max(0.0, pace - behind) / microbatches
    return sum(paces) / microbatches / behind


def least_s(op: Op, direction: int, device: Device, settings: Settings) -> float:
    """Seconds of one Op forward (0) or backward (1) on one device at its best rates. No shard has less to compute or to
    move than its even share of the Op."""
    flops = (op.flops, op.backward_flops)[direction]
    moved = ((op.bytes, op.backward_bytes), (op.fused_bytes, op.fused_backward_bytes))[settings.fused][direction]
    bandwidth_bytes_s = max(
        device.cache_bandwidth_bytes_s, device.memory_bandwidth_bytes_s * device.achievable_bandwidth
    )
    return max(flops / _best_rate(op, direction, device, settings), moved / bandwidth_bytes_s)


def _best_rate(op: Op, direction: int, device: Device, settings: Settings) -> float:
    """FLOP/s that no shard of `op` exceeds: the rate of Prices for sizes that fill the device."""
    if not multiplies(op):
        return vector_rate(op.dtype, device)
    dtype = matmul_dtype(op, settings)
    if op.target is ATTENTION and device.attention is not None:
        return device.flops(dtype) * attention_share(device, direction, op.call.ins[0].sizes[-1], settings.attention)
    turned = BACKWARD[device.kind] if direction and any(op.weight) else 1.0
    return device.flops(dtype) * device.best_share(dtype) * device.sustained * turned
