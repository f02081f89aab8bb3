"""Mist's measured plans on L4: a YAML per plan, and one summary of their times beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from autopar.cluster import Cluster, Protocol
from autopar.memory import Habits
from benchmarks.costmodel.config import Config
from benchmarks.costmodel.predict import Setup, Software
from benchmarks.costmodel.rows import Loaded, Peak, Row
from benchmarks.costmodel.software import PYTORCH
from benchmarks.costmodel.tables import ERRORS, positive

GROUPS = (1, 2, 4, 8)
"""Sizes of groups whose bandwidth a plan has."""

DTYPES = ("bfloat16", "float16", "float32")

SUMMARY = "expected_summary.json"
SOFTWARE = Software(
    fused=False, overlap_gradients=True, gradient_bytes=2, optimizer_bytes=28.0, habits=replace(PYTORCH, standing=True)
)
"""Plain PyTorch with its own overlap; weights and gradients of 16 bits, optimizer state of 32."""


def load(path: Path) -> Loaded:
    """The plan of one file with its time from the summary beside it."""
    try:
        plan = yaml.safe_load(path.read_text())
        measured = json.loads((path.parent / SUMMARY).read_text()).get(path.stem)
        if measured is None:
            return Loaded(refused=[f"{path.name}: {SUMMARY} has no time for it"])
        return Loaded([_row(plan, measured, path.stem)])
    except (OSError, yaml.YAMLError, *ERRORS) as error:
        return Loaded(refused=[f"{path.name}: {type(error).__name__} {' '.join(str(error).split())}"])


def _row(plan: dict[str, Any], measured: dict[str, str], name: str) -> Row:
    model, training, hardware, strategy = (plan[key] for key in ("model", "training", "hardware", "strategy"))
    stages = strategy["stage_strategies"]
    micro, dp, tp = (int(value) for value in stages[0][:3])  # samples per device, data and tensor parallel
    steps, pp = int(strategy["gradient_accumulation_steps"]), len(stages)
    if any([int(value) for value in stage[:3]] != [micro, dp, tp] for stage in stages):
        raise ValueError("its stages are laid out differently from each other")
    if micro * dp * steps != int(training["global_batch_size"]):
        raise ValueError(f"{micro} samples x {dp} ranks x {steps} microbatches are not {training['global_batch_size']}")
    hidden, heads, layers = (int(model[key]) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    config = Config(
        vocab=int(model["vocab_size"]),
        positions=int(training["max_sequence_length"]),
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        hidden=hidden,
        ffn=int(model["intermediate_size"]),
        bias=bool(model["mlp_fc1_bias"]),
        tied=bool(model["tie_word_embeddings"]),
        dropout=float(model["hidden_dropout"]),
        fused_attention=bool(model["use_flash_attn"]),
        fused_softmax=True,
    )  # fused_scale_mask_softmax: mist/modules/mha.py, forward_fused_softmax
    again = sum(strategy["gradient_checkpointing"]) / sum(strategy["layer_partitions"])
    offloaded = any(share > 0 for stage in stages for share in stage[6:])
    setup = Setup(
        micro,
        steps,
        config.positions,
        tp=tp,
        dp=dp,
        pp=pp,
        zero=1 if stages[0][5] else 0,
        recompute="full" if again else "none",
        recompute_share=again or 1.0,
        blocks=tuple(strategy["layer_partitions"]),
        again=tuple(strategy["gradient_checkpointing"]),
        software=replace(SOFTWARE, habits=_habits(stages)),
    )
    peaks = [
        peak
        for kind in ("allocated", "reserved")
        for peak in _peaks(measured.get(f"exec_stage_peak_{kind}_memories", ""), kind)
    ]
    if any(peak.place is not None and peak.place >= pp for peak in peaks):
        raise ValueError(f"its summary has peaks of more than {pp} stages")
    if training["params_dtype"] not in DTYPES:
        raise ValueError(f"params_dtype is {training['params_dtype']}; wanted one of {', '.join(DTYPES)}")
    remarks = ("states or activations are kept on the host, their copies taken as hidden",) if offloaded else ()
    return Row(
        name,
        "mist",
        config,
        setup,
        _cluster(hardware),
        str(training["params_dtype"]),
        positive(str(measured["exec_total_cost"]), "exec_total_cost"),
        tuple(peaks),
        remarks=remarks,
    )


def _habits(stages: list[list[float]]) -> Habits:
    """A stage is micro batch, data and tensor parallel, the stages of ZeRO, and what share is on the host of weights,
    gradients, state and activations."""
    hosted, kept = (tuple(float(share) for stage in stages for share in stage[at : at + 1]) for at in (8, 9))
    return replace(SOFTWARE.habits, hosted=hosted, hosted_kept=kept)


def _peaks(text: str, kind: str) -> list[Peak]:
    """ "[18506 MB, 13406 MB]": of each stage, in MiB."""
    return [
        Peak(positive(part.split()[0], f"the peak of stage {place}") * (1 << 20), kind, place)
        for place, part in enumerate(text.strip("[]").split(","))
        if part
    ]


def _cluster(hardware: dict[str, Any]) -> Cluster:
    """Nodes of L4, whose links inside a node are those that were measured where the plans ran: `gpu_gpu_comm_params`
    has bus bandwidths in GB/s and starts in seconds of groups of 1, 2, 4 and 8 GPUs in each of 1, 2, 4 and 8 nodes; a
    pair sends at the rate of groups of 2 (mist/tools/optimize.py)."""
    cluster = Cluster.parse(f"l4:{hardware['num_nodes']}x{hardware['num_gpus_per_node']}")
    measured = [float(value) for value in hardware.get("gpu_gpu_comm_params", ())]
    if len(measured) < 2 * len(GROUPS):
        return cluster
    rates = dict(zip(GROUPS, zip(measured[0:8:2], measured[1:8:2], strict=True), strict=True))
    best = max(rates[n][0] for n in GROUPS[1:])
    source = "gpu_gpu_comm_params of the plan"
    rings = tuple(
        Protocol(f"ring_{n}", "ring", rates[n][1], 0.0, rates[n][0] / best, source, members=n) for n in GROUPS[1:]
    )
    pairs = Protocol("pairs", "direct", rates[2][1], 0.0, rates[2][0] / best, source)
    level = replace(cluster.levels[-1], bandwidth_bytes_s=best * 1e9, protocols=(*rings, pairs), source=source)
    return replace(cluster, levels=(*cluster.levels[:-1], level))
