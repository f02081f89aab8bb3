"""Which software published rows were run with, and what that does."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.costmodel import published
from benchmarks.costmodel.software import facts
from tests.helpers.published_rows import RUN, write


@pytest.mark.parametrize(
    "name, vpp, schedule, sizes",
    [
        ("ZB-H1", "1", "interleaved_zero_bubble", (2, 1, 8, 8)),
        ("zero bubble (ZB-1p)", "4", "interleaved_zero_bubble", (2, 4, 8, 8)),
        ("ZB-V", "", "zbv_zero_bubble", (2, 2, 8, 8)),
        ("DualPipeV", "2", "dualpipev", (2, 2, 8, 8)),
        ("DualPipe", "1", "dualpipev", (1, 2, 16, 4)),
        ("1F1B", "1", "", (2, 1, 8, 8)),
    ],
)
def test_schedules_that_take_a_backward_apart(
    tmp_path: Path, name: str, vpp: str, schedule: str, sizes: tuple[int, ...]
) -> None:
    """A pipeline that microbatches enter from both ends is as two of half as many places, which turn back."""
    found = published.load(write(tmp_path / "published_runs.csv", [RUN | {"schedule": name, "vpp": vpp}]))
    (row,) = found.rows
    assert (
        row.setup.schedule == schedule and (row.setup.pp, row.setup.vpp, row.setup.dp, row.setup.microbatches) == sizes
    )
    assert row.setup.software.hidden_tokens == name.startswith("Dual")
    assert bool(row.peaks) == (name != "DualPipe")  # whose places have the weights of two stages


@pytest.mark.parametrize(
    "name, vpp, stages",
    [("interleaved 1F1B", "", 2), ("1F1B (VPP)", "n/a", 2), ("Interleaved", "4", 4), ("interleaved", "1", 1)]
    + [(name, "", 1) for name in ("", "1F1B", "non-interleaved 1F1B", "GPipe")],
)
def test_interleaved_schedules_have_two_stages_on_a_place_where_nothing_else_is_said(
    tmp_path: Path, name: str, vpp: str, stages: int
) -> None:
    """They were priced as one stage each, with the bubble of that."""
    (row,) = published.load(write(tmp_path / "published_runs.csv", [RUN | {"schedule": name, "vpp": vpp}])).rows
    assert (row.setup.vpp, row.setup.schedule) == (stages, "")


@pytest.mark.parametrize(
    "notes, zero, hidden", [("", 0, 0.5), ("", 3, 0.0), ("torch.compile", 0, 0.0), ("torch.compile, async TP", 0, 0.5)]
)
def test_compiled_software_is_torchs_own(notes: str, zero: int, hidden: float) -> None:
    """Tensor parallelism of other software than is listed was taken for Megatron-Core's, whose collectives run beside
    matmuls, unless weights were cut at rest too."""
    assert facts("somebody", notes, zero, True).software.hidden_tensor == hidden


def test_eager_software_that_cuts_tensors_is_not_taken_for_megatron_core() -> None:
    """Of nanotron's layers nothing is fused, and collectives run by themselves."""
    mine, core = (facts(source, "", 1, True).software for source in ("nanotron", "somebody"))
    assert (mine.fused, mine.hidden_tensor, mine.attention, mine.gradient_bytes) == (False, 0.0, 1.0, 4)
    assert (
        core.fused and core.hidden_tensor and mine.habits.standing and mine.habits.regathers and not mine.habits.fused
    )


@pytest.mark.parametrize(
    "source, notes, fused, in_parts, early",
    [
        ("somebody", "Hugging Face Trainer, LoRA by PEFT", False, True, False),
        ("axolotl", "", False, True, False),
        ("litgpt", "", False, False, True),
        ("somebody", "eager, PyTorch DDP", False, False, True),
        ("somebody", "transformers, torch.compile", True, False, False),
        ("somebody", "Megatron-DeepSpeed, checkpoints of Hugging Face", True, False, False),
        ("nemo-25.02", "Hugging Face checkpoint, eager", True, False, False),
        ("somebody", "sizes of the HF config", True, False, False),
        ("somebody", "DeepSpeed, Nemotron-4", False, False, True),
        ("somebody", "", True, False, False),
    ],
)
def test_software_that_is_called_by_its_name(source: str, notes: str, fused: bool, in_parts: bool, early: bool) -> None:
    """Without sharded weights it was taken for Megatron-Core, with its fused kernels, attention of cuDNN and gradients
    in buffers of 32 bits."""
    found = facts(source, notes, 0, False)
    assert (found.software.fused, found.norm_in_parts, found.software.stops_early) == (fused, in_parts, early)
    assert found.software.habits.standing == (fused and "torch.compile" not in notes)


@pytest.mark.parametrize(
    "source, notes, dtype, masters, gradient_bytes, optimizer_bytes",
    [
        ("torchtune", "", "bf16", False, 2, 14.0),
        ("torchtune", "", "fp32", False, 4, 28.0),
        ("somebody", "pure bf16", "bf16", False, 2, 14.0),
        ("litgpt", "precision bf16-true", "bf16", False, 2, 14.0),
        ("somebody", "FSDP2, no fp32 masters", "bf16", False, 2, 14.0),
        ("llm-foundry", "mode PURE (DEFAULT: bf16 compute; PURE: everything bf16)", "bf16", True, 2, 88.0),
        ("megatron-bridge", "precision-aware optimizer with (bf16) Adam moments", "bf16", True, 2, 30.0),
        ("somebody", "", "bf16", True, 4, 30.0),
        ("somebody", "", "fp32", True, 4, 30.0),
    ],
)
def test_training_all_in_16_bits(
    tmp_path: Path, source: str, notes: str, dtype: str, masters: bool, gradient_bytes: int, optimizer_bytes: float
) -> None:
    """Parameters, gradients and moments of 8 bytes for an element: it was taken for mixed precision, of 16 and more."""
    line = RUN | {"source_id": source, "notes": notes, "dtype": dtype}
    software = published.load(write(tmp_path / "published_runs.csv", [line])).rows[0].setup.software
    assert (software.masters, software.gradient_bytes, software.optimizer_bytes) == (
        masters,
        gradient_bytes,
        optimizer_bytes,
    )


@pytest.mark.parametrize(
    "table, mode, model, early, attention, gradient_bytes",
    [
        ("A100 40GB with 1600 Gbps", "PURE", "MPT-7b", False, 0.57, 2),
        ("A100 80GB with 1600 Gbps", "DEFAULT", "MPT-7b", True, 0.57, 4),
        ("H100 80GB BF16", "DEFAULT", "MPT-13b", True, 0.57, 4),
        ("H100 80GB BF16 (Large Scale, >= 128 GPUs)", "PURE", "MPT-7b", True, 1.0, 2),
        ("H100 80GB BF16 (Large Scale, >= 128 GPUs)", "PURE", "MPT-13b", True, 0.57, 2),
    ],
)
def test_tables_of_one_source_are_of_several_releases(
    table: str, mode: str, model: str, early: bool, attention: float, gradient_bytes: int
) -> None:
    """llm-foundry's ran under torch 1.13, whose checkpoints run all again, and 2.1; on the largest clusters with
    another attention. The optimizer is eight operators in 32 bits in all of them."""
    found = facts("llm-foundry", f"mixed-precision mode {mode} {model}", 3, False, f"{table} {model}").software
    assert (found.stops_early, found.attention, found.gradient_bytes, found.optimizer_bytes) == (
        early,
        attention,
        gradient_bytes,
        88.0,
    )


def test_rows_of_other_software_than_their_sources() -> None:
    """Alpa's tables have runs of Megatron-LM, which is no program of XLA and drops out."""
    core, own, beside = (
        facts("alpa-osdi22-e2e", notes, 0, False)
        for notes in ("method megatron; untied", "method parax.auto; untied", "README says Megatron gets 38 TFLOPS")
    )
    assert not core.software.captured and core.dropout == 0.1 and core.bias_apart
    assert own.software.captured and own == beside and own.dropout == 0.0


def test_programs_of_jax_beside_others() -> None:
    """NVIDIA's recipes are NeMo's for the most part: those of JAX were priced as NeMo's."""
    nemo, pax, maxtext = (facts("dgxc-v25.01", notes, 3, False) for notes in ("", "PaxML JAX", "MaxText"))
    assert not nemo.software.captured and nemo.flash
    assert pax.software.captured and pax.software.overlap_gradients and not pax.flash
    assert maxtext.software.captured and maxtext.flash and maxtext.software.attention == nemo.software.attention


@pytest.mark.parametrize(
    "notes, seq, tokens",
    [
        ("SFT finetune, SQuAD packed to 4096; CP not published", "4096", 256),
        ("SQuAD packed to 4000", "4000", 0),
        ("packed 2048, compile", "2048", 0),
        ("", "4096", 0),
    ],
)
def test_packed_samples_do_not_attend_to_each_other(tmp_path: Path, notes: str, seq: str, tokens: int) -> None:
    (row,) = published.load(write(tmp_path / "published_runs.csv", [RUN | {"notes": notes, "seq_len": seq}])).rows
    assert row.model.packed == tokens


@pytest.mark.parametrize(
    "source, model, tokens",
    [
        ("dgxc-v25.02", "Llama3-8B LoRA", 256),
        ("dgxc-v25.04", "Llama3-70B SFT", 256),
        ("nemo-25.02", "LLAMA3-8B SFT", 256),
        ("dgxc-v25.04", "Llama3.1-8B", 0),
        ("megatron-bridge", "LLAMA3_70B SFT", 0),  # mock data
        ("torchtune", "Llama3.1-8B LoRA", 0),
    ],
)
def test_recipes_of_nemo_fine_tune_on_packed_samples(tmp_path: Path, source: str, model: str, tokens: int) -> None:
    """Attention was that of whole sequences, a tenth of a step of 8B."""
    (row,) = published.load(write(tmp_path / "published_runs.csv", [RUN | {"source_id": source, "model": model}])).rows
    assert row.model.packed == tokens
