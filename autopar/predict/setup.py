"""How a model is trained: a configuration as people state it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from autopar.errors import PlanError
from autopar.memory import Habits
from autopar.memory.habits import EMITTED
from autopar.pipeline.schedules import SCHEDULES, Schedule

RECOMPUTE = ("none", "selective", "full")
WHOLE = ("attention", "mlp", "experts")
"""Parts of a block that run again whole: attention from scores on, the feed-forward layer, the layer of experts."""

PARTS = (*WHOLE, "operators")

APART: dict[str, Schedule] = {name: schedule for name, schedule in SCHEDULES.items() if schedule.splits_backward}
"""Schedules whose gradients of weights run behind those of inputs, where they have time."""


@dataclass(frozen=True)
class Software:
    """What the training software does beside the plan.

    fused                chains of pointwise operators are one kernel (hand-written, or by a compiler)
    overlap_gradients    sums of gradients over the data-parallel axis run under the backward, and gathers under the forward
    gradient_bytes       bytes of one element of a gradient where it is kept and summed
    matmul               dtype of matmuls with weights where it is not that of the model (float8, float4)
    cast_bytes           bytes that an operand of such a matmul moves per element on the way to that dtype
    turn_bytes           bytes that it moves per element to be laid out by columns too
    casts_shards         what is gathered for such a matmul is cast before
    matmul_share         rate of such matmuls as a share of the device's best in that dtype
    optimizer_bytes      bytes that one pass of the optimizer moves per parameter element that it owns
    hidden_tensor        share of tensor-parallel collectives that run beside the matmuls that they feed or follow
    hidden_tokens        share of what goes to experts and back that runs beside the compute of another microbatch
    attention            rate of fused attention as a multiple of FlashAttention-2's on the device
    habits               how it holds memory
    gathered_bytes       bytes of one element of a weight that is gathered where it is used
    tensor_share         share of the bytes of tensor-parallel collectives that is sent, where some go in fewer bits
    shard_bytes          bytes that gathers and scatters of a weight move on the device beside the collectives, per element and microbatch
    gathers_once         stages of a pipeline gather weights that rest cut once per step, and scatter their gradients once
    stops_early          a block that runs again ends behind the last operator that saves anything
    tokens_in_parts      tokens go to their experts in parts, one from each tensor-parallel rank, and are gathered behind that
    rows_once            a token goes once to each node with experts for it, and from there to each of them
    in_a_row             the experts of a token lie next to each other, as gates of benchmarks give them out
    expert_calls         calls of the host for a layer of experts in the forward, beside one: sorting of tokens, their way to experts and back, a matmul or two for each
    captured             kernels are launched from a captured graph or compiled code: the host is not in the way
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
    captured: bool = False
    hidden_tensor: float = 0.0
    hidden_tokens: float = 0.0
    attention: float = 1.0
    gathered_bytes: int = 2
    tensor_share: float = 1.0
    shard_bytes: float = 0.0
    gathers_once: bool = False
    stops_early: bool = False
    tokens_in_parts: bool = False
    rows_once: bool = False
    in_a_row: bool = False
    expert_calls: int = 0
    habits: Habits = EMITTED


@dataclass(frozen=True)
class Setup:
    """Sizes of the axes and how a step runs. Devices are numbered with `tp` fastest, then `cp`, `dp` (of which `ep` are the inner
    ranks), `pp` slowest, as Megatron numbers them.

        whole_experts           experts are not cut over `tp`: its ranks have experts of their own, and are among those that `ep` counts
        experts_over_context    the same of the context-parallel ranks
        vpp                     stages per place
        flushes                 how many times a step fills and empties the pipeline, each time with `microbatches` (gradient accumulation around a schedule)
        schedule                one of APART, which split the backward; empty: 1F1B, interleaved where `vpp` is above 1
        zero                    what is sharded over `dp`: 1 optimizer state, 2 gradients too, 3 parameters too
        replicas                copies of these shards (HSDP): each set is over dp / replicas ranks
        recompute, parts        "full": the forward of a block runs again in the backward; "selective": that of the PARTS that `parts` names
                                ("operators": all but attention, every second matmul and the sums behind matmuls)
        blocks                  the number of blocks of each stage, first to last (empty: dealt evenly, at least one each)
        again                   how many of the blocks of a stage run again
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
            raise PlanError(f"setup: vpp is {self.vpp}; wanted {APART[self.schedule].virtual}, the stages of a place under {self.schedule}")
        if any(part not in PARTS for part in self.parts):
            raise PlanError(f"setup: parts is {self.parts}; wanted some of {', '.join(PARTS)}")
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"setup: zero is {self.zero}; wanted 0, 1, 2 or 3")
        for name, dealt in (("blocks", self.blocks), ("again", self.again)):
            if dealt and (len(dealt) != self.pp * self.vpp or min(dealt) < 0):
                raise PlanError(f"setup: {name} is {dealt}; wanted a number for each of {self.pp * self.vpp} stages")
        if self.microbatches % self.flushes:
            raise PlanError(f"setup: flushes is {self.flushes}; wanted a number that {self.microbatches} microbatches divide by")
        if 0 in self.blocks[1:-1]:
            raise PlanError(f"setup: blocks is {self.blocks}; wanted none without a block but the first stage, which has the embedding, and the last, which has the head")
        if self.ep % self.expert_share:
            raise PlanError(f"setup: ep is {self.ep}; wanted a multiple of {self._shared_with}, whose ranks have experts of their own")
        if self.dp % self.expert_ways or self.dp % self.replicas:
            over = f" / {self._shared_with}" * (self.expert_share > 1)
            raise PlanError(f"setup: dp is {self.dp}; wanted a multiple of ep {self.ep}{over} and of replicas {self.replicas}")

    def blocks_of(self, layers: int) -> tuple[int, ...]:
        """How many of `layers` blocks each stage has. Raises PlanError where `blocks` has another number of them, or there are fewer than stages to deal them to."""
        if self.blocks and sum(self.blocks) != layers:
            raise PlanError(f"setup: blocks is {self.blocks}; wanted {layers} in all")
        count = self.pp * self.vpp
        if layers < count and not self.blocks:
            raise PlanError(f"setup: pp {self.pp} x vpp {self.vpp} are {count} stages for {layers} layers; wanted a layer for each stage, or `blocks`, of which the first and the last may be 0")
        return self.blocks or tuple(layers // count + (1 if stage < layers % count else 0) for stage in range(count))

    def place_of(self, stage: int) -> int:
        """The place of a stage: stages go round the places, or back where the schedule is a V."""
        return APART[self.schedule].place(stage, self.pp) if self.schedule else stage % self.pp

    @property
    def expert_share(self) -> int:
        """How many tensor-parallel and context-parallel ranks of a data-parallel one have experts of their own."""
        return (self.tp if self.whole_experts else 1) * (self.cp if self.experts_over_context else 1)

    @property
    def expert_ways(self) -> int:
        """Of how many data-parallel ranks each has experts of its own."""
        return self.ep // self.expert_share

    @property
    def _shared_with(self) -> str:
        return " x ".join(f"{name} {ways}" for name, ways, shared in (("tp", self.tp, self.whole_experts), ("cp", self.cp, self.experts_over_context)) if shared)

    @property
    def devices(self) -> int:
        """How many devices it runs on."""
        return math.prod((self.tp, self.cp, self.dp, self.pp))

    @property
    def at_once(self) -> int:
        """Microbatches that go through the pipeline from when it is empty to when it is empty again."""
        return self.microbatches // self.flushes

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all devices."""
        return self.micro_batch * self.microbatches * self.dp * self.seq
