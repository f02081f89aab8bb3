"""Files of measurements: good lines become rows, bad ones are refused with their place and the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.costmodel import published, vtrain
from benchmarks.costmodel.config import Config
from benchmarks.costmodel.data import load
from benchmarks.costmodel.halves import in_half
from benchmarks.costmodel.networks import network_bytes_s
from benchmarks.costmodel.predict import Software
from benchmarks.costmodel.predictions import captured
from benchmarks.costmodel.rows import Peak
from benchmarks.costmodel.software import IN_4_BITS_BYTES
from benchmarks.costmodel.transformer import Transformer
from passes import edit
from tests.helpers.published_rows import GOOD, RUN, mist_folder, plan, write


def test_a_line_of_vtrain(tmp_path: Path) -> None:
    row, same = vtrain.load(write(tmp_path / "ground_truth_single.csv", [GOOD, GOOD | {"hidden size": "1024.0"}])).rows
    assert row.model == same.model  # as spreadsheets write whole numbers
    assert (row.setup.tp, row.setup.dp, row.setup.pp, row.setup.microbatches, row.setup.recompute) == (
        2,
        2,
        2,
        4,
        "full",
    )
    assert row.step_s == pytest.approx(0.1235) and row.cluster.devices == 8 and row.source == "vtrain single"


@pytest.mark.parametrize(
    ("notes", "flushes"),
    [
        ("local batch 4, grad accum 2; mock data", 2),
        ("local batch 1, grad accum 8", 1),
        ("local batch 8", 1),
        ("", 1),
        ("grad accum 8", 1),
        ("local batch 4, grad accum 4", 1),
    ],
)
def test_where_a_batch_of_a_schedule_is_said_pipelines_are_filled_several_times(
    notes: str, flushes: int, tmp_path: Path
) -> None:
    """Eight microbatches of one sample on each data-parallel rank; where only microbatches are called accumulated, or
    numbers do not agree, they go through together."""
    (row,) = published.load(write(tmp_path / "published_runs.csv", [{**RUN, "notes": notes}])).rows
    assert (row.setup.microbatches, row.setup.flushes) == (8, flushes)


@pytest.mark.parametrize(
    "column, value, why",
    [
        ("# GPUs", "16", "2 x 2 x 2 is not 16 GPUs"),
        ("micro batch", "3", "batch 16 in microbatches of 3"),
        ("iteration time (ms)", "-1", "iteration time (ms) is -1; wanted a positive number"),
        ("hidden size", "many", "hidden size is many; wanted a positive whole number"),
        ("hidden size", "1000", "1000 in 16 heads"),
        ("# layers", "", "# layers was not published"),
        ("micro batch", "0", "micro batch is 0; wanted a positive whole number"),
        ("iteration time (ms)", "nan", "iteration time (ms) is nan; wanted a positive number"),
    ],
)
def test_bad_lines_of_vtrain(tmp_path: Path, column: str, value: str, why: str) -> None:
    found = vtrain.load(write(tmp_path / "ground_truth_single.csv", [GOOD, GOOD | {column: value}]))
    assert len(found.rows) == 1
    assert found.refused[0].startswith("ground_truth_single.csv:3: ") and why in found.refused[0]


def test_a_published_run(tmp_path: Path) -> None:
    (row,) = published.load(write(tmp_path / "published_runs.csv", [RUN])).rows
    setup = row.setup
    assert (setup.tp, setup.pp, setup.vpp, setup.dp, setup.zero, setup.microbatches, setup.sequence_parallel) == (
        4,
        2,
        4,
        8,
        1,
        8,
        True,
    )
    assert row.step_s == pytest.approx(64 * 8192 / (2000 * 64)) and row.peaks == (Peak(50 * 2**30, "allocated"),)
    assert row.cluster.levels[0].bandwidth_bytes_s == 50e9 and row.cluster.devices == 64
    assert row.model.gated and row.model.rotary and row.model.kv_heads == 8


@pytest.mark.parametrize(
    "source, rank, adapted",
    [("dgxc-v25.04", 32, {"qkv"}), ("nemo-automodel", 8, {"qkv", "proj", "gate", "up", "down"})],
)
def test_adapters_alone_train(tmp_path: Path, source: str, rank: int, adapted: set[str]) -> None:
    line = RUN | {
        "model": "Llama LoRA",
        "source_id": source,
        "hidden": "64",
        "ffn_hidden": "128",
        "n_heads": "4",
        "n_kv_heads": "2",
        "vocab": "256",
    }
    lora, whole = published.load(write(tmp_path / "published_runs.csv", [line, line | {"model": "Llama"}])).rows
    assert (lora.model.adapters, set(lora.model.adapted)) == (rank, adapted) and not whole.model.adapters
    with torch.device("meta"):
        model = Transformer(replace(lora.model, layers=1))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name.split(".")[-4] for name in trained} == adapted and all(".adapter." in name for name in trained)


@pytest.mark.parametrize("wide, gated", [("16384", False), ("14336", True)])
def test_dense_models_of_no_kind_are_gated_where_their_feed_forward_is_narrower(
    tmp_path: Path, wide: str, gated: bool
) -> None:
    (row,) = published.load(
        write(tmp_path / "published_runs.csv", [RUN | {"model_type": "dense", "ffn_hidden": wide}])
    ).rows
    assert row.model.gated is gated and row.model.ffn == int(wide)


@pytest.mark.parametrize(
    "change, why",
    [
        ({"zero_fsdp": "ZeRO-3 with NVMe offload"}, "training from disks is not priced"),
        ({"status": "oom"}, "nothing was measured"),
        ({"n_heads": ""}, "n_heads was not published"),
        ({"gpu": "TPUv9"}, "no preset for TPUv9"),
        ({"dtype": "int3"}, "dtype 'int3' is not one of"),
        ({"global_batch": "63"}, "no multiple of micro batch"),
        ({"tp": "5"}, "no multiple of tp 5"),
        ({"tokens_s_gpu": "", "peak_mem_value": ""}, "neither a step time nor memory"),
        ({"model_type": "hybrid-mamba"}, "are not built"),
        ({"step_time_s": "0"}, "a step of 0.0 s"),
        ({"seq_len": "long"}, "seq_len is long; wanted a positive whole number"),
        ({"step_time_s": "nan"}, "a step of nan s"),
    ],
)
def test_bad_published_runs(tmp_path: Path, change: dict[str, str], why: str) -> None:
    found = published.load(write(tmp_path / "published_runs.csv", [RUN | change]))
    assert not found.rows and found.refused[0].startswith("7: ") and why in found.refused[0]


@pytest.mark.parametrize(
    "text, gpus, rate",
    [
        ("4x OmniPath 100 Gb/s per node", 8, 1.25e9),
        ("1600 Gbps/node RoCE", 8, 25e9),
        ("NVLink + 400 Gb/s RDMA per GPU (Grand Teton)", 8, 50e9),
        ("NVLink3/NVSwitch + 8x200 Gb/s HDR IB (Selene)", 8, 25e9),
        ("NVLink + 25 Gb/s (AWS p3.16xlarge)", 8, 25e9 / 64),
        ("NVLink4 900GB/s bidir + 8x400Gb IB (DGX H100 EOS)", 8, 50e9),
        ("EFA 340 Gb/s (AWS p4de)", 8, 340e9 / 64),
        ("NVLink (single node)", 8, None),
        ("NVLink2 + OmniPath 100 Gb/s (Jean Zay)", 4, 100e9 / 32),
        ("800 Gb/s per node", 8, 100e9 / 8),
        ("EFA 3200 Gbps", 8, 50e9),
        ("EFA, 3.2 Tb/s", 8, 50e9),
        ("RoCE 3.2Tbps/node", 8, 50e9),
        ("200 Gbps per GPU RoCE", 8, 25e9),
        ("400G RoCE per GPU", 8, 50e9),
        ("25 GB/s per GPU", 8, 25e9),
        ("100 Gb/s Ethernet", 8, 100e9 / 64),
        ("4x100GbE", 8, 50e9 / 8),
        ("8 x 400 Gb/s IB", 4, 100e9),
        ("InfiniBand 200 Gb/s", 8, 25e9),
        ("HDR InfiniBand", 8, 25e9),
        ("NDR200", 8, 25e9),
        ("NVLink, 4x HDR100", 8, 6.25e9),
        ("NVLink 900 GB/s and 8x NDR", 8, 50e9),
        ("NVLink3 600GB/s, 4x HDR 200 Gb/s", 8, 12.5e9),
        ("NVL72 (4 GPUs/tray)", 64, None),
        ("NVLink4 + IB (Eos)", 8, None),
    ],
)
def test_networks_are_read(text: str, gpus: int, rate: float | None) -> None:
    """Of ways to state one that were not known the rate was left out, and that of the preset taken."""
    assert network_bytes_s(text, gpus) == (pytest.approx(rate) if rate else None)


@pytest.mark.parametrize(
    "text, kind",
    [
        ("torch max_memory_allocated", "allocated"),
        ("torch peak (active)", "allocated"),
        ("peak allocated per device", "allocated"),
        ("peak_memory_alloc (torchtune log)", "allocated"),
        ("nvidia-smi, first/last node (max)", "device"),
        ("device memory used, rocm-smi", "device"),
        ("torch max reserved (max over GPUs, as logged by torchtitan)", "reserved"),
        ("XLA allocator peak", "xla"),
        ('"peak_memory_usage" in NeMo log; memory_allocated 34466545664 B', "reserved"),
    ],
)
def test_peaks_are_told_apart_by_what_was_counted(tmp_path: Path, text: str, kind: str) -> None:
    lines = [
        RUN | {"peak_mem_kind": text},
        RUN | {"peak_mem_kind": text, "notes": "from the tensorboard-writing (last) rank"},
    ]
    one, two = published.load(write(tmp_path / "published_runs.csv", lines)).rows
    assert one.peaks == (Peak(50 * 2**30, kind),) and two.peaks == (Peak(50 * 2**30, kind, -1),)


@pytest.mark.parametrize(
    "detail, parts",
    [
        ("core_attn", ("attention",)),
        ("mlp+core_attn", ("attention", "mlp")),
        ("mla_up_proj", ()),
        ("", ("attention",)),
        ("op", ("operators",)),
        ("layernorm, moe_act, moe, and core_attn", ("attention", "experts")),
        ("layernorm and MoE activation", ()),
    ],
)
def test_parts_that_run_again_are_read(tmp_path: Path, detail: str, parts: tuple[str, ...]) -> None:
    (row,) = published.load(
        write(tmp_path / "published_runs.csv", [RUN | {"recompute": "selective", "recompute_detail": detail}])
    ).rows
    assert row.setup.parts == parts and row.setup.recompute == ("selective" if parts else "none")


@pytest.mark.parametrize("notes, share", [("Float8", 0.75), ("float8 rowwise", 1.0)])
def test_what_is_gathered_in_8_bits(tmp_path: Path, notes: str, share: float) -> None:
    (row,) = published.load(write(tmp_path / "published_runs.csv", [RUN | {"dtype": "fp8", "notes": notes}])).rows
    assert row.setup.software.tensor_share == share and row.setup.software.habits.kept_bytes == 1


@pytest.mark.parametrize(
    "dtype, matmul, moved",
    [
        ("nvfp4", "float4", IN_4_BITS_BYTES),
        ("mxfp8", "float8", Software().cast_bytes),
        ("bf16", "", Software().cast_bytes),
    ],
)
def test_what_a_cast_to_fewer_bits_moves(tmp_path: Path, dtype: str, matmul: str, moved: float) -> None:
    (row,) = published.load(
        write(tmp_path / "published_runs.csv", [RUN | {"source_id": "megatron-bridge", "dtype": dtype}])
    ).rows
    assert row.setup.software.matmul == matmul and row.setup.software.cast_bytes == moved


@pytest.mark.parametrize("kv, tp, wanted", [("8", "4", 8), ("4", "8", 8), ("1", "4", 4), ("2", "8", 8), ("3", "4", 3)])
def test_ranks_have_a_whole_head_of_keys_each(tmp_path: Path, kv: str, tp: str, wanted: int) -> None:
    (row,) = published.load(
        write(tmp_path / "published_runs.csv", [RUN | {"n_kv_heads": kv, "tp": tp, "pp": "1", "vpp": ""}])
    ).rows
    assert row.model.kv_heads == wanted


@pytest.mark.parametrize(
    "seq, window", [("1024", 0), ("4096", 0), ("8192", 0), ("16384", 4096), ("12288", 4096), ("10240", None)]
)
def test_windows_are_shorter_than_sequences(tmp_path: Path, seq: str, window: int | None) -> None:
    found = published.load(
        write(tmp_path / "published_runs.csv", [RUN | {"arch_source": "sliding-window 4096", "seq_len": seq}])
    )
    assert [row.model.window for row in found.rows] == [window] * (window is not None)
    assert window is not None or "no multiple of its window of 4096" in found.refused[0]


def test_a_folder_of_all_formats(tmp_path: Path) -> None:
    write(tmp_path / "vtrain" / "ground_truth_multi.csv", [GOOD])
    write(tmp_path / "published_runs.csv", [RUN])
    mist_folder(tmp_path, plan())
    assert {row.source for row in load(tmp_path).rows} == {"vtrain multi", "somebody", "mist"}
    with pytest.raises(FileNotFoundError, match="has no file of the formats"):
        load(tmp_path / "nowhere")


def test_the_halves_depend_on_sizes_alone(tmp_path: Path) -> None:
    lines = [
        GOOD | {"micro batch": micro, "iteration time (ms)": time} for micro in ("1", "2", "4") for time in ("1", "2")
    ]
    rows = vtrain.load(write(tmp_path / "ground_truth_single.csv", lines)).rows
    assert len({in_half(row) for row in rows}) == 1


def test_what_torch_runs_one_by_one_and_how_it_quantises(tmp_path: Path) -> None:
    """RMS norms of several operators unless they are compiled; scales of whole tensors or of rows (torchao) move more
    than fused casts do."""
    titan = RUN | {"source_id": "torchtitan", "model_type": "dense-llama", "zero_fsdp": "FSDP2", "dtype": "fp8"}
    lines = [titan | {"notes": notes} for notes in ("eager", "torch.compile", "torch.compile; float8 rowwise")] + [
        RUN | {"dtype": "fp8"}
    ]
    eager, compiled, rowwise, other = published.load(write(tmp_path / "published_runs.csv", lines)).rows
    assert eager.model.norm_in_parts and not compiled.model.norm_in_parts
    moved = [row.setup.software.cast_bytes + row.setup.software.turn_bytes for row in (other, compiled, rowwise)]
    assert moved == sorted(moved) and moved[0] < moved[1] < moved[2]
    assert rowwise.setup.software.matmul_share < compiled.setup.software.matmul_share == 1.0


def test_whose_biases_are_added_behind_the_matmuls(tmp_path: Path) -> None:
    """Megatron's own layers add them so; those of Transformer Engine and torch do not."""
    gpt = RUN | {"model_type": "dense-gpt"}
    rows = published.load(
        write(
            tmp_path / "published_runs.csv",
            [gpt | {"source_id": source} for source in ("bigscience-a100", "dgxc-v25.02", "torchtitan")],
        )
    ).rows
    assert [row.model.bias_apart for row in rows] == [True, False, False]
    (row,) = vtrain.load(write(tmp_path / "ground_truth_single.csv", [GOOD])).rows
    assert row.model.bias_apart


@pytest.mark.parametrize("apart", [False, True])
def test_parts_stay_parts(apart: bool) -> None:
    """The passes make one operator of norms and biases only where the software that is predicted has one."""
    aten = torch.ops.aten
    plain = Config(layers=2, hidden=64, heads=2, kv_heads=2, head_dim=32, ffn=128, vocab=256, positions=64)
    biased = captured(replace(plain, bias_apart=apart), "float32")
    layers = [node for graph in edit.graphs(biased) for node in edit.calls(graph, aten.linear.default)]
    assert any(len(node.args) > 2 for node in layers) is not apart
    normed = captured(replace(plain, rms=True, bias=False, norm_in_parts=apart), "float32")
    assert (
        any(node.target is aten.rms_norm.default for graph in edit.graphs(normed) for node in edit.calls(graph))
        is not apart
    )


def test_devices_in_nodes_of_four_have_the_links_of_such_nodes(tmp_path: Path) -> None:
    lines = [RUN | {"gpu": "V100-32GB-SXM2", "dtype": "fp16", "gpus_per_node": nodes} for nodes in ("4", "8")]
    rows = published.load(write(tmp_path / "published_runs.csv", lines)).rows
    assert [row.cluster.levels[-1].topology for row in rows] == ["mesh", "switch"]


def test_tables_that_lack_columns_or_end_early(tmp_path: Path) -> None:
    """What is missing was not published; bytes that are no text do not matter, and a field that is too long ends the
    table."""
    text = ",".join(RUN) + "\n" + ",".join(f'"{text}"' for text in RUN.values()) + "\n"
    fewer = {
        key: value for key, value in RUN.items() if key not in ("checks", "notes", "sp", "peak_mem_kind", "source_id")
    }
    (row,) = published.load(write(tmp_path / "published_runs_fewer.csv", [fewer])).rows
    assert row.setup.sequence_parallel and not row.peaks and row.remarks == ("",)
    path = tmp_path / "published_runs.csv"
    for changed, rows, why in (
        (text.replace("8x400Gb", "\xe9"), 1, ""),
        (text[: text.index('"64"')], 0, "n_gpus was not published"),
        (text + "x" * 200_000, 1, "the table ends here"),
        (text[: text.index("\n") + 1], 0, ""),
    ):
        path.write_bytes(changed.encode("latin1"))
        found = published.load(path)
        assert len(found.rows) == rows and why in "".join(found.refused)


@pytest.mark.parametrize(
    "change, why",
    [
        ({"tokens_s_gpu": "0"}, "tokens_s_gpu is 0"),
        ({"step_time_s": "inf"}, "a step of inf s"),
        ({"peak_mem_value": "-1"}, "peak_mem_value is -1"),
        ({"zero_fsdp": "FSDP over 0"}, "over 0 ranks"),
        ({"zero_fsdp": "FSDP over 3"}, "over 3 ranks, of which 8"),
        ({"hidden": "4100"}, "4100 is no multiple of 32 heads"),
        ({"sp": "some"}, "sp is some"),
        ({"schedule": "ZB-H2"}, "ZB-H2 is not priced"),
        ({"schedule": "Chimera"}, "Chimera is not priced"),
        ({"schedule": "V-half"}, "V-half is not priced"),
        ({"schedule": "Hanayo"}, "Hanayo is not priced"),
        ({"schedule": "ZB-V"}, "vpp is 4, and places have 2"),
        ({"schedule": "DualPipe", "pp": "1", "tp": "1", "n_gpus": ""}, "n_gpus was not published"),
        ({"dp": "4"}, "dp is 4, and 64 GPUs in tp 4 x cp 1 x pp 2 are 8"),
        ({"n_gpus": "", "dp": "0"}, "dp is 0"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: dict[str, str], why: str) -> None:
    found = published.load(write(tmp_path / "published_runs.csv", [RUN | change, RUN]))
    assert len(found.rows) == 1 and why in found.refused[0]


@pytest.mark.parametrize(
    "text, zero",
    [
        ("auto (ILP, reduce-scatter allowed)", 2),
        ("none (DP)", 0),
        ("ZeRO-3", 3),
        ("fsdp2", 3),
        ("DeepSpeed ZeRO3", 3),
        ("zero-1", 1),
        ("ZeRO stage 2", 2),
    ],
)
def test_the_stage_of_zero_is_read(tmp_path: Path, text: str, zero: int) -> None:
    (row,) = published.load(write(tmp_path / "published_runs.csv", [RUN | {"zero_fsdp": text}])).rows
    assert row.setup.zero == zero
