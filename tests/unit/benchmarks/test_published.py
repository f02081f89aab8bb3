"""What tables of published runs say in other words, and what follows from what they say."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.costmodel import published
from benchmarks.costmodel.devices import preset_of
from benchmarks.costmodel.reruns import Rerun
from benchmarks.costmodel.sharding import Sharding
from benchmarks.costmodel.tables import Refused
from tests.helpers.published_rows import MOE, RUN, write


@pytest.mark.parametrize(
    "layers, pp, vpp, dealt",
    [
        ("126", "8", "1", (15, *[16] * 6, 15)),
        ("30", "4", "8", (0, *[1] * 30, 0)),
        ("32", "2", "4", ()),
        ("61", "4", "4", ()),
        ("126", "1", "", ()),
    ],
)
def test_embedding_and_head_count_as_layers_where_these_are_two_short(
    tmp_path: Path, layers: str, pp: str, vpp: str, dealt: tuple[int, ...]
) -> None:
    (row,) = published.load(
        write(tmp_path / "published_runs.csv", [RUN | {"n_layers": layers, "pp": pp, "vpp": vpp, "tp": "1", "dp": ""}])
    ).rows
    assert row.setup.blocks == dealt


@pytest.mark.parametrize(
    "change, whole, over",
    [
        ({"source_id": "megatron-bridge", "cp": "2"}, False, True),
        ({"source_id": "dgxc-v25.02", "cp": "2"}, False, False),
        ({"source_id": "dgxc-v25.02", "cp": "2", "ep": "64"}, False, True),
        ({"source_id": "dgxc-v25.05.05", "cp": "2", "tp": "4", "notes": "recipe; ETP=1"}, True, True),
        ({"source_id": "dgxc-v25.05.05", "cp": "2", "tp": "2", "notes": "ETP=2"}, False, True),
        ({"source_id": "dgxc-v25.02", "cp": "2", "tp": "4", "n_gpus": "32"}, False, True),
        ({"source_id": "megatron-bridge", "cp": "2", "tp": "4", "n_gpus": "32"}, True, True),
        ({"source_id": "megatron-bridge", "cp": "4", "ep": "2"}, False, False),
    ],
)
def test_whose_experts_lie_over_context_parallel_ranks(
    tmp_path: Path, change: dict[str, str], whole: bool, over: bool
) -> None:
    (row,) = published.load(write(tmp_path / "published_runs.csv", [MOE | {"n_gpus": "64"} | change])).rows
    assert (row.setup.whole_experts, row.setup.experts_over_context) == (whole, over)


@pytest.mark.parametrize(
    "text, preset",
    [
        ("H100-SXM5-80GB", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("h100", "h100"),
        ("H100-80GB-PCIE", "h100-pcie"),
        ("H100 NVL 94GB", None),
        ("H100 64GB", None),
        ("H100-96GB-HBM2e-500W", "h100-96"),
        ("A100 80G", "a100-80"),
        ("A100-SXM4-40GB", "a100-40"),
        ("A100-40GB-SXM (DGX-A100)", "a100-40"),
        ("A100 (80 GB)", "a100-80"),
        ("A100-80GB-PCIE", "a100-80-pcie"),
        ("A100 PCIe 40GB", None),
        ("A100", None),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("V100-16GB-SXM2", "v100-16"),
        ("V100", None),
        ("8xH100", "h100"),
        ("8x A100 80GB", "a100-80"),
        ("GB200", "gb200"),
        ("B200 SXM", "b200"),
        ("GH200 480GB", "gh200"),
        ("H200-141GB-SXM", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("RTX4090-24GB", "rtx4090"),
        ("A6000-48GB", "rtx-a6000"),
        ("GeForce RTX 3090", "rtx3090"),
        ("RTX 3090 Ti", None),
        ("NVIDIA A40-48GB", "a40"),
        ("A400", None),
        ("RTX 6000 Ada", None),
        ("NVIDIA A10G", "a10g"),
        ("A10", None),
        ("L40S", "l40s"),
        ("L40", None),
        ("NVIDIA L4", "l4"),
        ("TPUv4", None),
        ("", None),
    ],
)
def test_devices_are_known_by_any_name(text: str, preset: str | None) -> None:
    """Other spellings than one were refused, or, of an H100 without the kind of its memory, taken for another."""
    with pytest.raises(Refused, match="there is no preset for") if preset is None else nullcontext():
        assert preset_of(text) == preset


def test_ranks_that_are_not_stated_are_those_that_the_others_leave(tmp_path: Path) -> None:
    """The column of data-parallel ranks was not read; it may count context-parallel ones."""
    lines = [
        RUN,
        RUN | {"dp": "8"},
        RUN | {"dp": "8", "n_gpus": ""},
        RUN | {"cp": "2", "dp": "4"},
        RUN | {"cp": "2", "dp": "8"},
    ]
    one, *same, four, eight = published.load(write(tmp_path / "published_runs.csv", lines)).rows
    assert same == [one, one] and four == eight and (four.setup.dp, four.setup.cp) == (4, 2)


def test_axes_that_are_not_there_may_be_none_or_zero(tmp_path: Path) -> None:
    lines = [RUN | {"vpp": "", "schedule": "1F1B"}]
    lines += [lines[0] | {"cp": "0", "ep": "none", "vpp": "None"}, lines[0] | {"status": "completed", "ep": "0"}]
    one, *same = published.load(write(tmp_path / "published_runs.csv", lines)).rows
    assert same == [one, one]


def test_a_vocabulary_that_is_not_stated_is_that_of_gpt_2(tmp_path: Path) -> None:
    gpt = RUN | {"model_type": "dense-gpt", "ffn_hidden": "", "n_kv_heads": ""}
    lines = [gpt | {"vocab": vocab} for vocab in ("50257", "")] + [RUN | {"vocab": ""}]
    found = published.load(write(tmp_path / "published_runs.csv", lines))
    assert len({row.model for row in found.rows}) == 1 and found.refused == ["7: vocab was not published"]


def test_other_spellings_are_read(tmp_path: Path) -> None:
    lines = [
        RUN,
        RUN | {"dtype": "BF16", "sp": "yes", "status": "OK", "recompute": "None", "zero_fsdp": "zero stage 1"},
        RUN | {"schedule": "GPipe"},
        RUN | {"schedule": "all-forward-all-backward (AFAB)"},
        RUN | {"gpu": "H200-141GB-SXM"},
        RUN | {"seq_len": "8,192", "tokens_s_gpu": "2,000", "cp": "n/a", "ep": "-", "notes": "unknown"},
    ]
    one, other, gpipe, first, large, apart = published.load(write(tmp_path / "published_runs.csv", lines)).rows
    assert (
        other == one == apart
        and first == gpipe
        and gpipe.setup == one.setup
        and one.peaks
        and not gpipe.peaks
        and large.cluster.device.name.startswith("H200")
    )


@pytest.mark.parametrize(
    "text, stage, replicas",
    [
        ("", 0, 1),
        ("none", 0, 1),
        ("DDP", 0, 1),
        ("NO_SHARD", 0, 1),
        ("0", 0, 1),
        ("FSDP=0", 0, 1),
        ("none (DP)", 0, 1),
        ("auto (ILP may shard optimizer, RS=True)", 0, 1),
        ("1", 1, 1),
        ("stage 1", 1, 1),
        ("distributed_optimizer", 1, 1),
        ("Megatron distributed optimizer (ZeRO-1)", 1, 1),
        ("optimizer state sharding", 1, 1),
        ("DDP + zero redundancy optimizer", 1, 1),
        ("--use-distopt", 1, 1),
        ("Fully Sharded Data Parallel", 3, 1),
        ("FSDP SHARD_GRAD_OP (ZeRO-2)", 2, 1),
        ("DeepSpeed stage 2", 2, 1),
        ("3", 3, 1),
        ("DeepSpeed stage-3", 3, 1),
        ("ZeRO stage-3", 3, 1),
        ("zero3", 3, 1),
        ("fully_shard", 3, 1),
        ("FSDP=1", 3, 1),
        ("FSDP2 full shard (ZeRO-3)", 3, 1),
        ("FSDP2 over 4 ranks", 3, 4),
        ("HSDP (shard 8, replicate 2)", 3, 2),
        ("FSDP2 dp_shard=4 dp_replicate=4", 3, 4),
        ("HSDP replicas 4", 3, 4),
        ("MiCS over 2", 3, 8),
        ("HYBRID_SHARD", 3, 8),
    ],
)
def test_what_rests_cut_and_over_which_ranks(text: str, stage: int, replicas: int) -> None:
    """HSDP, stages without the word ZeRO and other spellings were taken for plain data parallelism, a switch that is
    off for FSDP."""
    assert Sharding.of(text, 16, 2) == Sharding(stage, replicas)


@pytest.mark.parametrize(
    "text, why",
    [
        ("ZeRO-Infinity", "zero_fsdp is ZeRO-Infinity; wanted"),
        ("sharded data parallel", "zero_fsdp is sharded data parallel; wanted"),
        ("HSDP replicas 3", "shards over 0 ranks"),
        ("FSDP over 5", "shards over 5 ranks"),
    ],
)
def test_ways_to_rest_that_are_not_known_are_refused(text: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        Sharding.of(text, 16, 2)


@pytest.mark.parametrize(
    "change, sizes",
    [
        ({"gpu": "GB200 NVL72"}, (1, 64)),
        ({"gpu": "GB200", "interconnect": "NVL72"}, (1, 64)),
        ({"gpu": "GB200", "gpus_per_node": "4"}, (16, 4)),
    ],
)
def test_racks_are_named_by_their_devices_or_their_network(
    tmp_path: Path, change: dict[str, str], sizes: tuple[int, ...]
) -> None:
    (row,) = published.load(write(tmp_path / "published_runs.csv", [RUN | {"interconnect": ""} | change])).rows
    assert tuple(level.size for level in row.cluster.levels) == sizes


@pytest.mark.parametrize(
    "kind, detail, found",
    [
        ("", "", Rerun("none")),
        ("None", "", Rerun("none")),
        ("no", "", Rerun("none")),
        ("false", "", Rerun("none")),
        ("FULL", "", Rerun("full")),
        ("yes", "", Rerun("full")),
        ("full block", "", Rerun("full")),
        ("full", "uniform, every layer", Rerun("full")),
        ("full", "every 3rd block", Rerun("full", 1 / 3)),
        ("full (every 4 layers)", "", Rerun("full", 0.25)),
        ("full", "8 of 32 layers", Rerun("full", 0.25)),
        ("activation checkpointing", "", Rerun("full")),
        ("selective", "layer (every 2nd)", Rerun("full", 0.5)),
        ("selective", "every other layer", Rerun("full", 0.5)),
        ("full", "Every third block", Rerun("full", 1 / 3)),
        ("selective AC", "", Rerun("selective", parts=("attention",))),
        ("selective (op)", "", Rerun("selective", parts=("operators",))),
        ("Selective", "", Rerun("selective", parts=("attention",))),
        ("partial recompute", "", Rerun("selective", parts=("attention",))),
        ("core_attn", "", Rerun("selective", parts=("attention",))),
        ("selective", "moe_act", Rerun("none")),
        ("selective", "SAVE_QKV_OUT_PROJ", Rerun("selective", parts=("attention", "mlp"))),
        ("save_dot_except_mlpwi", "", Rerun("selective", parts=("attention", "mlp"))),
        ("selective", "save_dot_with_context_except_mlp", Rerun("selective", parts=("mlp",))),
        ("selective", "SAVE_DOT_ONLY", Rerun("selective", parts=("attention",))),
        ("dots_with_no_batch_dims_saveable", "", Rerun("selective", parts=("attention",))),
        ("minimal", "", Rerun("selective", parts=("attention",))),
        ("minimal_flash", "", Rerun("none")),
        ("selective", "SAVE_OUT_PROJ", Rerun("full")),
        ("SAVE_NOTHING", "", Rerun("full")),
        ("layernorm", "", Rerun("none")),
        ("layernorm+moe_act", "", Rerun("none")),
        ("MoE", "", Rerun("selective", parts=("experts",))),
        ("per-layer", "", Rerun("full")),
        ("everything_saveable", "", Rerun("none")),
    ],
)
def test_what_runs_again_in_any_words(kind: str, detail: str, found: Rerun) -> None:
    """Lines that said it in other words than three were refused; a share of the blocks was taken for all of them."""
    assert Rerun.of(kind, detail) == found


def test_what_runs_again_is_refused_where_it_is_not_known() -> None:
    for said in ("sometimes", "1/2"):
        with pytest.raises(Refused, match=f"recompute is {said}; wanted none, selective or full"):
            Rerun.of(said, "")


def test_a_micro_batch_that_is_not_stated_is_one_where_a_batch_has_no_more(tmp_path: Path) -> None:
    line = RUN | {"micro_batch": ""}
    found = published.load(write(tmp_path / "published_runs.csv", [line, line | {"global_batch": "8"}]))
    (row,) = found.rows
    assert found.refused == ["7: micro_batch was not published"] and (
        row.setup.micro_batch,
        row.setup.microbatches,
    ) == (1, 1)


@pytest.mark.parametrize(
    "text, cut", [("4", True), ("y", True), ("1", True), ("on", True), ("n", False), ("Off", False), ("8", None)]
)
def test_whether_the_sequence_is_cut_may_be_said_by_the_ranks_that_cut_it(
    tmp_path: Path, text: str, cut: bool | None
) -> None:
    found = published.load(write(tmp_path / "published_runs.csv", [RUN | {"sp": text}]))
    assert [row.setup.sequence_parallel for row in found.rows] == ([] if cut is None else [cut])


@pytest.mark.parametrize(
    "said, complete",
    [
        ("full", True),
        ("full-except:n_params", True),
        ("full-except:n_params+recompute", False),
        ("full-except:recompute", False),
        ("partial", False),
    ],
)
def test_what_follows_from_sizes_is_not_missing(tmp_path: Path, said: str, complete: bool) -> None:
    row, latent = published.load(
        write(
            tmp_path / "published_runs.csv",
            [RUN | {"config_complete": said, "notes": notes} for notes in ("", "swiglu; MLA attention")],
        )
    ).rows
    assert row.complete == complete and latent.complete == (said == "full")
    assert row.model.latent is None and latent.model.latent is not None


@pytest.mark.parametrize(
    "detail, again, share",
    [
        ("block, num_layers=3", 3, 1.0),
        ("recompute_method block, recompute_num_layers 3", 3, 1.0),
        ("block 3 layers", 3, 1.0),
        ("3 layers per stage", 3, 1.0),
        ("uniform, recompute-num-layers 1", 0, 1.0),
        ("whole block", 0, 1.0),
        ("block, 8 of 32 layers", 0, 0.25),
        ("every 2 blocks", 0, 0.5),
    ],
)
def test_so_many_blocks_of_each_stage_run_again(tmp_path: Path, detail: str, again: int, share: float) -> None:
    """All of them were taken to, wherever their number is not of all layers."""
    (row,) = published.load(
        write(tmp_path / "published_runs.csv", [RUN | {"recompute": "full", "recompute_detail": detail}])
    ).rows
    assert (row.setup.recompute, row.setup.again, row.setup.recompute_share) == (
        "full",
        (again,) * 8 * (again > 0),
        share,
    )


@pytest.mark.parametrize(
    "change, why",
    [
        ({"zero_fsdp": "ZeRO-3, no offload"}, ""),
        ({"zero_fsdp": "FSDP (cpu_offload=False)"}, ""),
        ({"zero_fsdp": "ZeRO-3 without CPU offload"}, ""),
        ({"zero_fsdp": "FSDP (cpu_offload=True)"}, ""),
        ({"zero_fsdp": "ZeRO-2 + ZeRO-Offload"}, ""),
        ({"zero_fsdp": "ZeRO-3, ZeRO-Infinity"}, "from disks"),
        ({"model": "Llama DoRA"}, "adapters of kind DoRA"),
        ({"model": "m qlora"}, ""),
    ],
)
def test_what_is_on_disks_or_adapted_otherwise_is_refused(tmp_path: Path, change: dict[str, str], why: str) -> None:
    """Runs with other adapters were priced as if they trained everything."""
    found = published.load(write(tmp_path / "published_runs.csv", [RUN | change]))
    assert len(found.rows) == (not why) and why in "".join(found.refused)


@pytest.mark.parametrize(
    "source, once", [("torchtitan", True), ("torchtitan-2024", True), ("nemo-automodel", False), ("dgxc-v25.02", False)]
)
def test_whose_stages_gather_once(tmp_path: Path, source: str, once: bool) -> None:
    (row,) = published.load(
        write(tmp_path / "published_runs.csv", [RUN | {"source_id": source, "zero_fsdp": "FSDP2"}])
    ).rows
    assert (row.setup.zero, row.setup.software.gathers_once) == (3, once)


@pytest.mark.parametrize(
    "change, micro",
    [
        ({"source_id": "torchtitan"}, 4),
        ({"source_id": "torchtitan", "global_batch": "8"}, 1),
        ({"source_id": "torchtitan", "global_batch": "24"}, None),
        ({}, None),
        ({"global_batch": "8"}, 1),
    ],
)
def test_how_many_samples_a_microbatch_has_where_nothing_is_said(
    tmp_path: Path, change: dict[str, str], micro: int | None
) -> None:
    """Eight data-parallel ranks, two places: torchtitan runs as many microbatches as places then."""
    found = published.load(write(tmp_path / "published_runs.csv", [RUN | {"micro_batch": ""} | change]))
    assert [row.setup.micro_batch for row in found.rows] == [micro] * (micro is not None)
    assert micro is not None or "micro_batch was not published" in found.refused[0]
