"""What published runs hold in CUDA graphs, which the host launches as a whole. Tables seldom say it, recipes do."""

from __future__ import annotations

import re
from typing import Any

WHOLE: dict[str, Any] = {"captured": True}
"""The step, or every layer."""

ROUTING: dict[str, Any] = {"expert_calls": 0}
"""Routers and what sorts tokens (`cuda_graph_scope`), mostly attention too: the host has no more calls for a layer of
experts than for any operator."""

MLP: dict[str, Any] = {"captured_mlp": True}
"""Feed-forward layers (`cuda_graph_scope = "mlp"`)."""

GRAPHED = r"(?i)(?<!\bno )(?<!\bwithout )(?<![a-z])CUDA[ _-]?graphs?(?![a-z])"
"""How notes say that a run has some."""

FULL = r"(?i)\bfull[ _-](?:iteration|CUDA[ _-]?graphs?)|\bCUDA[ _-]?graphs? \(full\)"
"""How they say that the step is one (Megatron-Core, cuda_graph_impl = "full_iteration"). Layers of dense models have
nothing outside of theirs either."""

RECIPES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    # --cuda_graphs true of all that it trains on GB200 (nemotron/launch.sh at v25.05.05; grok1/launch.sh there, on B200
    # too); other recipes of that release have none (llama4/launch.sh; NVIDIA/NeMo,
    # scripts/performance/recommended_model_configs/model_configs_gb200.csv)
    ("dgxc", r"nemotron.* GB200|grok.?1.* G?B200", WHOLE),
    # cuda_graphs in model_configs_gb200.csv and model_configs_b200.csv there, at v2.3.0 (25.04) and v2.4.0 (25.07);
    # what FSDP shards has none, scripts of v2.2.0 hardly any
    ("nemo-25.02", "", {}),
    ("nemo-25.0", r"(gpt3|llama3[ _.-]?8b|mixtral[ _-]?8x7b|nemotron|\b(sft|lora)\b).* GB200", WHOLE),
    ("nemo-25.0", r"^(?!.*\b(sft|lora)\b).*(llama3[ _.-]?8b|mixtral[ _-]?8x7b|nemotron).* B200", WHOLE),
    # what follows: NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs; release 25.09 is branch r0.1.0
    ("megatron-bridge", r"^25\.09.*(qwen3.* GB200|qwen3_30b.* B200)", WHOLE),
    ("megatron-bridge", r"^25\.09", {}),
    # v0.5.1, and the verification cards, which are later: cuda_graph_impl = "full_iteration"
    ("megatron-bridge", r"^(?!25\.|26\.0[0-5]).* moe .*mxfp8", WHOLE),
    # v0.2.0 to v0.5.1, configs/llama: some as a whole, of what is fine-tuned the feed-forward layers
    ("megatron-bridge", r"llama3_8b dense.* G?B[23]00|llama3_70b dense.* B200 bf16", WHOLE),
    ("megatron-bridge", r"llama3_70b (sft.* GB[23]00|lora.* G?B[23]00)", MLP),
    # v0.2.0 to v0.5.1: all with experts on Grace but one, and some on other hosts
    ("megatron-bridge", r"gpt.oss.* GB200", {}),
    ("megatron-bridge", r" moe .*GB[23]00|qwen3.30b.* B[23]00|gpt.oss.* B300", ROUTING),
)
"""Source, run (`graphs`), and what its software has; the first that fits counts."""


def graphs(source: str, run: str, notes: str) -> dict[str, Any]:
    """The fields of Software that say what a run holds in graphs: by its source and `run`, its table, model, type of
    model, device and dtype with blanks between them, and by its notes."""
    held = next(
        (held for start, named, held in RECIPES if source.startswith(start) and re.search(named, run, re.I)), {}
    )
    if not re.search(GRAPHED, notes):
        return held
    return held | (WHOLE if re.search(FULL, notes) or " dense" in run else ROUTING)
