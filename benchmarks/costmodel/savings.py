"""Ways to save memory that rows name: optimizers in fewer bits, on the host or inside the backward, losses in chunks or
without logits, frozen weights in 4 bits, activations on the host. What each does is from the code of the software."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from benchmarks.costmodel.predict import Software
from benchmarks.costmodel.tables import Line

IN_8_BITS = 1 + 4 / 256
"""Bytes of a moment in 8 bits: one, and a scale in 32 bits for each 256 (bitsandbytes/optim/optimizer.py, blockwise;
torchao/optim/adam.py, block_size = 256)."""

IN_4_BITS, IN_4_BITS_PLAIN = 0.5 + 1 / 64 + 4 / (64 * 256), 0.5 + 4 / 64
"""Bytes of a weight in NF4 (https://arxiv.org/abs/2305.14314, section 3): half, and for each 64 a scale in 8 bits,
whose own scale is in 32 bits for each 256 ("double quantization", and torchao/dtypes/nf4tensor.py), or one in 32."""

CHUNKS = 8
"""Of torchtune's losses (num_output_chunks = 8, torchtune/modules/loss)."""

DENIED = r"(?i)\b(?:no|not|none|without|w/o)\b"
"""How a clause says that something is not so."""

HABITS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        r"(?i)\b8[- ]?bit[- ](?:paged[- ])?(?:adam|lion|optim)|\b(?:adamw?|lion)[-_ ]?(?:bnb[-_ ])?8[-_ ]?bit|"
        r"\b(?:bnb|bitsandbytes|ao) 8[- ]?bit",
        {"moment_bytes": IN_8_BITS},
    ),
    (r"(?i)\b4[- ]?bit[- ](?:adam|optim)|\badamw?[-_ ]?4[-_ ]?bit", {"moment_bytes": 0.5 + 4 / 128}),
    # in managed memory, which no allocator of torch gives out (bitsandbytes/functional.py, get_paged)
    (r"(?i)\bpaged[-_ ]?(?:adam|lion|optim)|\bpaged_\w*(?:adam|lion)", {"moment_bytes": 0.0}),
    (r"(?i)\boptimi[sz]er[-_ ](?:step[-_ ])?in(?:to)?[-_ ](?:the[-_ ])?b(?:ac)?k?w", {"spends": True}),
    (r"(?i)\bchunked[- ](?:cross|CE\b|loss|output)", {"loss_chunks": CHUNKS}),
    (r"(?i)\bchunked[- ](?:cross|CE\b|loss|output).*\bcompile|\bcompile.*\bchunked[- ]", {"loss_fused": True}),
    (r"(?i)\bno_sync\b", {"sums_last": True}),
    (r"(?i)\bactivations?[-_ ](?:CPU[-_ ])?off-?load", {"hosts_blocks": True}),
)
"""What notes say of how memory is held, and what that is."""

NO_LOGITS = r"(?i)\bliger\b|\bcut[- ]cross|\b(?:fused[- ])?linear[- ]cross|\bunsloth\b"
"""Losses that make the logits part by part and keep none. Liger's parts are as many as classes are wider than rows
(liger_kernel/ops/fused_linear_cross_entropy.py)."""

FOUR_BITS = r"(?i)\bq-?lora\b|\bnf4\b|\b4[- ]?bit (?:base|weight|quant)"
BY_BNB = r"(?i)\bbnb\b|\bbitsandbytes\b|\bPEFT\b|hugging ?face|\btransformers\b|litgpt|lightning"
"""How text says that weights in 4 bits are bitsandbytes', whose products keep rows too (autograd/_functions.py,
MatMul4Bit: ctx.tensors = (A, B)); torchao's do not (LinearNF4)."""

PLAIN_SCALES = r"(?i)\bbnb\.nf4(?!-dq)"


def saving(software: Software, told: str, classes: int, width: int) -> Software:
    """`software` with what a row's text `told` says of memory; the model has `classes`, and rows so wide."""
    said = "; ".join(clause for clause in re.split(r"[;\n]", told) if not re.search(DENIED, clause))
    changed = {key: value for pattern, change in HABITS if re.search(pattern, said) for key, value in change.items()}
    if re.search(NO_LOGITS, said):
        changed |= {"loss_chunks": max(1, -(-classes // width)), "chunked_logits": True, "fused": True}
        software = replace(software, fused=True)
    if re.search(FOUR_BITS, said):
        changed["keeps_rows"] = bool(re.search(BY_BNB, said))
        changed["frozen_bytes"] = IN_4_BITS_PLAIN if re.search(PLAIN_SCALES, said) else IN_4_BITS
        software = replace(software, made_bytes=2 + changed["frozen_bytes"])
    made = replace(software, habits=replace(software.habits, **changed))
    made = replace(made, sums_last=made.sums_last or made.habits.sums_last)
    moment = made.habits.moment_bytes
    if not moment or "moment_bytes" not in changed:
        return made
    # two moments, read and written
    return replace(made, optimizer_bytes=made.optimizer_bytes - 4 * ((4 if made.masters else 2) - moment))


OFFLOADED = r"(?i)offload(?!\w* ?[=:] ?(?:false|off|no|none|0)\b)"
NOT_OFFLOADED = r"(?i)\b(?:no|without|w/o)[ _-](?:\w+[ _-])?offload\w*|\bactivations?[ _-](?:\w+[ _-])?off-?load\w*"
"""How a line says that weights or states are in the memory of the host, and that they are not."""


def from_host(software: Software, told: str, stages: int) -> Software:
    """`software` with an optimizer that runs on the host, where `told` says so: gradients go there as they are made
    (ZeRO-Offload, https://arxiv.org/abs/2101.06840). FSDP has weights there too
    (torch.distributed.fsdp.CPUOffloadPolicy)."""
    if not re.search(OFFLOADED, re.sub(NOT_OFFLOADED, "", told)):
        return software
    weights = re.search(r"(?i)fsdp|\bparam", told) is not None
    habits = replace(software.habits, hosted=(1.0,) * stages, spends=True, hosts_weights=weights)
    return replace(software, hosted=True, habits=habits)


LADDER = (
    "packed",
    "compile",
    "chunked cross entropy",
    "activation checkpointing",
    "optimizer step into backward",
    "activation offloading",
    "8-bit AdamW",
)
"""Techniques of torchtune's table of them (README.md, Optimization flags), each on top of those before."""

FULL_ALONE = ("optimizer step into backward", "8-bit AdamW")
"""Those that its rows with adapters do not have."""


def climbed(line: Line) -> Line:
    """A row of that table with all that it has, where its notes have the name of the last technique alone."""
    found = re.search(r"technique ladder step: ?\+? ?([^;]+)", line["notes"])
    if not found:
        return line
    step, last = found[1].lower(), len(LADDER)
    if "lora" not in step:
        last = next((i + 1 for i, name in enumerate(LADDER) if name.lower() in step), 0)
    has = [name for name in LADDER[:last] if "lora" not in step or name not in FULL_ALONE]
    again = "full" if "activation checkpointing" in has else "none"
    return Line({**line, "notes": "; ".join((line["notes"], *has)), "recompute": line["recompute"] or again})
