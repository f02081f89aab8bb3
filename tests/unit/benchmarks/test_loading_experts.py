"""Rows of models with experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.costmodel import published
from benchmarks.costmodel.config import Latent
from benchmarks.costmodel.software import EXPERT_CALLS
from tests.helpers.published_rows import MOE, RUN, write


@pytest.mark.parametrize(
    "source, tp, sequence, parts",
    [
        ("dgxc-v25.02", "2", "y", True),
        ("dgxc-v25.02", "2", "n", False),
        ("dgxc-v25.02", "1", "", False),
        ("torchtitan", "2", "y", False),
    ],
)
def test_whose_tokens_go_to_experts_in_parts(tmp_path: Path, source: str, tp: str, sequence: str, parts: bool) -> None:
    (row,) = published.load(
        write(tmp_path / "published_runs.csv", [RUN | {"source_id": source, "tp": tp, "sp": sequence}])
    ).rows
    assert row.setup.software.tokens_in_parts == parts


@pytest.mark.parametrize(
    "about, heads, latent, dense, shared",
    [
        ("public model config (MLA; first 3 layers dense; 1 shared expert)", "64", Latent(), 3, 1408),
        ("public model config (MLA; first layer dense; 1 shared expert)", "64", Latent(), 1, 1408),
        ("public model config (MLA; 1 dense layer; 2 shared experts)", "32", Latent(queries=0), 1, 2816),
        ("public model config (head_dim 128; all layers MoE)", "32", None, 0, 0),
    ],
)
def test_latent_attention_and_experts_that_all_tokens_meet(
    tmp_path: Path, about: str, heads: str, latent: Latent | None, dense: int, shared: int
) -> None:
    (row,) = published.load(
        write(tmp_path / "published_runs.csv", [MOE | {"arch_source": about, "n_heads": heads}])
    ).rows
    assert (row.model.latent, row.model.dense, row.model.shared, row.model.experts, row.model.window) == (
        latent,
        dense,
        shared,
        64,
        0,
    )


def test_windows_of_every_second_layer(tmp_path: Path) -> None:
    (row,) = published.load(
        write(
            tmp_path / "published_runs.csv",
            [MOE | {"arch_source": "public model config (head_dim 64; alternating sliding-window 128)"}],
        )
    ).rows
    assert (row.model.window, row.model.head_dim) == (128, 64)


@pytest.mark.parametrize(
    "source, model, ahead",
    [
        ("megatron-bridge", "DeepSeekV3", True),
        ("dgxc-v25.05.05", "DeepSeek-V3-671B", True),
        ("nemo-automodel", "DeepSeek V3", False),
        ("megatron-bridge", "Moonlight", False),
    ],
)
def test_who_trains_a_prediction_ahead(tmp_path: Path, source: str, model: str, ahead: bool) -> None:
    (row,) = published.load(
        write(
            tmp_path / "published_runs.csv",
            [MOE | {"source_id": source, "model": model, "arch_source": "MLA; first 3 layers dense"}],
        )
    ).rows
    assert row.model.ahead == ahead


@pytest.mark.parametrize(
    "change, whole",
    [
        ({"source_id": "megatron-bridge"}, True),
        ({"source_id": "dgxc-v25.02"}, False),
        ({"source_id": "dgxc-v25.02", "notes": "ETP=1; something"}, True),
        ({"model": "gpt_tp2_ep8_etp1_x"}, True),
        ({"source_id": "dgxc-v25.02", "n_gpus": "8"}, True),
        ({"source_id": "megatron-bridge", "ep": "1"}, False),
        ({"source_id": "megatron-bridge", "tp": "1"}, False),
    ],
)
def test_whose_experts_are_whole(tmp_path: Path, change: dict[str, str], whole: bool) -> None:
    (row,) = published.load(write(tmp_path / "published_runs.csv", [MOE | {"tp": "2"} | change])).rows
    assert row.setup.whole_experts == whole


@pytest.mark.parametrize(
    "source, notes, once",
    [
        ("megatron-bridge", "", True),
        ("megatron-bridge-studies", "NCCL alltoall dispatcher", False),
        ("dgxc-v25.02", "", False),
        ("nemo-automodel", "TE + DeepEP", True),
    ],
)
def test_whose_tokens_go_once_to_a_node(tmp_path: Path, source: str, notes: str, once: bool) -> None:
    (row,) = published.load(write(tmp_path / "published_runs.csv", [MOE | {"source_id": source, "notes": notes}])).rows
    assert row.setup.software.rows_once == once


@pytest.mark.parametrize(
    "notes, together",
    [("kernels: TE + DeepEP; fake balanced gate; mock data", True), ("force balanced routing", False), ("", False)],
)
def test_whose_gates_choose_neighbours(tmp_path: Path, notes: str, together: bool) -> None:
    (row,) = published.load(
        write(tmp_path / "published_runs.csv", [MOE | {"source_id": "nemo-automodel", "notes": notes}])
    ).rows
    assert row.setup.software.in_a_row == together


@pytest.mark.parametrize(
    "notes, rate",
    [
        ("kernels: TE + DeepEP; mock data", 1.7),
        ("kernels: TE + triton", 1.7),
        ("kernels: TE + DeepEP + TorchSDPA; mock data", 1.0),
        ("kernels: TE + DeepEP + FlexAttn", 1.0),
        ("", 1.0),
    ],
)
def test_whose_attention_is_that_of_transformer_engine(tmp_path: Path, notes: str, rate: float) -> None:
    (row,) = published.load(
        write(tmp_path / "published_runs.csv", [MOE | {"source_id": "nemo-automodel", "notes": notes}])
    ).rows
    assert row.setup.software.attention == rate


@pytest.mark.parametrize(
    "change, captured",
    [
        ({"source_id": "megatron-bridge", "dtype": "mxfp8", "source_table": "26.06.01 NeMo Container / line 5"}, True),
        ({"source_id": "megatron-bridge-cards", "dtype": "mxfp8", "source_table": "items"}, True),
        ({"source_id": "megatron-bridge", "dtype": "mxfp8", "source_table": "26.04 NeMo Container"}, False),
        ({"source_id": "megatron-bridge", "source_table": "26.08 NeMo Container"}, False),
        ({"source_id": "dgxc-v25.02", "dtype": "mxfp8"}, False),
        (
            {"source_id": "megatron-bridge", "dtype": "mxfp8", "source_table": "26.08", "model_type": "dense-llama"},
            False,
        ),
        ({"source_id": "megatron-bridge", "source_table": "25.09", "model": "Qwen3_30B_a3B", "gpu": "GB200"}, True),
        ({"source_id": "megatron-bridge", "source_table": "25.11", "model": "Qwen3_30B_a3B", "gpu": "GB200"}, False),
        ({"source_id": "dgxc-v25.05.05", "model": "Nemotron4-340B", "model_type": "dense-gpt", "gpu": "GB200"}, True),
        ({"source_id": "dgxc-v25.05.05", "model": "Nemotron4-340B", "model_type": "dense-gpt"}, False),
        ({"source_id": "dgxc-v25.05.05", "model": "Grok1-314B", "gpu": "GB200"}, True),
        ({"source_id": "dgxc-v25.05.05", "model": "Grok1-314B"}, False),
        ({"source_id": "nemo-25.04", "model": "Mixtral-8x7B", "gpu": "GB200"}, True),
        ({"source_id": "nemo-25.04", "model": "LLAMA3-70B", "model_type": "dense", "gpu": "GB200"}, False),
        ({"source_id": "nemo-25.04", "model": "Nemotron-15B", "model_type": "dense", "gpu": "B200"}, True),
        ({"source_id": "nemo-25.02", "model": "Nemotron-15B", "model_type": "dense", "gpu": "B200"}, False),
        ({"source_id": "nemo-25.04", "model": "LLAMA3-8B LoRA", "model_type": "dense", "gpu": "B200"}, False),
        ({"source_id": "nemo-25.04", "model": "LLAMA3-70B LoRA", "model_type": "dense", "gpu": "GB200"}, True),
        ({"source_id": "nemo-24.07", "model": "Nemotron-15B", "model_type": "dense"}, False),
        ({"notes": "CUDA graphs"}, False),
        ({"notes": "full-iteration CUDA graphs"}, True),
        ({"notes": "CUDA graphs (full)"}, True),
        ({"notes": "FULL_CUDA_GRAPH=1"}, True),
        ({"notes": "CUDA graphs", "model_type": "dense-llama"}, True),
        ({"notes": "no CUDA graphs", "model_type": "dense-llama"}, False),
    ],
)
def test_which_steps_are_one_graph(tmp_path: Path, change: dict[str, str], captured: bool) -> None:
    (row,) = published.load(write(tmp_path / "published_runs.csv", [MOE | change])).rows
    assert row.setup.software.captured == captured


@pytest.mark.parametrize(
    "model, gpu, table, whole, fed",
    [
        ("LLAMA3_8B", "B200", "26.02", True, False),
        ("LLAMA3_8B", "H100-80GB-SXM", "26.02", False, False),
        ("LLAMA3_8B", "GB200", "25.09", False, False),
        ("LLAMA3_70B", "GB200", "26.02", False, False),
        ("LLAMA3_70B SFT", "GB200", "26.02", False, True),
        ("LLAMA3_70B SFT", "B200", "26.02", False, False),
        ("LLAMA3_70B LoRA", "B200", "26.04", False, True),
    ],
)
def test_which_dense_models_are_in_graphs(
    tmp_path: Path, model: str, gpu: str, table: str, whole: bool, fed: bool
) -> None:
    line = RUN | {"source_id": "megatron-bridge", "source_table": f"{table} NeMo Container", "model": model, "gpu": gpu}
    (row,) = published.load(write(tmp_path / "published_runs.csv", [line])).rows
    assert (row.setup.software.captured, row.setup.software.captured_mlp) == (whole, fed)


@pytest.mark.parametrize(
    "change, calls",
    [
        ({"source_id": "dgxc-v25.02"}, EXPERT_CALLS),
        ({"source_id": "megatron-bridge", "notes": "CUDA graphs"}, 0),
        ({"source_id": "megatron-bridge", "notes": "without CUDA graphs"}, EXPERT_CALLS),
        ({"source_id": "megatron-bridge", "source_table": "26.04 NeMo", "gpu": "GB200"}, 0),
        ({"source_id": "megatron-bridge", "source_table": "26.04 NeMo"}, EXPERT_CALLS),
        ({"source_id": "megatron-bridge-cards", "model": "gpt-oss-120b", "gpu": "GB200"}, EXPERT_CALLS),
        ({"source_id": "torchtitan"}, 0),
    ],
)
def test_whose_layers_of_experts_keep_the_host_busy(tmp_path: Path, change: dict[str, str], calls: int) -> None:
    (row,) = published.load(write(tmp_path / "published_runs.csv", [MOE | change])).rows
    assert row.setup.software.expert_calls == calls


def test_what_recipes_say_where_a_line_does_not(tmp_path: Path) -> None:
    rows = published.load(
        write(
            tmp_path / "published_runs.csv",
            [
                MOE | {"source_id": source, "zero_fsdp": "", "notes": notes}
                for source in ("megatron-bridge", "somebody")
                for notes in ("", "reduced-precision (bf16) Adam moments")
            ],
        )
    ).rows
    assert [(row.setup.zero, row.setup.software.habits.moment_bytes) for row in rows] == [
        (1, None),
        (1, 2),
        (0, None),
        (0, 2),
    ]
