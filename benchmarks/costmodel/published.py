"""The table of published runs: one measured configuration per line (its columns are explained in the data's README)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.costmodel.adapters import adapters_of
from benchmarks.costmodel.config import Config, Latent
from benchmarks.costmodel.devices import cluster_of
from benchmarks.costmodel.graphs import graphs
from benchmarks.costmodel.predict import Setup, Software
from benchmarks.costmodel.ranks import FORWARDS_FIRST, Ranks
from benchmarks.costmodel.reruns import Rerun
from benchmarks.costmodel.rows import Loaded, Peak, Row
from benchmarks.costmodel.savings import climbed, from_host, saving
from benchmarks.costmodel.sharding import Sharding
from benchmarks.costmodel.software import Facts, facts, in_fewer_bits
from benchmarks.costmodel.tables import Line, Refused, count, positive, rows_of, ways
from benchmarks.costmodel.times import step_s

POSITIONS = 2048
"""Rows of the table of learned positions, whatever the sequence: it is small, and one graph serves all lengths."""

GPT2_VOCAB = 50257
"""Of models like GPT-3 whose table does not say it."""

PREDICTS_AHEAD = r"(?i)deepseek-?v3"
"""Models with one more block and head, which their table does not say (num_nextn_predict_layers = 1 in the config of
DeepSeek-V3)."""

PRECISIONS = (
    (r"fp4|float4|e2m1", "bfloat16", "float4"),
    (r"fp8|float8|e4m3", "bfloat16", "float8"),
    (r"bf16|bfloat16", "bfloat16", ""),
    (r"fp16|float16|\bhalf", "float16", ""),
    (r"fp32|float32", "float32", ""),
)
"""How the column names what is computed in, the dtype of the model, and that of matmuls where it is another."""

MEASURED = (
    (r"(?i)\bxla\b", "xla"),
    (r"(?i)-smi\b|^device\b", "device"),
    (r"(?i)reserved|peak_memory_usage", "reserved"),
    (r"(?i)alloc|\bactive\b", "allocated"),
)
"""How the column says what was counted, and which kind that is."""

UNITS = {"bytes": 1.0, "GB": 1e9, "GiB": float(1 << 30), "MiB": float(1 << 20), "MB": 1e6}


WORKSPACE = {"H100": 32 << 20, "H200": 32 << 20, "A100": 4 << 20}
"""What cuBLAS is given as workspace (Transformer Engine's get_cublas_workspace_size_bytes; torch's own is as large on
Hopper), through the allocator."""

WORKSPACES = 3
"""Of torch's cuBLAS and cuBLASLt, and of Transformer Engine."""


ADAM_BYTES = 28.0
"""Read and written by Adam for each element in 32 bits: four numbers and three."""

ON_DISK = r"(?i)infinity|nvme"
OTHER_ADAPTERS = r"(?i)\b(?:dora|lora\+|rslora|adalora|ia3)(?!\w)"

LATENT = r"\bMLA\b"

PACKED, TUNED = r"(?i)\bsquad packed\b", r"\b(?:SFT|LoRA)\b"
SQUAD = 256
"""How notes say that sequences are packed with samples of SQuAD, how models are called that are fine-tuned, and the
tokens of a sample: a paragraph of about 120 words with a question and an answer, some 200 tokens (an assumption),
rounded to what divides sequences. NeMo attends inside samples (user guide 24.07, Sequence Packing)."""

YES, NO = ("y", "yes", "true", "1", "on", "enabled"), ("n", "no", "false", "0", "off", "none", "disabled")

FAILED = r"(?i)oom|out of mem|fail|error|crash|hang|time.?out|killed|not run|skip"
"""How the column says that a run gave no measurement."""


def load(path: Path) -> Loaded:
    """The rows of the table."""
    return rows_of(path, _row, lambda line: line["row_id"])


def _row(line: Line, name: str) -> Row:
    line = climbed(line)
    if re.search(FAILED, line["status"]):
        raise Refused(f"status {line['status']}: nothing was measured")
    ranks = Ranks.of(line)
    tp, dp = ranks.tp, ranks.dp
    sharding = Sharding.of(line["zero_fsdp"], dp, max(1, count(line, "gpus_per_node", 8) // (tp * ranks.cp)))
    notes, sequence = f"{line['notes']} {line['checks']}", _sequence(line["sp"], tp)
    known = facts(
        line["source_id"],
        f"{notes} {line['model']}",
        sharding.zero,
        sequence and tp > 1,
        f"{line.get('source_table', '')} {line['model']}",
    )
    zero = sharding.zero if line["zero_fsdp"] else known.zero
    model = _model(line, known, tp)
    precision, matmul = _precision(line)
    # one microbatch, for memory, where a line does not say how many there are
    alone = count(line, "micro_batch") * dp if line["peak_mem_value"] and line["micro_batch"] else None
    batch = count(line, "global_batch", alone)
    micro = count(line, "micro_batch", _usual_micro(batch, ranks, known))
    if batch % (micro * dp):
        raise Refused(f"a batch of {batch} is no multiple of micro batch {micro} x {dp} ranks")
    again = Rerun.of(line["recompute"], line["recompute_detail"])
    ep = ways(line, "ep")
    whole, over_context = _own_experts(line, known, ranks, ep)
    setup = Setup(
        micro,
        batch // micro // dp,
        count(line, "seq_len"),
        tp=tp,
        cp=ranks.cp,
        ep=ep,
        whole_experts=whole,
        experts_over_context=over_context,
        dp=dp,
        pp=ranks.pp,
        vpp=ranks.vpp,
        flushes=_flushes(notes, micro, batch // dp) if ranks.pp > 1 else 1,
        schedule=ranks.schedule,
        blocks=ranks.dealt(model.layers),
        sequence_parallel=sequence and tp > 1,
        zero=zero,
        replicas=sharding.replicas,
        recompute=again.kind,
        recompute_share=again.share,
        parts=again.parts,
        again=(again.first,) * (ranks.pp * ranks.vpp) if again.first else (),
        software=_software(line, known, (precision, matmul), model, sequence and tp > 1, ranks),
    )
    cluster = cluster_of(line, ranks.gpus)
    seconds = (
        None
        if not line["global_batch"]
        else step_s(
            line,
            ranks.gpus,
            model,
            cluster.device.peak_flops.get(matmul or precision, 0.0),
            again,
            causal=known.causal_flops,
        )
    )
    peaks = () if ranks.both_ways or precision == "float32" else _peaks(line)  # memory is told of mixed precision
    if seconds is None and not peaks:
        raise Refused("neither a step time nor memory was published")
    remarks = (line["checks"],) if line["checks"] else ()
    return Row(
        name,
        line["source_id"],
        model,
        setup,
        cluster,
        precision,
        seconds,
        peaks,
        unsaid=not line["recompute"],
        complete=_complete(line),
        remarks=(*remarks, line["notes"]),
    )


def _complete(line: Line) -> bool:
    """Whether all is published that a prediction needs. The number of parameters follows from sizes; but how wide
    latent vectors are is known of published models alone, not where notes mention such."""
    said = line["config_complete"]
    return said == "full" or (said == "full-except:n_params" and not re.search(LATENT, line["notes"]))


def _usual_micro(batch: int, ranks: Ranks, known: Facts) -> int | None:
    """Samples of a microbatch where a line does not say: one where a data-parallel rank has no more, or what the
    software makes of them; None where that is not known."""
    if batch == ranks.dp:
        return 1
    return (
        batch // (ranks.dp * ranks.pp)
        if known.as_many_microbatches and ranks.pp > 1 and batch % (ranks.dp * ranks.pp) == 0
        else None
    )


def _flushes(notes: str, micro: int, samples: int) -> int:
    """How many times a step fills its pipeline, with `samples` of a data-parallel rank in microbatches of `micro`:
    where the batch of one run of the schedule is said, and that gradients of several add up (NeMo AutoModel). Where
    only the microbatches are called so (DeepSpeed's gradient_accumulation_steps) they go through it together."""
    said = re.search(r"(?i)local batch (\d+), grad accum (\d+)", notes)
    local, times = map(int, said.groups()) if said else (micro, 1)
    return times if local > micro and local * times == samples and local % micro == 0 else 1


def _model(line: Line, known: Facts, tp: int) -> Config:
    kind, about = line["model_type"], line["arch_source"]
    if kind not in ("dense-gpt", "dense-llama", "dense", "moe"):
        raise Refused(f"models of type {kind} are not built")
    if re.search(ON_DISK, f"{line['model']} {line['zero_fsdp']}"):
        raise Refused("training from disks is not priced")
    if other := re.search(OTHER_ADAPTERS, line["model"]):
        raise Refused(f"adapters of kind {other[0]} are not built")
    hidden, heads, layers = (count(line, key) for key in ("hidden", "n_heads", "n_layers"))
    width = _number(r"(?i)head[_ ]dim(?:ension)?[ =:]*(\d+)", about)
    if not width and hidden % heads:
        raise Refused(f"hidden {hidden} is no multiple of {heads} heads, and no head_dim was published")
    head_dim = width or hidden // heads
    # gated ones are of many widths
    ffn = count(line, "ffn_hidden", None if kind == "dense-llama" or (kind == "moe" and _leading(line)) else 4 * hidden)
    # a gated feed-forward is narrower, for it has a third matrix
    gpt = kind == "dense-gpt" or (kind == "dense" and ffn == 4 * hidden)
    squared = "squared-relu" in about
    notes = f"{about} {line['notes']}"
    tied = (gpt and not squared and "untied" not in notes) or re.search(
        r"\btied?[ _](word[ _])?embeddings?\b(?![ =:]*false)", about
    ) is not None
    adapters = adapters_of(line, known.adapters)
    vocab = -(-count(line, "vocab", GPT2_VOCAB if gpt else None) // (128 * tp)) * 128 * tp  # as Megatron pads
    moe = kind == "moe"
    if moe and "; gelu;" in notes:
        raise Refused("experts without gates are not built")
    return Config(
        vocab=vocab,
        positions=POSITIONS,
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(count(line, "n_kv_heads", heads), heads, tp),
        head_dim=head_dim,
        hidden=hidden,
        ffn=ffn,
        rms=not gpt,
        norm_in_parts=known.norm_in_parts,
        bias_apart=known.bias_apart,
        gated=not gpt,
        squared_relu=squared,
        bias=gpt and not squared and "no bias" not in notes,
        rotary=not gpt or squared,
        tied=tied,
        dropout=known.dropout,
        fused_attention=known.flash,
        window=_window(about, count(line, "seq_len")),
        packed=_packed(line, known),
        latent=_latent(notes, heads, hidden),
        adapters=adapters.rank,
        adapted=adapters.layers,
        **(_experts(line, known) if moe else {}),
    )


def _kv_heads(published: int, heads: int, tp: int) -> int:
    """Heads of keys and values, as many as there are tensor-parallel ranks at least: each rank has a whole one, copies
    where there are fewer (Megatron-Core, num_query_groups < tensor_model_parallel_size), and works as with as many."""
    return tp if tp % published == 0 and heads % tp == 0 and tp > published else published


def _window(about: str, seq: int) -> int:
    """Tokens that every second layer attends to; 0 where a sequence is no longer than two windows, whose causal
    attention multiplies no more."""
    window = _number(r"sliding-window (\d+)", about)
    if seq <= 2 * window:
        return 0
    if window and seq % window:
        raise Refused(
            f"a sequence of {seq} is no multiple of its window of {window}, in pieces of which attention is priced"
        )
    return window


def _packed(line: Line, known: Facts) -> int:
    """Tokens of a sample where sequences are packed with samples that do not attend to each other, and it is known of
    which data set these are; else 0."""
    packed = re.search(PACKED, line["notes"]) or (known.squad and re.search(TUNED, line["model"]))
    return SQUAD if packed and count(line, "seq_len") % SQUAD == 0 else 0


def _number(pattern: str, text: str) -> int:
    """The number that `text` states in that way; 0 where it states none."""
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _latent(about: str, heads: int, hidden: int) -> Latent | None:
    """Attention from latent vectors. Queries have none where that would not make them narrower than the model is:
    DeepSeek-V2-Lite (https://arxiv.org/abs/2405.04434, appendix B), Moonlight."""
    if not re.search(LATENT, about):
        return None
    usual = Latent()
    return usual if heads * usual.plain > hidden else replace(usual, queries=0)


def _experts(line: Line, known: Facts) -> dict[str, Any]:
    """What a model with experts has beside a dense one."""
    about, dense = line["arch_source"], _leading(line)
    # Mixtral's width is that of its experts
    width = count(line, "moe_ffn", count(line, "ffn_hidden") if line["ffn_hidden"] and not dense else None)
    ahead = known.ahead and re.search(PREDICTS_AHEAD, line["model"]) is not None
    return {
        "experts": count(line, "n_experts"),
        "top_k": count(line, "moe_topk"),
        "expert_ffn": width,
        "shared": width * _number(r"(\d+) shared expert", about),
        "dense": dense,
        "ahead": ahead,
    }


def _leading(line: Line) -> int:
    """How many layers without experts are in front of those with them."""
    about = line["arch_source"].replace("first layer dense", "1 dense layer")
    return _number(r"first (\d+) layers dense", about) or _number(r"(\d+) dense layer", about)


def _precision(line: Line) -> tuple[str, str]:
    found = next(
        ((dtype, matmul) for pattern, dtype, matmul in PRECISIONS if re.search(pattern, line["dtype"].lower())), None
    )
    if found is None:
        raise Refused(f"dtype {line['dtype']!r} is not one of bf16, fp16, fp32, fp8, mxfp8, nvfp4")
    return found


def _sequence(text: str, tp: int) -> bool:
    """Whether what goes from block to block is cut along the sequence: it is over tensor-parallel ranks, unless the
    column says otherwise."""
    word = "y" if text == str(tp) else text.lower()  # some state over how many ranks
    if word not in ("", *YES, *NO):
        raise Refused(f"sp is {text}; wanted y or n, or the {tp} tensor-parallel ranks")
    return word in YES or (not word and tp > 1)


def _own_experts(line: Line, known: Facts, ranks: Ranks, ep: int) -> tuple[bool, bool]:
    """Whether tensor-parallel ranks have experts of their own, and context-parallel ones: as the line or its software
    says, or where there are more ways to cut experts than data-parallel ranks. The width of experts is cut over
    tensor-parallel ranks where nothing else is said (Megatron-Core, expert_tensor_parallel_size, which came with ranks
    of experts that are numbered by themselves: https://arxiv.org/abs/2504.14960)."""
    stated = re.search(r"ETP ?= ?(\d+)\b|_etp(\d+)_", f"{line['notes']} {line['model']}")
    said = known.whole_experts or (stated is not None and "1" in stated.groups())
    whole = (
        ranks.tp > 1 and ep > 1 and ep % ranks.tp == 0 and (said or (ranks.dp % ep > 0 and not ranks.over_context(ep)))
    )
    ways = ep // ranks.tp if whole else ep
    return whole, ranks.over_context(ways) and (known.folded or stated is not None or ranks.dp % ways > 0)


def _software(
    line: Line, known: Facts, dtypes: tuple[str, str], model: Config, sequence_parallel: bool, ranks: Ranks
) -> Software:
    """What the software does with a `model` in a dtype, matmuls in another, on the device of a line. DualPipe runs
    one microbatch's tokens to experts and back beside another's compute (https://arxiv.org/abs/2412.19437, section
    3.2.1)."""
    precision, matmul = dtypes
    run = " ".join(line.get(column, "") for column in ("source_table", "model", "model_type", "gpu", "dtype"))
    habits = replace(
        known.software.habits,
        kept_bytes=1 if matmul else 0,
        workspace_bytes=WORKSPACES * next((size for name, size in WORKSPACE.items() if name in line["gpu"]), 0),
    )
    told = saving(
        replace(known.software, habits=habits), f"{line['notes']}; {line['model']}", model.vocab, model.hidden
    )
    if re.search(r"(?i)\bdeepspeed\b", f"{line['notes']} {line['zero_fsdp']}"):  # sums gradients of each microbatch
        told = replace(told, sums_last=False, habits=replace(told.habits, sums_last=False))
    told = from_host(told, f"{line['model']} {line['zero_fsdp']}", ranks.pp * ranks.vpp)
    software = in_fewer_bits(told, matmul, line["notes"], sequence_parallel)
    if precision == "float32":  # nothing is sent in fewer bits
        whole = max(software.optimizer_bytes, ADAM_BYTES)
        software = replace(software, gathered_bytes=4, gradient_bytes=4, optimizer_bytes=whole)
    return replace(
        replace(software, **graphs(line["source_id"], run, line["notes"])),
        matmul=matmul,
        hidden_tokens=1.0 if ranks.schedule == "dualpipev" else 0.0,
    )


def _peaks(line: Line) -> tuple[Peak, ...]:
    """The peak, if one was published in a unit and of a kind that are known, of a schedule whose memory is that of
    1F1B. A log that the last rank wrote is of the last place."""
    kind = next((kind for pattern, kind in MEASURED if re.search(pattern, line["peak_mem_kind"])), "")
    if (
        not line["peak_mem_value"]
        or line["peak_mem_unit"] not in UNITS
        or not kind
        or re.search(FORWARDS_FIRST, line["schedule"])
    ):
        return ()
    place = -1 if "(last) rank" in line["notes"] else None
    return (Peak(positive(line["peak_mem_value"], "peak_mem_value") * UNITS[line["peak_mem_unit"]], kind, place),)
