"""What the software behind published runs does that tables do not say: facts about kernels, from the documents and code
of each project.

Nothing here is a number fitted to its runs. Sources that are not listed get what training software of 2024 and later
does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from autopar.memory import Habits
from benchmarks.costmodel.adapters import EVERYWHERE, FUSED_QKV, ON_QUERIES, Adapters
from benchmarks.costmodel.predict import Software
from benchmarks.costmodel.savings import CHUNKS


@dataclass(frozen=True)
class Facts:
    """`flash`: attention is one kernel. `whole_experts`: their width is not cut. `folded`: context-parallel ranks have
    experts of their own where that can be. `zero`: ZeRO's stage where a line says none. `ahead`: models that can
    predict the token behind the next do. `norm_in_parts`: RMS norms are operators one by one. `bias_apart`: biases are
    added behind the matmuls. `causal_flops`: of attention its FLOP/s count half of the square of scores. `dropout`: the
    rate while training. `as_many_microbatches`: as there are places of a pipeline, where a line says nothing of them.
    `adapters`: what rows that train such have. `squad`: fine-tuning (SFT, LoRA) is on packed samples of SQuAD.
    `why`: where it is known from."""

    software: Software
    flash: bool = True
    whole_experts: bool = False
    folded: bool = False
    zero: int = 0
    ahead: bool = False
    norm_in_parts: bool = False
    bias_apart: bool = False
    causal_flops: bool = False
    dropout: float = 0.0
    as_many_microbatches: bool = False
    adapters: Adapters = EVERYWHERE
    squad: bool = False
    why: str = ""


PYTORCH = Habits(frames=False, keeps_sent=False, casts_gradients=False, log_softmax=True, fused_update=True)
"""Eager PyTorch: what autograd does not keep goes with its last reader; optimizers with fused kernels."""

IN_BUFFERS = replace(PYTORCH, standing=True, fused=True, regathers=True, loss_in_place=True)
"""Megatron-Core: gradients add up in buffers (DistributedDataParallel), what is gathered along the sequence is gathered
again (tensor_parallel/layers.py), the cross-entropy of classes over ranks works in one tensor of 32 bits
(tensor_parallel/cross_entropy.py), outputs of stages are given back when they are sent
(deallocate_pipeline_outputs)."""

EXPERT_CALLS = 150
"""Calls of the host for a layer of experts of Megatron-Core that no graph captures, on the hosts of `dispatch_s`:
fitted on the fit half of all rows with experts (docs/cost-model.md)."""

MEGATRON = Facts(
    Software(hidden_tensor=0.5, attention=1.7, tokens_in_parts=True, expert_calls=EXPERT_CALLS, habits=IN_BUFFERS),
    why="Megatron-Core with Transformer Engine: fused kernels, gradients and weights in buckets under compute, "
    "tensor-parallel collectives in chunks beside their matmuls (tp_comm_overlap) where the sequence is cut; "
    "attention of cuDNN, as fast as the third FlashAttention, 1.7 times the second on H100 "
    "(https://arxiv.org/abs/2407.08608, figure 5); tokens that are cut along the sequence go to their experts so, "
    "and are gathered for tensor-parallel experts there (MoEAlltoAllTokenDispatcher, "
    "megatron/core/transformer/moe/token_dispatcher.py)",
)
SHARD_BYTES = 16.0
"""FSDP copies what was gathered into weights, forward and backward (2 x 4 bytes), and gradients into a flat buffer that
is cast to 32 bits and scaled (8): torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, _runtime_utils.py.
Checkpoints without reentrance end a second forward early (torch/utils/checkpoint.py, set_checkpoint_early_stop)."""

NEMO = replace(
    MEGATRON,
    adapters=FUSED_QKV,
    squad=True,
    ahead=True,
    software=replace(MEGATRON.software, gradient_bytes=2),
    why=f"{MEGATRON.why}; the performance recipes of NeMo and Megatron-Bridge sum gradients in 16 bits "
    "(grad_reduce_in_fp32 = False, grad_sync_dtype=bf16) and train DeepSeek-V3 with its prediction ahead "
    "(mtp_num_layers = 1); those of NeMo fine-tune on SQuAD, packed (user guides, performance summary; "
    "finetune_recipe(performance_mode = True) and SquadDataModule in NVIDIA/dgxc-benchmarking v25.02, "
    "llama3/finetuning/llama3_finetune.py)",
)
BRIDGE = replace(
    NEMO,
    zero=1,
    squad=False,
    whole_experts=True,
    folded=True,
    causal_flops=True,
    software=replace(NEMO.software, rows_once=True),
    why=f"{NEMO.why}; experts are whole (expert_tensor_parallel_size = 1) and lie over context-parallel ranks before "
    "data-parallel ones (expert_decoder_rank_generator, megatron/core/parallel_state.py), optimizer state is cut "
    "(use_distributed_optimizer = True), tokens go to a node once (moe_token_dispatcher_type = flex with DeepEP "
    "or HybridEP; megatron/bridge/recipes, perf_recipes); FLOPs of attention are of half of the square "
    "(num_floating_point_operations, megatron/bridge/training/utils/flop_utils.py)",
)
MEGATRON_LM = replace(
    MEGATRON, dropout=0.1, why=f"{MEGATRON.why}; its default rate of dropout (megatron/training/arguments.py)"
)
MEGATRON_2021 = Facts(
    Software(overlap_gradients=False, gradient_bytes=2, habits=replace(IN_BUFFERS, regathers=False)),
    flash=False,
    dropout=0.1,
    bias_apart=True,
    why="Megatron-LM of 2020 to 2022: fused softmax and bias kernels behind the matmuls (ColumnParallelLinear and "
    "RowParallelLinear add biases by themselves, or leave it to the next kernel: megatron/mpu/layers.py), no "
    "fused attention, gradients summed behind the backward",
)
FSDP = Facts(
    Software(fused=False, overlap_gradients=True, shard_bytes=SHARD_BYTES, stops_early=True, habits=PYTORCH),
    why="FSDP in eager mode, gathers and scatters on their own stream",
)
PURE: dict[str, Any] = {"masters": False, "gradient_bytes": 2, "optimizer_bytes": 14.0}
"""Parameters, gradients and moments all in 16 bits: the optimizer reads four of an element and writes three."""

TUNE = replace(
    FSDP,
    software=replace(FSDP.software, **PURE),
    why=f"{FSDP.why}; dtype: bf16 of its recipes is that of parameters, gradients and optimizer state "
    "(docs/source/tutorials/memory_optimizations.rst, Model Precision)",
)
LAST = replace(PYTORCH, sums_last=True)
"""Gradients of FSDP stay whole until the last microbatch."""

LIGHTNING = replace(
    FSDP,
    adapters=ON_QUERIES,
    software=replace(FSDP.software, sums_last=True, habits=replace(LAST, flat=True)),
    why=f"{FSDP.why}; gradients summed behind the last microbatch (no_backward_sync, litgpt/finetune/lora.py), weights "
    "of a block in one flat parameter, frozen ones too (lightning/fabric/strategies/fsdp.py, use_orig_params)",
)
HUGGING_FACE = replace(
    FSDP,
    norm_in_parts=True,
    software=replace(FSDP.software, stops_early=False, sums_last=True, habits=LAST),
    why="eager, RMS norms of several operators (LlamaRMSNorm, transformers/models/llama/modeling_llama.py), "
    "checkpoints with reentrance (gradient_checkpointing_enable, use_reentrant, transformers/modeling_utils.py), "
    "gradients summed behind the last microbatch (no_sync in training_step, transformers/trainer.py; not by DeepSpeed)",
)
TITAN = replace(
    FSDP,
    norm_in_parts=True,
    as_many_microbatches=True,
    software=replace(FSDP.software, gathers_once=True),
    why=f"{FSDP.why}; RMS norms of several operators, as torch had them until 2.9 (pytorch/pytorch#153666, #157345); "
    "stages of a pipeline gather weights once per step (fsdp_reshard_after_forward = default) and sum gradients "
    "behind the last microbatch (torch/distributed/pipelining/stage.py, backward_maybe_with_nosync), and run as "
    "many microbatches as there are places where nothing else is said (build_pipeline_schedule, n_microbatches = "
    "pipeline_parallel_degree)",
)
COMPOSER_BYTES = 88.0
"""What the optimizer of Composer reads and writes per element: DecoupledAdamW is eight operators in float32 (80;
composer/optim/decoupled_weight_decay.py), and clipping multiplies each gradient (8; clip_grad_norm_ of
torch/distributed/fsdp/fully_sharded_data_parallel.py)."""

COMPOSER = Facts(
    Software(
        fused=False,
        overlap_gradients=True,
        attention=0.57,
        shard_bytes=SHARD_BYTES,
        stops_early=True,
        optimizer_bytes=COMPOSER_BYTES,
        habits=PYTORCH,
    ),
    why="as FSDP, under torch 2.1 (mosaicml/llm-foundry b2a43a147, scripts/train/benchmarking/sweep.sh), with the "
    "first FlashAttention (attn_impl = triton, submit_benchmarks.py): 0.57 of the rate of the second "
    "(https://arxiv.org/abs/2307.08691, figure 4)",
)
NANOTRON = Facts(
    Software(fused=False, habits=replace(PYTORCH, standing=True, regathers=True)),
    why="eager, FlashAttention-2, gates multiplied by an operator of their own (nanotron/models/llama.py), gradients "
    "that add up and are summed in buffers of 32 bits (optim/gradient_accumulator.py), what is gathered along the "
    "sequence gathered again, collectives by themselves (parallel/tensor_parallel/nn.py), a loss that keeps the "
    "exponentials (functional.py)",
)
XLA = Facts(
    Software(
        captured=True,
        overlap_gradients=False,
        gradient_bytes=2,
        habits=replace(PYTORCH, fused=True, loss_in_place=True),
    ),
    flash=False,
    dropout=0.0,
    why="XLA: one program, loops fused, no fused attention",
)

PAXML = replace(
    XLA,
    software=replace(XLA.software, overlap_gradients=True),
    why="XLA of 2023 and later: its latency-hiding scheduler runs collectives beside compute; attention is no kernel "
    "of its own (xla_gpu_enable_cudnn_fmha=false; NVIDIA/dgxc-benchmarking v25.01, paxml/configure.sh)",
)
JAX = replace(
    PAXML,
    flash=True,
    software=replace(PAXML.software, attention=MEGATRON.software.attention),
    why="as PaxML, with attention of cuDNN (attention=cudnn_flash_te; maxtext/configure.sh there)",
)

SOURCES = (
    ("alpa", XLA),
    ("bigscience", MEGATRON_2021),
    ("dgxc", NEMO),
    ("korthikanti", MEGATRON_2021),
    ("llm-foundry", COMPOSER),
    ("megatron-bridge", BRIDGE),
    ("megatron-lm", MEGATRON_LM),
    ("megatron-readme-2020", MEGATRON_2021),
    ("megatron-readme-h100", MEGATRON),
    ("megatron-sc21", MEGATRON_2021),
    ("nanotron", NANOTRON),
    ("nemo-automodel", FSDP),
    ("nemo", NEMO),
    ("torchtitan", TITAN),
    ("torchtune", TUNE),
)
"""Beginning of a source's name -> what its software does."""


def in_fewer_bits(software: Software, matmul: str, notes: str, sequence_parallel: bool) -> Software:
    """With matmuls in `matmul` where that is another dtype than the model's."""
    if matmul == "float4":
        return replace(software, cast_bytes=IN_4_BITS_BYTES)
    return in_8_bits(software, notes, sequence_parallel) if matmul else software


def in_8_bits(software: Software, notes: str, sequence_parallel: bool) -> Software:
    """With matmuls in 8 bits what is gathered along the sequence, half of tensor-parallel traffic, goes in 8 bits
    (Transformer Engine's LayerNormLinear and torchao's Float8ColwiseParallel quantise first), and so do the weights of
    FSDP (torchao's enable_fsdp_float8_all_gather); not where every row has a scale of its own."""
    by_torchao = software.shard_bytes > 0
    if "rowwise" in notes:
        return replace(software, **ROWWISE) if by_torchao else software
    found = replace(
        software,
        tensor_share=0.75 if sequence_parallel else 1.0,
        gathered_bytes=1 if by_torchao else 2,
        casts_shards=sequence_parallel,
    )
    return replace(found, **TENSORWISE) if by_torchao else found


IN_4_BITS_BYTES = 7.0
"""What casting an operand to NVFP4 moves per element: read for the largest element of the tensor, which its scale is
of; read and written by rows; read, turned by a Hadamard matrix and written by columns, in a kernel of its own
(TransformerEngine, pytorch/csrc/quantizer.cpp, NVFP4Quantizer::quantize_impl)."""

TENSORWISE = {"cast_bytes": 5.0, "turn_bytes": 2.0}
"""torchao's scale is of the whole tensor of now: it is read for its largest element, then read and written
(torchao/float8/float8_scaling_utils.py), and once more to be laid out by columns, which the 8-bit matmuls of H100 want
of one operand (torch._scaled_mm). Kernels of Transformer Engine write both at once."""

ROWWISE = {"cast_bytes": 8.0, "matmul_share": 0.75}
"""A scale for each row of each matmul: operands are cast from 16 bits for each of the two matmuls that they are in. The
rate is what the difference between both recipes in torchao's README leaves when casts are taken off
(torchao/float8/README.md, Llama-3-8B on 8 H100: 25 and 10 % over 16 bits)."""


SHORT_MOMENTS = r"\(bf16\) Adam moments|Moonlight"
"""Runs whose optimizer keeps its moments in 16 bits: those that say so, and the recipe of Moonlight ("precision-aware
optimizer with bf16 gradients/moments": NVIDIA-NeMo/Megatron-Bridge, recipes/moonlight)."""


NOTED: tuple[tuple[str, dict[str, Any]], ...] = (
    # gradients are summed in 16 bits; what FSDP shards stays in float32 (torch.distributed.fsdp.MixedPrecision)
    ("mode PURE", {"gradient_bytes": 2}),
    # DotProductAttention of Transformer Engine, which is cuDNN's
    (r"\bTE\b(?!.*(SDPA|FlexAttn))", {"attention": MEGATRON.software.attention}),
    (
        r"(?i)\bpure (?:bf|bfloat|fp|float|half|16)|\b(?:bf|fp)?16-true\b|\bno (?:float32|fp32|32-bit) master",
        PURE,
    ),
    ("(?i)fake balanced gate", {"in_a_row": True}),  # NeMo AutoModel's (autopar.routing.parts_of_run)
)
"""What notes say of software, and what that is."""


CHUNKED = replace(PYTORCH, loss_chunks=CHUNKS, loss_fused=True)
"""A loss in chunks that is compiled by itself."""

BY_TABLE: tuple[tuple[str, str, dict[str, Any]], ...] = (
    # of May 2023 (300cc5c58), under torch 1.13.1, whose checkpoints run all of a block again (pytorch/pytorch#96866
    # came with 2.1)
    ("llm-foundry", "A100 40GB", {"stops_early": False}),
    # of January 2024 (5e85bd62d, sweep.py): attn_impl = flash for these, of flash-attn 2.4.2
    ("llm-foundry", r"Large Scale.* MPT-[137]b$", {"attention": 1.0}),
    # the recipes of September 2024 (30b8519e8): a loss in chunks, compiled, and for all of a model on one device an
    # optimizer in the backward with paged state (recipes/configs/llama3_1, 8B_full_single_device.yaml)
    ("torchtune", "^Memory and training speed", {"habits": CHUNKED}),
    (
        "torchtune",
        "^Memory and training speed .*full finetune$",
        {"habits": replace(CHUNKED, spends=True, moment_bytes=0.0)},
    ),
)
"""Source, what its table and model are called, and what was other software there."""

OF_OTHERS = (
    (r"\bmethod megatron\b", MEGATRON_2021),
    (r"(?i)\bpax(ml)?\b", PAXML),
    (r"(?i)\b(maxtext|jax)\b", JAX),
)
"""How notes or a model's name say that a row is of other software than its source's, and which: Alpa's tables have runs
of Megatron-LM beside its own (alpa-projects/alpa, benchmark/megatron), those of NVIDIA's recipes some of JAX."""

COMPILED = r"torch\.compile|(?:^|[,;]) ?compiled?\b"
"""How notes say that blocks are compiled; losses seldom are."""

BY_HUGGING_FACE = (
    r"(?i)\b(?:transformers|hugging ?face|HF)\b(?! (?:config|checkpoint|hub|model|card|token))|"
    r"\b(?:PEFT|TRL)\b|axolotl|llama-?factory|xtuner"
)
BY_LIGHTNING = r"(?i)\blit-?gpt\b|\blightning\b"
EAGER = r"(?i)\beager\b|(?<!megatron-)\bdeepspeed\b|\bpytorch (?:DDP|FSDP)\b"
"""How the name of a source that is not listed, or a row's notes, say that its software is torch's own operators."""


def _unlisted(told: str, zero: int) -> Facts:
    """The facts about software of which a row says `told`."""
    if re.search(r"(?i)megatron|\bnemo\b", told):
        return FSDP if zero == 3 or "torch.compile" in told else MEGATRON
    if re.search(BY_HUGGING_FACE, told):
        return HUGGING_FACE
    if re.search(BY_LIGHTNING, told):
        return LIGHTNING
    return FSDP if zero == 3 or "torch.compile" in told or re.search(EAGER, told) else MEGATRON


def facts(source: str, notes: str, zero: int, sequence_parallel: bool, table: str = "") -> Facts:
    """The facts about one row: those of its source, corrected by what its notes say and what is known of its `table`,
    whose name has that of the model behind it. Software of a source that is not listed is torch's own where it is
    called so, cuts weights at rest or is compiled, else Megatron-Core."""
    listed = (
        *(facts for pattern, facts in OF_OTHERS if re.search(pattern, notes)),
        *(facts for start, facts in SOURCES if source.startswith(start)),
    )
    found = next(iter(listed), None) or _unlisted(f"{source} {notes}", zero)
    software = found.software
    for start, pattern, known in BY_TABLE:
        if source.startswith(start) and re.search(pattern, table):
            software = replace(software, **known)
    if re.search(COMPILED, notes):
        habits = replace(software.habits, fused=True, keeps_sums=True)
        software = replace(software, fused=True, captured=True, habits=habits)
        found = replace(found, norm_in_parts=False)
    if re.search("async ?tp", notes.lower()):
        software = replace(software, hidden_tensor=MEGATRON.software.hidden_tensor)
    elif not sequence_parallel:
        software = replace(software, hidden_tensor=0.0)
    for pattern, noted in NOTED:
        if re.search(pattern, notes):
            software = replace(software, **noted)
    if re.search("HybridEP|DeepEP", notes, re.I):
        software = replace(software, rows_once=True)
    elif "alltoall" in notes:
        software = replace(software, rows_once=False)
    software = replace(software, tokens_in_parts=software.tokens_in_parts and sequence_parallel)
    if re.search(SHORT_MOMENTS, notes, re.I):
        software = replace(software, habits=replace(software.habits, moment_bytes=2))
    # cases of Megatron-LM's tests whose names have no te run its own layers
    local = "_mcore_" in notes and "_te_" not in notes
    if local or "attention-backend unfused" in notes:
        found = replace(found, flash=False)
    if source.startswith("torchtune") and re.search("^Memory and training speed", table):
        found = replace(found, adapters=ON_QUERIES)
    return replace(found, software=software)
