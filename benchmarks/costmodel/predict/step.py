"""The seconds of a step under a given configuration, by part.

unit        forward, backward: kernels, or the host that issues them where it takes longer; collectives of
            activations, which compute waits for
stage       its units; `full` recomputation runs the blocks' forward once more in the backward
ZeRO-3      gathers overlap the forward, gathers and scatters the backward of each block; the exposed rest counts
pipeline    the schedule's own order of actions (`pipeline.orders`), sends between places
step        pipeline + exposed sums of gradients + optimizer
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.cost.comm import collective_s
from autopar.errors import PlanError
from autopar.pipeline.makespan import step_s
from autopar.pipeline.orders import Action, StageTime, orders
from autopar.problem.prices import OVERLAP
from benchmarks.costmodel.predict.hosted import host_update_s
from benchmarks.costmodel.predict.owners import Owners, between, line
from benchmarks.costmodel.predict.place import Place, UnitTime
from benchmarks.costmodel.predict.setup import APART, WHOLE, Setup

ROUNDING = 3.0
"""Exponent n of the smooth maximum (host^n + device^n)^(1/n)."""

KEPT_COMM = 0.5
"""Share of tensor-parallel collectives that run again where blocks run again by operators: the gathers; sums after
matmuls are kept."""

ROUNDS = 4
"""A pipeline of more rounds of microbatches is extrapolated: after so many, every further one takes as long as the
last."""

MLP_COMM = 0.5
"""Share of the tensor-parallel collectives of a block that are of its feed-forward layer: one of two pairs."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step by part; they add up to `step_s`.

    compute_s      of the busiest place, without recomputation
    recompute_s    what runs again in the backward there
    host_s         its device waits for the host that issues kernels
    tensor_s       its collectives of activations
    shards_s       its exposed gathers and scatters of ZeRO-3
    pipeline_s     the bubble, and exposed sends
    sync_s         exposed sums of gradients and gathers of weights, once per step
    optimizer_s    the optimizer's step
    """

    compute_s: float
    recompute_s: float
    host_s: float
    tensor_s: float
    shards_s: float
    pipeline_s: float
    sync_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(vars(self).values())


@dataclass
class _Times:
    """Seconds of one microbatch in some units of a place.

    The first six are parts, as in Prediction. `pace_*` are whole passes, all parts included: forward, backward, and the
    part of the backward for weights. `trained`: elements with gradients on a rank, `expert_trained` those of experts.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    again_s: float = 0.0
    host_s: float = 0.0
    tensor_s: float = 0.0
    shards_s: float = 0.0
    pace_forward_s: float = 0.0
    pace_backward_s: float = 0.0
    pace_weights_s: float = 0.0
    trained: float = 0.0
    expert_trained: float = 0.0


@dataclass(frozen=True)
class Layers:
    """`count` layers of a model. The first `leading` are like the first run of blocks of a Place; the others are spread
    evenly over its other runs, a block of which holds `period` layers."""

    count: int
    leading: int = 0
    period: int = 1

    def shares(self, runs: Sequence[str], begin: int, count: int) -> dict[str, float]:
        """How many blocks of each of the `runs` are in the layers `[begin, begin + count)`."""
        ahead = min(max(self.leading - begin, 0), count)
        rest = runs[1:] if self.leading else runs
        return {
            **({runs[0]: float(ahead)} if self.leading else {}),
            **{name: (count - ahead) / self.period / len(rest) for name in rest},
        }


def predict(place: Place, layers: int | Layers, setup: Setup, cluster: Cluster) -> Prediction:
    """The step of a model under `setup`. A number as `layers` stands for alike layers, spread evenly over the runs of
    blocks of `place`. Raises PlanError where the cluster has too few devices, or the layers cannot be dealt to the
    stages."""
    if setup.devices > cluster.devices:
        raise PlanError(
            f"setup: tp {setup.tp} x cp {setup.cp} x dp {setup.dp} x pp {setup.pp} are {setup.devices} ranks on the "
            f"{cluster.devices} devices of {cluster.label}; wanted a cluster of as many"
        )
    return _Step(place, layers if isinstance(layers, Layers) else Layers(layers), setup, cluster).prediction()


class _Step:
    """Puts one step together."""

    def __init__(self, place: Place, layers: Layers, setup: Setup, cluster: Cluster) -> None:
        self.place, self.layers, self.setup, self.cluster = place, layers, setup, cluster
        self.device, self.software = cluster.device, setup.software
        inner = setup.tp * setup.cp
        self.dense, self.stacked = Owners.of_dense(cluster, setup), Owners.of_experts(cluster, setup)
        # the stage by which weights are gathered and gradients scattered: stages that gather once per step do so as in
        # ZeRO-2
        self.zero = 2 if setup.zero == 3 and setup.pp > 1 and self.software.gathers_once else setup.zero
        # gradients that rest cut are scattered after every microbatch; pipelines keep them whole until the last one
        self.late = self.software.sums_last and setup.microbatches > 1
        self.scattered = not self.late and (
            self.zero == 3 or (setup.zero == 2 and setup.pp == 1 and setup.microbatches > 1)
        )
        self.stages = line(cluster, inner * setup.dp, setup.pp)
        nodes = math.prod(level.size for level in cluster.levels[:-1])
        self.slowest = 1.0 + self.device.spread * largest_of(nodes)
        self.bandwidth_bytes_s = self.device.memory_bandwidth_bytes_s * self.device.achievable_bandwidth

    def prediction(self) -> Prediction:
        """The step by part."""
        stages = self._stages()
        places = [self.setup.place_of(index) for index in range(len(stages))]
        held = [[t for t, at in zip(stages, places, strict=True) if at == p] for p in range(self.setup.pp)]
        busy = [sum(map(_pace, here)) for here in held]
        m, mine = self.setup.microbatches, held[busy.index(max(busy))]
        return Prediction(
            m * sum(t.forward_s + t.backward_s for t in mine),
            m * sum(t.again_s for t in mine),
            m * sum(t.host_s for t in mine),
            m * sum(t.tensor_s for t in mine),
            m * sum(t.shards_s for t in mine),
            self._pipeline_s(stages, places) - m * max(busy),
            max(map(self._sync_s, held)),
            max(map(self._update_s, held)),
        )

    def _stages(self) -> list[_Times]:
        """The stages in order. Blocks are dealt as Setup.blocks_of says, units before them are in the first stage,
        units after them in the last."""
        count = self.setup.pp * self.setup.vpp
        names = list(dict.fromkeys(unit.name for unit in self.place.order))
        inside = list(dict.fromkeys(unit.name for unit in self.place.order if unit.instance >= 0))
        first = min((i for i, name in enumerate(names) if name in inside), default=len(names))
        dealt = self.setup.blocks_of(self.layers.count)
        found = []
        for index, blocks in enumerate(dealt):
            times, shares = _Times(), self.layers.shares(inside, sum(dealt[:index]), blocks)
            for i, name in enumerate(names):
                if name in shares:
                    again = self._again(index, blocks)
                    self._add(times, self.place.times[name], shares[name], again=again, in_block=True)
                elif index == (0 if i < first else count - 1):
                    self._add(times, self.place.times[name], 1.0, again=0.0, in_block=False)
            found.append(times)
        return found

    def _again(self, stage: int, blocks: float) -> float:
        """The share of the blocks of a stage that run again."""
        if self.setup.again:
            return min(1.0, self.setup.again[stage] / blocks) if blocks else 0.0
        return self.setup.recompute_share

    def _add(self, times: _Times, unit: UnitTime, count: float, *, again: float, in_block: bool) -> None:
        """Add `count` instances of a unit, of a block or outside, of which a share of `again` runs again."""
        setup, software = self.setup, self.software
        comm = (1.0 - software.hidden_tensor) * software.tensor_share
        beside = software.hidden_tokens * (1.0 - self.device.contended) * _room(unit)
        forward, back = (
            self.slowest * (whole - beside * routed)
            for whole, routed in ((unit.forward_s, unit.routed_s), (unit.backward_s, unit.routed_back_s))
        )
        back += self._accumulate_s(unit)
        made_s = (unit.parameters - unit.trained) * software.made_bytes * in_block / self.bandwidth_bytes_s
        forward, back = forward + made_s, back + made_s
        forward_comm, back_comm = unit.forward_comm_s * comm, unit.backward_comm_s * comm
        again_s = again_comm = again_host = 0.0
        host = self.device.dispatch_s * unit.calls(software)
        if setup.recompute == "full":
            whole = forward - self.slowest * unit.last_s * software.stops_early
            again_s, again_comm, again_host = (x * again for x in (whole, forward_comm, host))
        elif setup.recompute == "selective" and "operators" in setup.parts:
            again_s = (
                self.slowest
                * max(0.0, unit.forward_s - unit.kept_s - (unit.last_s - unit.last_kept_s) * software.stops_early)
                * again
            )
            again_comm, again_host = KEPT_COMM * forward_comm * again, host * again
        elif setup.recompute == "selective":
            again_s, again_comm, again_host = (x * again for x in self._parts_again(unit, forward_comm, host))
        host_s = _host_wait_s(host, forward + forward_comm)
        host_back_s = _host_wait_s(host + again_host, back + back_comm + again_s + again_comm)
        exposed = [0.0, 0.0]
        if (self.scattered or self.zero == 3) and self.dense.shards.size > 1:
            exposed = self._shards_s(unit, forward + host_s, back + again_s + host_back_s)
        times.forward_s += count * forward
        times.backward_s += count * back
        times.again_s += count * again_s
        times.host_s += count * (host_s + host_back_s)
        times.tensor_s += count * (forward_comm + back_comm + again_comm)
        times.shards_s += count * sum(exposed)
        times.pace_forward_s += count * (forward + forward_comm + host_s + exposed[0])
        times.pace_backward_s += count * (back + back_comm + again_s + again_comm + host_back_s + exposed[1])
        times.pace_weights_s += count * (self.slowest * unit.weights_s + self._accumulate_s(unit))
        times.trained += count * unit.trained
        times.expert_trained += count * unit.expert_trained

    def _parts_again(self, unit: UnitTime, comm: float, host: float) -> tuple[float, float, float]:
        """Seconds of the parts of a block that run again as a whole: of kernels, of collectives, and of the host (none
        for attention, which is one kernel)."""
        fed = sum(getattr(unit, f"{part}_s") for part in WHOLE[1:] if part in self.setup.parts)
        early = min(fed, unit.last_s * self.software.stops_early)
        kernels = (unit.attention_s if "attention" in self.setup.parts else 0.0) + fed - early
        return (
            self.slowest * kernels,
            MLP_COMM * comm if fed else 0.0,
            host * min(1.0, fed / unit.forward_s) if fed else 0.0,
        )

    def _accumulate_s(self, unit: UnitTime) -> float:
        """Seconds of adding gradients to those of earlier microbatches: read and written."""
        if self.setup.microbatches == 1:
            return 0.0
        added = self._owned(unit) if self.scattered else unit.trained
        return 2 * self.software.gradient_bytes * added / self.bandwidth_bytes_s

    def _owned(self, held: UnitTime | _Times) -> float:
        """The trained elements that rest on a rank where they are sharded, of those that it computes with."""
        return (
            held.trained - held.expert_trained
        ) / self.dense.shards.size + held.expert_trained / self.stacked.shards.size

    def _shards_s(self, unit: UnitTime, forward_s: float, backward_s: float) -> list[float]:
        """Exposed seconds of the gathers of a unit's weights, for ZeRO-3, and the scatters of their gradients:
        [forward, backward]."""
        gather = (self.zero == 3) * self._over_shards(
            "all_gather", self.software.gathered_bytes, unit.parameters, unit.expert_parameters
        )
        scatter = self.scattered * self._over_shards(
            "reduce_scatter", self.software.gradient_bytes, unit.trained, unit.expert_trained
        )
        copied_s = self.software.shard_bytes * unit.parameters / self.bandwidth_bytes_s
        if not self.software.overlap_gradients:
            return [gather, gather + scatter + copied_s]
        return [self._exposed_s(gather, forward_s), self._exposed_s(gather + scatter, backward_s) + copied_s]

    def _pipeline_s(self, stages: Sequence[_Times], places: Sequence[int]) -> float:
        """Seconds of all microbatches in all stages."""
        setup = self.setup
        if setup.pp == 1:
            return setup.microbatches * sum(_pace(t) for t in stages)
        sent = self.place.sent_bytes / (1 if setup.sequence_parallel else setup.tp)
        hops = [
            collective_s("send", sent, between(self.stages, *pair))
            for pair in zip(places, [*places[1:], places[-1]], strict=True)
        ]
        times = [
            StageTime(t.pace_forward_s, t.pace_backward_s - t.pace_weights_s, t.pace_weights_s, hop)
            for t, hop in zip(stages, hops, strict=True)
        ]
        return setup.flushes * self._filled_s(times, places)

    def _filled_s(self, times: Sequence[StageTime], places: Sequence[int]) -> float:
        """Seconds until the pipeline is empty again. Of many microbatches a few whole rounds are simulated; each
        further one takes as long as one of the last round, but at least its work on the busiest place, because some
        schedules fill the bubble of the first rounds in the last one."""
        setup = self.setup
        count, p = setup.at_once, setup.pp
        of_any_number = APART[setup.schedule].shape == "v" if setup.schedule else setup.vpp == 1
        if count < 2 * p or (count <= ROUNDS * p and (of_any_number or count % p == 0)):
            return step_s(_order(setup, count), times, places)
        few = min(count // p, ROUNDS) * p
        short, shorter = (step_s(_order(setup, n), times, places) for n in (few, few - p))
        busiest_s = max(
            sum(t.of("F") + t.of("B") for t, at in zip(times, places, strict=True) if at == place) for place in range(p)
        )
        return short + max((short - shorter) / p, busiest_s) * (count - few)

    def _over_shards(self, kind: str, itemsize: float, elements: float, of_experts: float) -> float:
        """Seconds of a collective of the `elements` of a rank over the ranks that they are sharded over; `of_experts`
        of them are over the owners of experts."""
        return sum(
            collective_s(kind, itemsize * n, owners.shards)
            for n, owners in ((elements - of_experts, self.dense), (of_experts, self.stacked))
            if n > 0
        )

    def _sync_s(self, stages: Sequence[_Times]) -> float:
        """Exposed seconds of sums of gradients at the end of the step, and of gathers of updated weights."""
        software = self.software
        trained, stacked = (sum(getattr(t, name) for t in stages) for name in ("trained", "expert_trained"))
        back = sum(
            self._sum_s(n, owners) for n, owners in ((trained - stacked, self.dense), (stacked, self.stacked)) if n > 0
        )
        # 8-bit weights are made where they are used
        ahead = (
            self._over_shards("all_gather", max(2, software.gathered_bytes), trained, stacked)
            if self.zero in (1, 2)
            else 0.0
        )
        if not software.overlap_gradients:
            return back + ahead
        return self._exposed_s(back, sum(t.pace_backward_s for t in stages)) + self._exposed_s(
            ahead, sum(t.pace_forward_s for t in stages)
        )

    def _exposed_s(self, comm_s: float, compute_s: float) -> float:
        """Exposed seconds of collectives that overlap compute, and the seconds by which they slow it down."""
        hidden = min(comm_s, OVERLAP * compute_s)
        return comm_s - hidden + self.device.contended * hidden

    def _sum_s(self, elements: float, owners: Owners) -> float:
        """Seconds of the sum of gradients: scattered over the ranks that own a part each (unless they were in the
        backward), then these parts summed over the copies."""
        nbytes = self.software.gradient_bytes * elements
        if self.setup.zero == 0:
            return collective_s("all_reduce", nbytes, owners.all)
        scatter = 0.0 if self.scattered else collective_s("reduce_scatter", nbytes, owners.shards)
        return scatter + collective_s("all_reduce", nbytes / owners.shards.size, owners.copies)

    def _update_s(self, stages: Sequence[_Times]) -> float:
        """The optimizer's pass over what a rank owns, the norm of the gradients and their reset."""
        held = sum(t.trained for t in stages)
        owned = sum(self._owned(t) for t in stages) if self.setup.zero else held
        if self.software.hosted:
            return host_update_s(self.device, self.software, owned)
        whole = owned if self.setup.zero == 3 else held
        moved = self.software.optimizer_bytes * owned + 2 * self.software.gradient_bytes * whole
        return moved / self.bandwidth_bytes_s


def _order(setup: Setup, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of each place. Fewer microbatches than places, or no multiple of them under interleaving, which
    torch's schedules refuse and others run: as many forwards ahead as there are."""
    if setup.schedule:
        return orders(setup.schedule, setup.pp, setup.pp * setup.vpp, microbatches)
    if setup.vpp > 1 and microbatches % setup.pp == 0:
        return orders("interleaved_1f1b", setup.pp, setup.pp * setup.vpp, microbatches)
    if setup.vpp == 1 and microbatches >= setup.pp:
        return orders("1f1b", setup.pp, setup.pp, microbatches)
    stages = [range(place, setup.pp * setup.vpp, setup.pp) for place in range(setup.pp)]
    return tuple(
        tuple(
            [Action("F", stage, m) for stage in mine for m in range(microbatches)]
            + [Action("B", stage, m) for stage in reversed(mine) for m in range(microbatches)]
        )
        for mine in stages
    )


def _room(unit: UnitTime) -> float:
    """The share of the all-to-alls of tokens that other compute of the unit can overlap, at most 1."""
    routed_s = unit.routed_s + unit.routed_back_s
    return min(1.0, (unit.forward_s + unit.backward_s - routed_s) / routed_s) if routed_s else 0.0


def _pace(times: _Times) -> float:
    return times.pace_forward_s + times.pace_backward_s


def largest_of(count: int) -> float:
    """The expected largest of `count` standard normal numbers, for large counts sqrt(2 ln n) less its first correction
    (Cramer, 1946, section 28.6): by how many deviations the slowest of so many nodes lags."""
    if count < 2:
        return 0.0
    root = math.sqrt(2 * math.log(count))
    return max(0.56, root - (math.log(math.log(count)) + math.log(4 * math.pi)) / (2 * root))


def _host_wait_s(host_s: float, device_s: float) -> float:
    """Seconds that the device waits for the host that issues its kernels. Some stretches are bound by one, some by the
    other, so that the total is a smooth maximum of both."""
    if host_s == 0:
        return 0.0
    return float((host_s**ROUNDING + device_s**ROUNDING) ** (1 / ROUNDING) - device_s)
