"""A training configuration as it is stated in papers and launch scripts: degrees of parallelism, schedule,
recomputation, and what the software does."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from autopar.errors import PlanError
from autopar.memory import Habits
from autopar.memory.habits import EMITTED
from autopar.pipeline.schedules import SCHEDULES, Schedule

RECOMPUTE = ("none", "selective", "full")
WHOLE = ("attention", "mlp", "experts")
"""Parts of a block that run again as a whole: attention without its projections, the feed-forward layer, the layer of
experts."""

PARTS = (*WHOLE, "operators")
"""What selective recomputation can run again; "operators": all but those of axes.kept_operators."""

APART: dict[str, Schedule] = {name: schedule for name, schedule in SCHEDULES.items() if schedule.splits_backward}
"""Schedules that split the backward: gradients of weights are computed later than those of inputs, in the bubbles."""


@dataclass(frozen=True)
class Software:
    """What the training software does that parallelism degrees do not say.

    fused                chains of pointwise operators run as one kernel (hand-written or compiled)
    overlap_gradients    gradient reductions over the data-parallel axis overlap the backward, and gathers of weights
                         the forward
    gradient_bytes       bytes per element of gradients as they are accumulated and reduced
    matmul               dtype of matmuls with weights where it is not that of the model (float8, float4)
    cast_bytes           bytes read and written per element to cast an operand of such a matmul
    turn_bytes           bytes read and written per element to transpose it too
    casts_shards         operands of such a matmul are cast before they are gathered
    matmul_share         rate of such matmuls as a share of the device's best in that dtype
    optimizer_bytes      bytes that the optimizer reads and writes per step for each element that a rank owns
    masters              trained parameters rest and are updated in 32 bits, with state of 32; else all of that has the
                         dtype that is computed in
    hosted               the optimizer runs on the host: gradients go there and weights come back, once per step
    made_bytes           bytes that are read and written to make an element of a frozen weight of one in 4 bits, at each
                         use
    hidden_tensor        share of the time of tensor-parallel collectives that is overlapped with the matmuls before or
                         after them
    hidden_tokens        share of the time of all-to-alls to experts and back that is overlapped with another microbatch
    attention            rate of fused attention as a multiple of FlashAttention-2's on the device, up to that of the
                         device's fastest kernel
    habits               how long it holds tensors, and in which buffers
    gathered_bytes       bytes per element of weights that are gathered at each use
    tensor_share         bytes of tensor-parallel collectives over those in the dtype of the model, where some are
                         quantised
    shard_bytes          bytes that copies into and out of flat buffers read and write, per element of a sharded weight
                         and microbatch
    gathers_once         pipeline stages gather sharded weights once per step and reduce-scatter their gradients once,
                         not per microbatch
    sums_last            gradients are scattered once per step, behind the last microbatch (no_sync)
    stops_early          recomputation of a block ends once the last tensor is saved (torch.utils.checkpoint without
                         reentrance, since torch 2.1)
    tokens_in_parts      each tensor-parallel rank sends a part of the tokens to the experts, and the parts are
                         all-gathered there
    rows_once            a token is sent once to each node that has experts for it, and from there to these
    in_a_row             the experts of a token have consecutive numbers, as forced balanced gates of benchmarks choose
                         them
    expert_calls         calls of the host for a layer of experts in the forward, beyond one: sorting and dispatch of
                         tokens, matmuls of each expert
    captured             kernels are launched from a captured graph or compiled code, so that the host takes no time
    captured_mlp         those of feed-forward layers are
    """

    fused: bool = True
    overlap_gradients: bool = True
    gradient_bytes: int = 4
    matmul: str = ""
    cast_bytes: float = 4.0
    turn_bytes: float = 0.0
    casts_shards: bool = False
    matmul_share: float = 1.0
    optimizer_bytes: float = 30.0
    masters: bool = True
    hosted: bool = False
    made_bytes: float = 0.0
    captured: bool = False
    captured_mlp: bool = False
    hidden_tensor: float = 0.0
    hidden_tokens: float = 0.0
    attention: float = 1.0
    gathered_bytes: int = 2
    tensor_share: float = 1.0
    shard_bytes: float = 0.0
    gathers_once: bool = False
    sums_last: bool = False
    stops_early: bool = False
    tokens_in_parts: bool = False
    rows_once: bool = False
    in_a_row: bool = False
    expert_calls: int = 0
    habits: Habits = EMITTED


@dataclass(frozen=True)
class Setup:
    """Sizes of the axes and how a step runs. Devices are numbered with `tp` fastest, then `cp`, `dp` (of which `ep` are
    the inner ranks), `pp` slowest, as Megatron numbers them.

        whole_experts           experts are not split over `tp`: tensor-parallel ranks have experts of their own, and
                                `ep` counts them
        experts_over_context    the same for context-parallel ranks
        vpp                     stages per place
        flushes                 how many times a step fills and empties the pipeline, each time with `microbatches`
                                (gradient accumulation around a schedule)
        schedule                one of APART, which split the backward; empty: 1F1B, interleaved where `vpp` > 1
        zero                    stage of ZeRO, sharded over `dp`: 1 optimizer state, 2 also gradients, 3 also parameters
        replicas                copies of these shards (HSDP): each copy is on dp / replicas ranks
        recompute, parts        "full": the forward of a block runs again in the backward; "selective": that of the
                                PARTS that `parts` names ("operators": all but attention, every second matmul and the
                                sums behind matmuls)
        blocks                  the number of blocks of each stage, first to last (empty: dealt evenly, at least one
                                each)
        recompute_share         share of the blocks of each stage that run again
        again                   the number of blocks of each stage that run again, in place of that share (empty: as the
                                share says)
    """

    micro_batch: int
    microbatches: int
    seq: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    whole_experts: bool = False
    experts_over_context: bool = False
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    flushes: int = 1
    schedule: str = ""
    sequence_parallel: bool = False
    zero: int = 0
    replicas: int = 1
    recompute: str = "none"
    recompute_share: float = 1.0
    parts: tuple[str, ...] = ("attention",)
    blocks: tuple[int, ...] = ()
    again: tuple[int, ...] = ()
    software: Software = Software()

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int) and not isinstance(value, bool) and each.name != "zero" and value < 1:
                raise PlanError(f"setup: {each.name} is {value}; wanted at least 1")
        if self.recompute not in RECOMPUTE:
            raise PlanError(f"setup: recompute is {self.recompute!r}; wanted one of {', '.join(RECOMPUTE)}")
        if self.schedule and self.schedule not in APART:
            raise PlanError(f"setup: schedule is {self.schedule!r}; wanted one of {', '.join(APART)}, or none for 1F1B")
        if self.schedule and APART[self.schedule].virtual not in (None, self.vpp):
            raise PlanError(
                f"setup: vpp is {self.vpp}; wanted {APART[self.schedule].virtual}, the stages of a place under "
                f"{self.schedule}"
            )
        if any(part not in PARTS for part in self.parts):
            raise PlanError(f"setup: parts is {self.parts}; wanted some of {', '.join(PARTS)}")
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"setup: zero is {self.zero}; wanted 0, 1, 2 or 3")
        for name, dealt in (("blocks", self.blocks), ("again", self.again)):
            if dealt and (len(dealt) != self.pp * self.vpp or min(dealt) < 0):
                raise PlanError(f"setup: {name} is {dealt}; wanted a number for each of {self.pp * self.vpp} stages")
        if self.microbatches % self.flushes:
            raise PlanError(
                f"setup: flushes is {self.flushes}; wanted a number that {self.microbatches} microbatches divide by"
            )
        if 0 in self.blocks[1:-1]:
            raise PlanError(
                f"setup: blocks is {self.blocks}; wanted none without a block but the first stage, which has the "
                "embedding, and the last, which has the head"
            )
        if self.ep % self.expert_share:
            raise PlanError(
                f"setup: ep is {self.ep}; wanted a multiple of {self._shared_with}, whose ranks have experts of their "
                "own"
            )
        if self.dp % self.expert_ways or self.dp % self.replicas:
            over = f" / {self._shared_with}" * (self.expert_share > 1)
            raise PlanError(
                f"setup: dp is {self.dp}; wanted a multiple of ep {self.ep}{over} and of replicas {self.replicas}"
            )

    def blocks_of(self, layers: int) -> tuple[int, ...]:
        """The number of blocks of each stage, of `layers` in all. Raises PlanError where `blocks` has another sum, or
        there are fewer blocks than stages."""
        if self.blocks and sum(self.blocks) != layers:
            raise PlanError(f"setup: blocks is {self.blocks}; wanted {layers} in all")
        count = self.pp * self.vpp
        if layers < count and not self.blocks:
            raise PlanError(
                f"setup: pp {self.pp} x vpp {self.vpp} are {count} stages for {layers} layers; wanted a layer for each "
                "stage, or `blocks`, of which the first and the last may be 0"
            )
        return self.blocks or tuple(layers // count + (1 if stage < layers % count else 0) for stage in range(count))

    def place_of(self, stage: int) -> int:
        """The place of a stage: round robin, or back and forth where the schedule is V-shaped."""
        return APART[self.schedule].place(stage, self.pp) if self.schedule else stage % self.pp

    @property
    def expert_share(self) -> int:
        """The number of ranks within one data-parallel rank that have different experts: tensor-parallel and
        context-parallel ones, where the configuration says so."""
        return (self.tp if self.whole_experts else 1) * (self.cp if self.experts_over_context else 1)

    @property
    def expert_ways(self) -> int:
        """The number of data-parallel ranks with different experts: ep / expert_share."""
        return self.ep // self.expert_share

    @property
    def _shared_with(self) -> str:
        return " x ".join(
            f"{name} {ways}"
            for name, ways, shared in (("tp", self.tp, self.whole_experts), ("cp", self.cp, self.experts_over_context))
            if shared
        )

    @property
    def devices(self) -> int:
        """How many devices it runs on."""
        return math.prod((self.tp, self.cp, self.dp, self.pp))

    @property
    def at_once(self) -> int:
        """Microbatches of one fill of the pipeline, from empty to empty."""
        return self.microbatches // self.flushes

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all devices."""
        return self.micro_batch * self.microbatches * self.dp * self.seq
