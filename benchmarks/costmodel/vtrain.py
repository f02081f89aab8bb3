"""vTrain's measured iterations: Megatron-DeepSpeed on A100 nodes of 8."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autopar.cluster import Cluster
from benchmarks.costmodel.config import Config
from benchmarks.costmodel.predict import Setup, Software
from benchmarks.costmodel.rows import Loaded, Row
from benchmarks.costmodel.tables import Line, Refused, count, positive, rows_of

COLUMNS = (
    "# GPUs",
    "global batch",
    "micro batch",
    "hidden size",
    "attention heads",
    "# layers",
    "sequence length",
    "tensor parallelism",
    "data parallelism",
    "pipeline parallelism",
    "iteration time (ms)",
)
VOCABULARY = 50257
NETWORK_BYTES_S = 100e9 / 8
"""800 Gb/s per node, as that project models it, for each of 8 GPUs."""

SOFTWARE = Software(fused=True, overlap_gradients=False, gradient_bytes=2)
"""Megatron-DeepSpeed of 2022: fused kernels by hand, gradients of 16 bits summed behind the backward (the data's
README: no buckets)."""


def load(path: Path) -> Loaded:
    """The rows of one file."""
    return rows_of(path, lambda line, name: _row(line, name, path.stem))


def _row(line: Line, name: str, source: str) -> Row:
    gpus, batch, micro, hidden, heads, layers, seq, tp, dp, pp = (count(line, column) for column in COLUMNS[:-1])
    seconds = positive(line[COLUMNS[-1]], COLUMNS[-1]) / 1e3
    if tp * dp * pp != gpus:
        raise Refused(f"{tp} x {dp} x {pp} is not {gpus} GPUs")
    if batch % (micro * dp) or hidden % heads:
        raise Refused(f"batch {batch} in microbatches of {micro} on {dp} ranks, {hidden} in {heads} heads")
    model = Config(
        vocab=padded(VOCABULARY, tp),
        positions=seq,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        hidden=hidden,
        ffn=4 * hidden,
        bias_apart=True,
        dropout=0.0,
        fused_attention=False,
    )
    setup = Setup(micro, batch // micro // dp, seq, tp=tp, dp=dp, pp=pp, recompute="full", software=SOFTWARE)
    return Row(
        name,
        f"vtrain {source.rpartition('_')[2]}",
        model,
        setup,
        a100(gpus),
        "float16",
        seconds,
        group=(hidden, heads, layers, seq, gpus, batch),
    )


def padded(vocabulary: int, tp: int) -> int:
    """The size that a vocabulary is given: as it is on one tensor-parallel rank, where what the runs spend outside of
    their blocks is four times that on two ranks, as unaligned rows cost; else a multiple of 128 per rank on 8 ranks
    (Megatron's padding)."""
    return vocabulary if tp == 1 else -(-vocabulary // 1024) * 1024


def a100(gpus: int) -> Cluster:
    """Nodes of 8 with that project's network."""
    cluster = Cluster.parse(f"a100-80:{-(-gpus // 8)}x{min(8, gpus)}")
    outer, *inner = cluster.levels
    return replace(cluster, levels=(replace(outer, bandwidth_bytes_s=NETWORK_BYTES_S), *inner))
