"""FLOPs, sizes and bytes of elements that published rows state."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.costmodel import published
from benchmarks.costmodel.config import Config
from benchmarks.costmodel.times import model_flops
from tests.helpers.published_rows import MOE, RUN, write


@pytest.mark.parametrize(
    "text, precision",
    [
        ("BF16-mixed", ("bfloat16", "")),
        ("bfloat16", ("bfloat16", "")),
        ("float16", ("float16", "")),
        ("FP8", ("bfloat16", "float8")),
        ("fp8_e4m3", ("bfloat16", "float8")),
        ("fp32", ("float32", "")),
        ("bf16 (fp32 grads)", ("bfloat16", "")),
        ("MXFP8", ("bfloat16", "float8")),
        ("NVFP4", ("bfloat16", "float4")),
        ("fp8 (bf16 master)", ("bfloat16", "float8")),
    ],
)
def test_precisions_are_known_by_any_name(tmp_path: Path, text: str, precision: tuple[str, str]) -> None:
    (row,) = published.load(write(tmp_path / "published_runs.csv", [RUN | {"dtype": text}])).rows
    assert (row.precision, row.setup.software.matmul) == precision


@pytest.mark.parametrize(
    "kind, flops",
    [
        (
            "hardware-style: 96*B*s*L*h^2*(1+s/6h+V/16Lh)",
            96 * 32 * 4096**2 * (1 + 8192 / 6 / 4096 + 128256 / 16 / 32 / 4096),
        ),
        ("hardware-style (Alpa compute_gpt_tflops with remat: 96*...)", None),
        ("hardware (factor 4: incl. full recompute)", None),
        (
            "Alpa compute_gpt_tflops (checkpoint=False: 72 factor)",
            72 * 32 * 4096**2 * (1 + 8192 / 6 / 4096 + 128256 / 12 / 32 / 4096),
        ),
        ("model (6N+12Lhs, full non-causal attn)", 6 * 8e9 + 12 * 32 * 4096 * 8192),
        ("model, causal attention (6s^2)", 6 * 8e9 + 6 * 32 * 4096 * 8192),
        ("as reported", 0),
        ("model", 6 * (32 * (4096 * 5120 * 2 + 3 * 4096 * 14336) + 4096 * 128512) + 12 * 32 * 4096 * 8192),
    ],
)
def test_a_step_by_the_flops_that_were_counted(tmp_path: Path, kind: str, flops: float | None) -> None:
    """Of the formulas one was read in one spelling alone; of FLOPs that were counted in no known way there is no
    time."""
    line = RUN | {"tokens_s_gpu": "", "tflops_gpu": "100", "tflops_kind": kind, "n_params": "8e9"}
    (row,) = published.load(write(tmp_path / "published_runs.csv", [line])).rows
    known = 96 * 32 * 4096**2 * (1 + 8192 / 6 / 4096 + 128256 / 16 / 32 / 4096) if flops is None else flops
    assert row.step_s == (pytest.approx(64 * 8192 * known / (64 * 100e12)) if known else None)


def test_a_step_by_the_flops_of_the_model() -> None:
    """They had no time where a line said no more than that: sizes give those that NeMo counts (LLAMA3-8B and
    Nemotron-8B of its 24.07 tables, tokens/s and TFLOP/s), to their last digit."""
    llama = Config(vocab=128256, layers=32, heads=32, kv_heads=8, head_dim=128, hidden=4096, ffn=14336, gated=True)
    nemotron = Config(vocab=256000, layers=32, heads=32, kv_heads=32, head_dim=128, hidden=4096, ffn=16384)
    for model, seq, tokens_s, tflops in ((llama, 8192, 12273, 711), (nemotron, 4096, 12507, 643)):
        assert model_flops(model, seq, causal=False) * tokens_s / 1e12 == pytest.approx(tflops, abs=0.6)


def test_of_attention_half_counts_where_the_software_counts_half(tmp_path: Path) -> None:
    line = RUN | {"tokens_s_gpu": "", "tflops_gpu": "100", "tflops_kind": "model"}
    whole, half = published.load(
        write(tmp_path / "published_runs.csv", [line, line | {"source_id": "megatron-bridge"}])
    ).rows
    assert (
        whole.step_s
        and half.step_s
        and whole.step_s - half.step_s == pytest.approx(64 * 8192 * 6 * 32 * 4096 * 8192 / (64 * 100e12))
    )


def test_flops_of_a_token_are_those_of_the_experts_that_it_meets(tmp_path: Path) -> None:
    """All parameters counted, by which a step was many times as long."""
    line = MOE | {"tokens_s_gpu": "", "tflops_gpu": "100", "tflops_kind": "model (6N+12Lhs)", "n_params": "47e9"}
    lines = [line, line | {"n_params": ""}, line | {"tflops_gpu": "", "mfu_pct": "10", "n_params": "1"}]
    one, other, share = published.load(
        write(tmp_path / "published_runs.csv", [RUN | {"mfu_pct": "", "n_params": ""} | each for each in lines])
    ).rows
    flops = one.setup.tokens * model_flops(one.model, one.setup.seq, causal=False)
    assert one.step_s == other.step_s == pytest.approx(
        flops / (100e12 * one.setup.devices)
    ) and share.step_s == pytest.approx(flops / (98.9e12 * one.setup.devices))


@pytest.mark.parametrize(
    "change, found",
    [
        ({"arch_source": "head_dim=64"}, {"head_dim": 64}),
        ({"arch_source": "head dim 256, tied embeddings"}, {"head_dim": 256, "tied": True}),
        ({"arch_source": "tie_word_embeddings: true"}, {"tied": True}),
        ({"arch_source": "tie_word_embeddings: false"}, {"tied": False}),
        ({"arch_source": "untied embeddings"}, {"tied": False}),
        ({"model_type": "dense-gpt", "ffn_hidden": ""}, {"ffn": 16384, "gated": False}),
    ],
)
def test_sizes_in_other_words(tmp_path: Path, change: dict[str, str], found: dict[str, object]) -> None:
    (row,) = published.load(write(tmp_path / "published_runs.csv", [RUN | change])).rows
    assert {name: getattr(row.model, name) for name in found} == found


def test_widths_of_gated_layers_are_not_guessed(tmp_path: Path) -> None:
    """They were taken to be four times the model, as two matrices are: half as many FLOPs again. The width of experts
    is that of the feed-forward layers where there are no others."""
    lines = [
        RUN | {"ffn_hidden": ""},
        MOE | {"ffn_hidden": "", "arch_source": "first 3 layers dense"},
        MOE | {"ffn_hidden": "14336", "moe_ffn": ""},
        MOE | {"ffn_hidden": "", "moe_ffn": "14336"},
    ]
    found = published.load(write(tmp_path / "published_runs.csv", lines))
    assert [why.partition(": ")[2] for why in found.refused] == ["ffn_hidden was not published"] * 2
    assert [row.model.expert_ffn for row in found.rows] == [14336, 14336]


def test_in_32_bits_nothing_is_sent_in_fewer(tmp_path: Path) -> None:
    """Such runs were refused. Of their memory nothing is told: it is that of mixed precision."""
    short, whole = published.load(
        write(
            tmp_path / "published_runs.csv",
            [RUN | {"source_id": "megatron-sc21-t1"}, RUN | {"source_id": "megatron-sc21-t1", "dtype": "float32"}],
        )
    ).rows
    assert (short.setup.software.gathered_bytes, short.setup.software.gradient_bytes, bool(short.peaks)) == (2, 2, True)
    assert (whole.setup.software.gathered_bytes, whole.setup.software.gradient_bytes, bool(whole.peaks)) == (
        4,
        4,
        False,
    )


@pytest.mark.parametrize(
    "model, notes, rank",
    [
        ("Llama LoRA", "", 8),
        ("llama lora", "rank 64", 64),
        ("Llama LoRA r", "lora_rank=16", 16),
        ("Llama", "rank 64", 0),
    ],
)
def test_how_wide_adapters_are(tmp_path: Path, model: str, notes: str, rank: int) -> None:
    (row,) = published.load(
        write(tmp_path / "published_runs.csv", [RUN | {"model": model, "notes": notes, "source_id": "torchtune"}])
    ).rows
    assert row.model.adapters == rank


@pytest.mark.parametrize(
    "recompute, detail, more",
    [
        ("none", "", 0.0),
        ("full", "", 2 * 32 * (4096 * 5120 * 2 + 3 * 4096 * 14336) + 4 * 32 * 4096 * 8192),
        ("full", "8 of 32 layers", 2 * 8 * (4096 * 5120 * 2 + 3 * 4096 * 14336) + 4 * 8 * 4096 * 8192),
        ("selective", "core_attn", 4 * 32 * 4096 * 8192),
        ("selective", "mlp", None),
        ("full", "block, num_layers=3", None),
    ],
)
@pytest.mark.parametrize("said", [{"tflops_gpu": "100", "tflops_kind": "hardware"}, {"hfu_pct": "10"}])
def test_a_step_by_flops_that_count_what_runs_again(
    tmp_path: Path, said: dict[str, str], recompute: str, detail: str, more: float | None
) -> None:
    """Of such FLOPs without a formula, and of their share of the peak, there was no time."""
    line = RUN | {"tokens_s_gpu": "", "recompute": recompute, "recompute_detail": detail} | said
    (row,) = published.load(write(tmp_path / "published_runs.csv", [line])).rows
    three = 6 * (32 * (4096 * 5120 * 2 + 3 * 4096 * 14336) + 4096 * 128512) + 12 * 32 * 4096 * 8192
    rate = 100e12 if "tflops_gpu" in said else 0.1 * row.cluster.device.flops("bfloat16")
    assert row.step_s == (None if more is None else pytest.approx(8192 * (three + more) / rate))
