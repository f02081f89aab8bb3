"""Low-rank adapters of runs that train such: which layers have them, and how wide they are."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.costmodel.tables import Line


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters, `rank` wide, beside the layers of a block that `layers` names: those of transformer.linear."""

    rank: int
    layers: tuple[str, ...]


EVERYWHERE = Adapters(8, ("qkv", "proj", "up", "gate", "down"))
"""On every matmul of a block: torchtune's recipes (lora_rank 8, apply_lora_to_mlp), NeMo AutoModel's
(match_all_linear)."""

ON_QUERIES = Adapters(8, ("qkv",))
"""On queries and values: torchtune's recipes of September 2024 (30b8519e8), and litgpt's
(litgpt/finetune/lora.py, lora_query, lora_value)."""

FUSED_QKV = Adapters(32, ("qkv",))
"""What the performance scripts of NeMo and Megatron-Bridge train: target_modules = ["linear_qkv"]
(nemo/collections/llm/recipes, finetune_performance_optimizations), of the default width of
nemo/collections/llm/peft/lora.py."""


LAYERS = (
    ("qkv", r"(?i)\b(?:q(?:_proj)?|query|w?qkv|c_attn|attn|attention)\b"),
    ("proj", r"(?i)\b(?:o(?:_proj|utput_proj)?|out(?:put)?|attn|attention)\b"),
    ("up", r"(?i)\b(?:up(?:_proj)?|w1|mlp)\b"),
    ("gate", r"(?i)\b(?:gate(?:_proj)?|w2|mlp)\b"),
    ("down", r"(?i)\b(?:down(?:_proj)?|w3|mlp)\b"),
)
"""How notes name the layers that have adapters."""


def adapters_of(line: Line, known: Adapters) -> Adapters:
    """Those of a line: as wide and on the layers that it says, else those `known` of its software; none where it trains
    whole weights."""
    if not re.search(r"(?i)\b(?:q-?)?lora\b", line["model"]):
        return Adapters(0, ())
    wide = re.search(r"(?i)\b(?:q?lora[ _-]?)?rank[ =:]*(\d+)", f"{line['model']} {line['notes']}")
    named = re.search(r"(?i)\blora\b[^;]*?\b(?:on|targets?:?) ([^;]+)", line["notes"])
    layers = tuple(name for name, pattern in LAYERS if named and re.search(pattern, named[1]))
    return Adapters(int(wide[1]) if wide else known.rank, layers or known.layers)
