"""What of a block runs again."""

from __future__ import annotations

from autopar.predict.axes import in_attention, kept_operators, rerun_levels
from autopar.predict.setup import Setup
from autopar.problem.kernels import multiplies
from autopar.problem.reading import read
from benchmarks.costmodel.predictions import captured
from benchmarks.costmodel.transformer import Config


def test_by_operators_attention_and_every_other_matmul_are_kept() -> None:
    sizes = Config(vocab=512, positions=256, layers=3, heads=4, kv_heads=4, head_dim=64, hidden=256, ffn=512, rms=True, gated=True, rotary=True)
    program = read(captured(sizes, "bfloat16"), {"b": 2, "s": 256}, training=True, device="cuda")
    kept = kept_operators(program)
    matmuls = [op.name for op in program.ops.values() if op.role == "op" and op.scope and multiplies(op) and any(op.weight)]
    assert [name in kept for name in matmuls] == [True, False, True, False, True]  # q k v, out, gate, up, down
    assert all(op.name in kept for op in program.ops.values() if op.role == "op" and in_attention(op))
    (levels,) = rerun_levels(program, Setup(2, 1, 256, recompute="selective", parts=("operators",))).values()
    assert set(matmuls[::2]) & set(levels) == set(levels) & set(matmuls)
