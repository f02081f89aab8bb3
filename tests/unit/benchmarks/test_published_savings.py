"""Which ways to save memory published rows name, and what is not taken for one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.costmodel import published
from benchmarks.costmodel.predict import Software
from benchmarks.costmodel.predictions import Predictor
from benchmarks.costmodel.rows import Row
from benchmarks.costmodel.savings import CHUNKS, IN_4_BITS, IN_4_BITS_PLAIN, IN_8_BITS, from_host, saving
from tests.helpers.published_rows import RUN, write

PLAIN = Software()
ALONE = RUN | {"tp": "1", "sp": "", "pp": "1", "vpp": "1", "n_gpus": "1", "zero_fsdp": "", "schedule": ""}


def row(tmp_path: Path, **changed: str) -> Row:
    (found,) = published.load(write(tmp_path / "published_runs.csv", [ALONE | changed])).rows
    return found


@pytest.mark.parametrize(
    "told, habits",
    [
        ("bnb 8-bit AdamW", {"moment_bytes": IN_8_BITS}),
        ("optimizer adamw_bnb_8bit", {"moment_bytes": IN_8_BITS}),
        ("PagedAdamW8bit", {"moment_bytes": 0.0}),
        ("paged_adamw_32bit", {"moment_bytes": 0.0}),
        ("ao 4-bit AdamW", {"moment_bytes": 0.5 + 4 / 128}),
        ("optimizer_in_bwd", {"spends": True}),
        ("+ optimizer step into backward", {"spends": True}),
        ("chunked cross entropy", {"loss_chunks": CHUNKS}),
        ("compile; chunked loss", {"loss_chunks": CHUNKS, "loss_fused": True}),
        ("activation offloading", {"hosts_blocks": True}),
        ("Liger kernel (fused CE)", {"loss_chunks": 32, "chunked_logits": True, "fused": True}),
        ("cut cross-entropy", {"loss_chunks": 32, "chunked_logits": True, "fused": True}),
        ("Q-LoRA", {"frozen_bytes": IN_4_BITS}),
        ("LoRA; bnb.nf4", {"frozen_bytes": IN_4_BITS_PLAIN, "keeps_rows": True}),
        ("QLoRA by PEFT", {"frozen_bytes": IN_4_BITS, "keeps_rows": True}),
        ("do not use optimizer_in_bwd/8-bit Adam", {}),
        ("8-bit or paged optimizer settings not in the table", {}),
        ("no activation offloading; 4-bit AdamW", {"moment_bytes": 0.5 + 4 / 128}),
        ("8-bit matmuls", {}),
        ("8 bits of exponent", {}),
    ],
)
def test_what_a_row_says_of_memory(told: str, habits: dict[str, Any]) -> None:
    found = saving(PLAIN, told, 128256, 4096)
    assert found.habits == replace(PLAIN.habits, **habits)


def test_moments_in_fewer_bits_are_read_and_written_in_fewer() -> None:
    mixed, pure = (
        saving(replace(PLAIN, masters=on, optimizer_bytes=n), "8-bit AdamW", 1, 1)
        for on, n in ((True, 30.0), (False, 14.0))
    )
    assert mixed.optimizer_bytes == 30 - 4 * (4 - IN_8_BITS) and pure.optimizer_bytes == 14 - 4 * (2 - IN_8_BITS)
    assert saving(PLAIN, "paged AdamW", 1, 1).optimizer_bytes == PLAIN.optimizer_bytes


@pytest.mark.parametrize(
    "told, hosted, weights",
    [
        ("DeepSpeed ZeRO-3 + CPU AdamW offload", True, False),
        ("FSDP CPU offload", True, True),
        ("ZeRO-3 with param offload", True, True),
        ("FSDP without CPU offload", False, False),
        ("FSDP offload=False", False, False),
        ("FSDP, activation offload", False, False),
        ("FSDP", False, False),
    ],
)
def test_optimizers_on_the_host(told: str, hosted: bool, weights: bool) -> None:
    found = from_host(PLAIN, told, 2)
    habits = found.habits
    assert (found.hosted, habits.spends, habits.hosts_weights) == (hosted, hosted, weights)
    assert habits.hosted == ((1.0, 1.0) if hosted else ())


def test_a_ladder_of_techniques_has_those_below(tmp_path: Path) -> None:
    def step(name: str, model: str = "full finetune") -> Row:
        notes = f"cumulative technique ladder step: {name}; LoRA rows do not use optimizer_in_bwd/8-bit Adam"
        return row(tmp_path, source_id="torchtune", model=model, notes=notes, recompute="")

    first, packed, again, last, lora = (
        step(name) for name in ("Baseline", "+ Packed Dataset", "+ Activation Checkpointing", "+ 8-bit AdamW", "LoRA")
    )
    assert [each.setup.recompute for each in (first, packed, again, last, lora)] == ["none", "none", *["full"] * 3]
    of = [each.setup.software.habits for each in (first, packed, again, last, lora)]
    assert [each.loss_chunks for each in of] == [1, 1, CHUNKS, CHUNKS, CHUNKS]
    assert [each.spends for each in of] == [False, False, False, True, False]
    assert [each.moment_bytes for each in of] == [None, None, None, IN_8_BITS, None]
    assert [each.hosts_blocks for each in of] == [False, False, False, True, True]


@pytest.mark.parametrize(
    "source, notes, zero, late, flat",
    [
        ("axolotl", "", "FSDP", True, False),
        ("axolotl", "", "DeepSpeed ZeRO-3", False, False),
        ("litgpt", "", "FSDP", True, True),
        ("torchtitan", "", "FSDP", False, False),
        ("torchtitan", "accumulates under no_sync", "FSDP", True, False),
    ],
)
def test_gradients_without_synchronisation(
    tmp_path: Path, source: str, notes: str, zero: str, late: bool, flat: bool
) -> None:
    """Hugging Face's Trainer and Lightning sum those of FSDP behind the last microbatch, DeepSpeed after each."""
    found = row(tmp_path, source_id=source, notes=notes, zero_fsdp=zero, n_gpus="8", global_batch="64").setup.software
    assert (found.sums_last, found.habits.sums_last, found.habits.flat) == (late, late, flat)


def test_adapters_are_on_the_layers_that_notes_name(tmp_path: Path) -> None:
    for notes, rank, layers in (
        ("LoRA rank 16 on query and value", 16, ("qkv",)),
        ("LoRA rank 64 on k,q,v,up,down,gate", 64, ("qkv", "up", "gate", "down")),
        ("LoRA", 8, ("qkv", "proj", "up", "gate", "down")),
    ):
        model = row(tmp_path, model="m LoRA", notes=notes).model
        assert (model.adapters, model.adapted) == (rank, layers)


def test_what_was_measured_had_room(tmp_path: Path) -> None:
    """A run of which nothing is said of recomputation is taken to run blocks again where it would not fit otherwise."""
    sizes = {"n_layers": "4", "seq_len": "4096", "source_id": "torchtune", "global_batch": "2", "micro_batch": "2"}
    predictor = Predictor()

    def again(gpu: str, recompute: str, **more: str) -> str:
        return predictor.settled(row(tmp_path, gpu=gpu, recompute=recompute, **sizes, **more)).setup.recompute

    assert again("RTX 4090", "") == "full"
    assert again("RTX 4090", "none") == again("H100", "") == again("RTX 4090", "", peak_mem_value="") == "none"


def test_weights_in_4_bits_are_made_in_each_pass(tmp_path: Path) -> None:
    """Forward and backward: half a byte and the scales are read, two bytes written."""
    sizes = {"n_layers": "4", "seq_len": "1024", "global_batch": "1", "source_id": "torchtune"}
    plain, few = (row(tmp_path, model=model, **sizes) for model in ("m LoRA", "m QLoRA"))
    predictor = Predictor()
    more_s = predictor.predict(few).compute_s - predictor.predict(plain).compute_s
    elements = 4 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    device = few.cluster.device
    rate = device.memory_bandwidth_bytes_s * device.achievable_bandwidth
    assert more_s == pytest.approx(2 * elements * (2 + IN_4_BITS) / rate, rel=0.01)


def test_memory_is_told_without_a_global_batch(tmp_path: Path) -> None:
    found = row(tmp_path, global_batch="", micro_batch="2")
    assert found.step_s is None and found.peaks and found.setup.microbatches == 1
