"""How the table of published runs says what rests cut over data-parallel ranks, and over which of them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from benchmarks.costmodel.tables import Refused, number_of

STAGES = (
    (2, r"shard[- _]grad[- _]op|\b(zero|stage)[- _]?(stage[- _=:]*)?2\b|reduce-scatter allowed"),
    (3, r"fsdp|hsdp|mics|(fully|full|hybrid)[- _]shard|\b(zero|stage)[- _]?(stage[- _=:]*)?3\b"),
    (0, r"auto|heuristic"),
    (
        1,
        r"\b(zero|stage)[- _]?(stage[- _=:]*)?1\b|dist(ributed)?[- _]?opt|zero[- _]?redundancy|"
        r"optimizer[- _](states?[- _])?shard|shard\w* optimizer",
    ),
    (0, r"none|^no?$|no[- _]shard|\bd?dp\b|(?<!sharded[- _])data[- _]parallel|\b(zero|stage)[- _]?(stage[- _=:]*)?0\b"),
)
"""Stages of ZeRO by how the column names them, the first that it does; reduce-scatter is allowed Alpa's data
parallelism in what it calls zero_2, of what it shards beside that (auto, heuristic) nothing is known."""

OFF = r"fsdp ?[=:] ?(0|false|off|no)\b"
"""Columns of switches that are off."""

SHARDS = r"\b(?:over|dp_shard|shard(?:s|ed|ing)?(?: (?:size|group|degree))?) ?[=:]? ?(\d+)"
COPIES = r"\b(?:dp_)?replica(?:te)?[sd]? ?[=:]? ?(\d+)"
IN_NODES = r"hsdp|hybrid[- _]shard"
"""Shards inside each node and copies of them across nodes, where their numbers are not stated
(torch.distributed.fsdp.ShardingStrategy.HYBRID_SHARD)."""


@dataclass(frozen=True)
class Sharding:
    """The stage of ZeRO, and over how many groups of data-parallel ranks the shards are copied."""

    zero: int
    replicas: int = 1

    @staticmethod
    def of(text: str, dp: int, in_node: int) -> Sharding:
        """What the column says of `dp` ranks, `in_node` of them in a node. Raises Refused where it is none of the known
        ways, or sizes do not divide."""
        stage = _stage(text)
        if not stage:
            return Sharding(0)
        shards = _shards(text, dp, in_node)
        if not shards or dp % shards:
            raise Refused(f"shards over {shards} ranks, of which {dp} data-parallel ones are no multiple")
        return Sharding(stage, dp // shards)


def _stage(text: str) -> int:
    if not text or re.search(OFF, text, re.I):
        return 0
    if number_of(text) in (0, 1, 2, 3):
        return int(number_of(text))
    stage = next((stage for stage, pattern in STAGES if re.search(pattern, text, re.I)), None)
    if stage is None:
        raise Refused(f"zero_fsdp is {text}; wanted a stage of ZeRO, FSDP, HSDP, a distributed optimizer or none")
    return stage


def _shards(text: str, dp: int, in_node: int) -> int:
    """Over how many of `dp` ranks; those that are stated may count other ranks too."""
    over, copies = (re.search(pattern, text, re.I) for pattern in (SHARDS, COPIES))
    if over:
        return min(int(over[1]), dp)
    if copies:
        return dp // int(copies[1]) if int(copies[1]) and dp % int(copies[1]) == 0 else 0
    return math.gcd(dp, in_node) if re.search(IN_NODES, text, re.I) else dp
