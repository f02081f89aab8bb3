"""The ranks of each axis of a published run, and what order they run a pipeline in."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.costmodel.tables import Line, Refused, count, ways

UNKNOWN = r"(?i)\bzb-?(h-?)?2|\bh2\b|chimera|2bw"
"""Schedules that are not priced: the second of zero bubble begins the next step before the last place has ended this
one, PipeDream-2BW has no end of a step."""

FORWARDS_FIRST = r"(?i)g-?pipe|\bafab\b|all[- ]forward"
"""All forwards first, which takes as long as 1F1B and other memory."""

SEVERAL = r"(?<!non[- ])(?<!no )interleav|virtual|\bvpp\b|looped"
INTERLEAVED = 2
"""How the column says that places have several stages, and how many where no other column does: torchtitan's default
(build_pipeline_schedule, stages_per_rank), and the least that it means."""

IN_ORDER = rf"{FORWARDS_FIRST}|interleav|{SEVERAL}|1f1b|flush|none|^no\b"
"""How the column names that and 1F1B, interleaved where places have several stages."""

SCHEDULES = (
    (r"(?i)dual[- ]?pipe[- ]?v", "dualpipev", 2),
    (r"(?i)dual[- ]?pipe", "dualpipe", 1),
    (r"(?i)\bzb[- ]?v|zero[- ]?bubble[- (]*v\b", "zbv_zero_bubble", 2),
    (r"(?i)\bzb|zero[- ]?bubble", "interleaved_zero_bubble", 0),
)
"""How the column names schedules that take a backward apart, which of Setup's that is, and the stages of a place (0: as
published)."""


@dataclass(frozen=True)
class Ranks:
    """So many ranks of each kind, `vpp` stages on each place of a pipeline; `both_ways`: a pipeline that microbatches
    enter from both ends."""

    gpus: int
    tp: int
    cp: int
    pp: int
    dp: int
    vpp: int = 1
    schedule: str = ""
    both_ways: bool = False

    @staticmethod
    def of(line: Line) -> Ranks:
        """Those of a line. Raises Refused where they do not make up its devices, or the schedule is not priced."""
        tp, cp, pp = (ways(line, key) for key in ("tp", "cp", "pp"))
        stated = count(line, "dp", 0)
        gpus = count(line, "n_gpus", stated * tp * cp * pp)
        if not gpus:
            raise Refused("n_gpus was not published")
        if gpus % (tp * cp * pp):
            raise Refused(f"{gpus} GPUs are no multiple of tp {tp} x cp {cp} x pp {pp}")
        dp = gpus // (tp * cp * pp)
        if stated not in (0, dp, dp * cp):  # tables may count context-parallel ranks, which have the same weights
            raise Refused(f"dp is {stated}, and {gpus} GPUs in tp {tp} x cp {cp} x pp {pp} are {dp}")
        schedule, each = _schedule(line["schedule"], pp)
        several = each or (INTERLEAVED if re.search(SEVERAL, line["schedule"], re.I) else 1)
        vpp = ways(line, "vpp", several) if pp > 1 else 1
        if each and vpp != each:
            raise Refused(f"vpp is {vpp}, and places have {each} of schedule {line['schedule']}")
        if schedule != "dualpipe":
            return Ranks(gpus, tp, cp, pp, dp, vpp, schedule)
        if pp % 2:
            raise Refused(f"schedule {line['schedule']} is of an even number of places, and pp is {pp}")
        return Ranks(gpus, tp, cp, pp // 2, 2 * dp, 2, "dualpipev", both_ways=True)

    def over_context(self, ways: int) -> bool:
        """Whether `ways` ranks with experts of their own can be all context-parallel ones beside some data-parallel
        ones (Megatron-Core, parallel folding: https://arxiv.org/abs/2504.14960)."""
        return self.cp > 1 and ways % self.cp == 0 and self.dp % (ways // self.cp) == 0

    def dealt(self, layers: int) -> tuple[int, ...]:
        """Blocks of each stage where layers are two short of as many for each: embedding and head count as a layer then
        (Megatron-Core, account_for_embedding_in_pipeline_split; torchtitan, generate_llm_fqn_per_model_part;
        https://arxiv.org/abs/2407.21783, section 3.3.2). Else none, which is evenly."""
        stages = self.pp * self.vpp
        if layers % stages == 0 or (layers + 2) % stages:
            return ()
        each = (layers + 2) // stages
        return (each - 1, *[each] * (stages - 2), each - 1)


def _schedule(text: str, pp: int) -> tuple[str, int]:
    """The schedule that takes a backward apart which the column names, and the stages of a place; none for 1F1B and
    where there is no pipeline.

    DualPipe has two copies of each stage, on places i and p - 1 - i, and half of the microbatches enter at either end:
    as two pipelines of half as many places each that turn back (DualPipeV: https://github.com/deepseek-ai/DualPipe).
    """
    if pp == 1:
        return "", 0
    if re.search(UNKNOWN, text):
        raise Refused(f"schedule {text} is not priced")
    found = next(((name, each) for pattern, name, each in SCHEDULES if re.search(pattern, text)), ("", 0))
    if text and not found[0] and not re.search(IN_ORDER, text):
        raise Refused(
            f"schedule {text} is not priced; wanted 1F1B, interleaved, GPipe, zero bubble, ZB-V, DualPipe or DualPipeV"
        )
    return found
