"""Rows as published tables have them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import yaml

from benchmarks.costmodel import mist, vtrain

GOOD = dict(zip(vtrain.COLUMNS, ("8", "16", "2", "1024", "16", "12", "1024", "2", "2", "2", "123.5"), strict=True))
RUN = {
    "row_id": "7",
    "source_id": "somebody",
    "config_complete": "full",
    "model": "m",
    "model_type": "dense-llama",
    "n_layers": "32",
    "hidden": "4096",
    "ffn_hidden": "14336",
    "n_heads": "32",
    "n_kv_heads": "8",
    "vocab": "128256",
    "n_experts": "",
    "moe_topk": "",
    "moe_ffn": "",
    "arch_source": "",
    "seq_len": "8192",
    "gpu": "H100-80GB-SXM",
    "n_gpus": "64",
    "gpus_per_node": "8",
    "interconnect": "8x400Gb IB",
    "dtype": "bf16",
    "tp": "4",
    "sp": "y",
    "cp": "1",
    "pp": "2",
    "vpp": "4",
    "ep": "1",
    "dp": "",
    "zero_fsdp": "distributed optimizer (ZeRO-1)",
    "micro_batch": "1",
    "global_batch": "64",
    "recompute": "none",
    "recompute_detail": "",
    "schedule": "interleaved 1F1B",
    "metric_name": "",
    "metric_value": "",
    "metric_unit": "",
    "status": "ok",
    "tokens_s_gpu": "2000",
    "tflops_gpu": "",
    "tflops_kind": "",
    "step_time_s": "",
    "peak_mem_value": "50",
    "peak_mem_unit": "GiB",
    "peak_mem_kind": "torch max_memory_allocated",
    "checks": "",
    "notes": "",
    "source_table": "",
}


def write(path: Path, lines: list[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return path


def plan(**strategy: object) -> dict[str, object]:
    given = {
        "layer_partitions": [2, 2],
        "gradient_checkpointing": [1, 0],
        "gradient_accumulation_steps": 8,
        "stage_strategies": [[1, 2, 1, 0, 0, 1, 0.0, 0.0, 0.25, 0.0], [1, 2, 1, 0, 0, 1, 0.0, 0.0, 0.0, 0.0]],
    } | strategy
    model = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": 512,
        "intermediate_size": 1024,
        "mlp_fc1_bias": False,
        "tie_word_embeddings": False,
        "hidden_dropout": 0.0,
        "use_flash_attn": True,
    }
    return {
        "model": model,
        "strategy": given,
        "hardware": {"num_nodes": 1, "num_gpus_per_node": 4},
        "training": {"global_batch_size": 16, "max_sequence_length": 128, "params_dtype": "float16"},
    }


def mist_folder(tmp_path: Path, described: dict[str, object]) -> Path:
    path = tmp_path / "mist" / "gpt" / "one.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump(described))
    times = {"exec_total_cost": "1.5", "exec_stage_peak_allocated_memories": "[100 MB, 80 MB]"}
    (path.parent / mist.SUMMARY).write_text(json.dumps({"one": times}))
    return path


MOE = RUN | {
    "model_type": "moe",
    "n_kv_heads": "",
    "n_experts": "64",
    "moe_topk": "6",
    "moe_ffn": "1408",
    "tp": "1",
    "pp": "1",
    "vpp": "1",
    "sp": "",
    "ep": "8",
}
