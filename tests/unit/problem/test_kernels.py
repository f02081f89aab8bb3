"""Prices of kernels: what alignment does to products, what 8 bits take beside matmuls, clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from autopar.calibrate.machine import ARITHMETIC
from autopar.capture import capture
from autopar.cluster import Cluster, Device
from autopar.cost.compute import DRAWN_MASK, DRAWN_NUMBER
from autopar.problem.graph import ATTENTION, Op, Program
from autopar.problem.kernels import Kernels
from autopar.problem.options import sections_of, table_of
from autopar.problem.read_graph import read
from autopar.problem.settings import Settings
from benchmarks.costmodel.config import Config
from benchmarks.costmodel.predictions import captured


@cache
def _halves(sizes: Config) -> fx.GraphModule:
    return captured(sizes, "float16")


def products_s(head_dim: int, device: str) -> float:
    """Seconds of the forward of scores and of what they weigh, on one device, per multiplication."""
    sizes = Config(
        vocab=1024,
        positions=2048,
        layers=2,
        heads=16,
        kv_heads=16,
        head_dim=head_dim,
        hidden=16 * head_dim,
        ffn=1024,
        fused_attention=False,
    )
    program = read(_halves(sizes), {"b": 8, "s": 2048}, training=True, device="cuda")
    table, kernels = (
        table_of(program, 1, sections_of(program, None), None),
        Kernels(Cluster.parse(device).device, Settings(precision="float16")),
    )
    found = [op for op in program.ops.values() if op.role == "op" and op.flops > 0 and op.scope and "matmul" in op.name]
    assert len(found) == 2
    return sum(kernels.seconds(op, (table[op.name][0],), (1,))[0] for op in found) / head_dim


@pytest.mark.parametrize("device", ["a100-80:1x1", "h100:1x1"])
def test_products_of_activations_with_odd_rows_run_without_tensor_cores(device: str) -> None:
    assert products_s(108, device) > 4 * products_s(112, device)


H100 = Cluster.parse("h100:1x1").device


@cache
def llama() -> Program:
    """Two blocks of a Llama 1024 wide, 4 samples of 2048."""
    sizes = Config(
        vocab=1024,
        positions=2048,
        layers=2,
        heads=8,
        kv_heads=8,
        head_dim=128,
        hidden=1024,
        ffn=4096,
        rms=True,
        gated=True,
        rotary=True,
    )
    return read(captured(sizes, "bfloat16"), {"b": 4, "s": 2048}, training=True, device="cuda")


def both_s(op: Op, device: Device, ways: int = 1, factor: str = "", **change: object) -> tuple[float, float]:
    """Forward and backward of an Op, cut `ways` ways on a `factor`."""
    option = next(
        option
        for option in table_of(llama(), ways, sections_of(llama(), None), None)[op.name]
        if option.factor == factor
    )
    return Kernels(device, Settings(precision="bf16", **change)).seconds(op, (option,), (ways,))  # type: ignore[arg-type]


def test_attention_has_the_clocks_of_the_step() -> None:
    attention = next(op for op in llama().ops.values() if op.target is ATTENTION)
    fast, slow = (both_s(attention, replace(H100, sustained=share, launch_s=0.0)) for share in (0.8, 0.4))
    assert slow == pytest.approx([2 * seconds for seconds in fast])


def test_operands_of_8_bits_are_read_and_written_as_the_software_does() -> None:
    up = _up()
    rows, bandwidth = 4 * 2048, H100.memory_bandwidth_bytes_s * H100.achievable_bandwidth
    plain, more = (both_s(up, H100, matmul="float8", cast_bytes=n) for n in (4.0, 9.0))
    assert more[0] - plain[0] == pytest.approx(5.0 * rows * 1024 / bandwidth)
    assert more[1] - plain[1] == pytest.approx(5.0 * rows * 4096 / bandwidth)
    half = both_s(up, H100, matmul="float8", matmul_share=0.5)
    assert half[0] > 1.5 * plain[0] - 2 * H100.launch_s


def test_what_is_gathered_in_8_bits_is_cast_by_shards() -> None:
    """The input of a column-parallel matmul; its gradient is cut as its result is, so nothing changes in the
    backward."""
    bandwidth = H100.memory_bandwidth_bytes_s * H100.achievable_bandwidth
    whole, shards = (
        both_s(_up(), H100, 2, "o", matmul="float8", cast_bytes=5.0, turn_bytes=2.0, casts_shards=on)
        for on in (False, True)
    )
    assert whole[0] - shards[0] == pytest.approx(5.0 * 4 * 2048 * 1024 / 2 / bandwidth)
    assert whole[1] == shards[1]


def _up() -> Op:
    """The first matmul that widens rows to the feed-forward part's."""
    return next(
        op for op in llama().ops.values() if op.role == "op" and any(op.weight) and op.call.outs[0].sizes[-1] == 4096
    )


def convolved_s(*batch: int, transposed: bool = False) -> float:
    """Seconds of the forward of a convolution of one image, with a batch of one or without."""
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    with torch.device("meta"):
        model = nn.Sequential(kind(64, 96, 3), nn.Flatten(0))
        found = capture(model, (torch.zeros(*batch, 64, 40, 24),), loss_fn=lambda out: out.square().mean())
    program = read(found.gm, found.hints, training=True, device="cuda")
    (op,) = (op for op in program.ops.values() if "conv" in op.name)
    table = table_of(program, 1, sections_of(program, None), None)
    return Kernels(H100, Settings(precision="bf16")).seconds(op, (table[op.name][0],), (1,))[0]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_of_one_image_takes_as_long_without_a_batch(*, transposed: bool) -> None:
    """Its columns are channels, whichever dim these are."""
    assert convolved_s(transposed=transposed) == pytest.approx(convolved_s(1, transposed=transposed))


class Layer(nn.Module):
    """A product, and what is done to its columns."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh().sum()


@pytest.mark.parametrize(("name", "factor"), [("linear", "o"), ("linear", "i"), ("tanh", "_1")])
@pytest.mark.parametrize("where", ["h100:1x3", "cpu:1x3"])
def test_the_slowest_rank_has_the_largest_shard(where: str, name: str, factor: str) -> None:
    """A third of 70 is 24, as of 72."""
    device, found = Cluster.parse(where).device, []
    for size in (70, 72):
        with torch.device("meta"):
            model, x = (
                Layer(*((size, 512) if factor == "i" else (512, size))),
                torch.empty(64, size if factor == "i" else 512),
            )
        program = read(capture(model, (x,)).gm, {"b": 64}, training=True, device=device.kind)
        op = next(op for op in program.ops.values() if op.role == "op" and name in op.name)
        option = next(o for o in table_of(program, 3, sections_of(program, None), None)[op.name] if o.factor == factor)
        found.append(Kernels(device, Settings()).seconds(op, (option,), (3,)))
    assert found[0] == pytest.approx(found[1], rel=1e-9)


class Drawing(nn.Module):
    """A product, and what `body` makes of its rows."""

    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(64, 64, bias=False), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.linear(x)).sum()


@pytest.mark.parametrize(
    ("body", "name", "flops"),
    [
        (lambda x: functional.dropout(x, 0.1), "dropout", DRAWN_MASK * 64),
        (lambda x: x + torch.randn_like(x), "randn", DRAWN_NUMBER * 64),
        # a number for each of 32 keys, not for each of 64 columns
        (
            lambda x: functional.scaled_dot_product_attention(*[x.view(-1, 1, 32, 64)] * 3, dropout_p=0.1),
            "scaled_dot_product",
            DRAWN_MASK * 32,
        ),
        (lambda x: functional.scaled_dot_product_attention(*[x.view(-1, 1, 32, 64)] * 3), "scaled_dot_product", 0),
    ],
    ids=["dropout", "numbers", "attention", "attention without dropout"],
)
def test_cpus_draw_one_number_after_the_other(
    body: Callable[[torch.Tensor], torch.Tensor], name: str, flops: int
) -> None:
    """Where the device is as fast at all else the drawing is what is left; two ranks draw half of it each, but all
    scores where they split features of values."""
    with torch.device("meta"):
        model, x = Drawing(body), torch.empty(128, 64)
    device, slower = (replace(Cluster.parse("cpu:1x2").device, vector_flops=rate) for rate in (1e18, 1e9))
    program = read(capture(model, (x,)).gm, {"b": 128}, training=True, device="cpu")
    op = next(op for op in program.ops.values() if name in op.name)
    for ways in (1, 2):
        options = table_of(program, ways, sections_of(program, None), None)[op.name]
        for option in [o for o in options if ways == 1 or o.outs[0].value in ("S0", "S3")]:
            seconds, floor = (Kernels(each, Settings()).seconds(op, (option,), (ways,))[0] for each in (slower, device))
            drawn = flops * 128 / (1 if option.outs[0].value == "S3" else ways)
            assert seconds - floor == pytest.approx(drawn / 1e9, rel=0.02)


@pytest.mark.parametrize(
    ("body", "flops"),
    [
        (lambda x: torch.logaddexp(x, x.cos()), (25, 2 * 20)),
        (lambda x: torch.maximum(x, x.cos()), (1, 2 * 100)),
        (lambda x: torch.maximum(x, x.detach()), (1, 100)),
        (lambda x: x.tan(), (30, 10)),
        (lambda x: functional.gelu(x, approximate="tanh"), (27, 30)),
        (lambda x: functional.gelu(x), (8, 8)),
        (lambda x: x + x.cos(), (1, 1)),
    ],
    ids=["logarithm of a sum", "larger", "larger than what is fixed", "tangent", "approximated", "GELU", "sum"],
)
def test_pointwise_operators_do_their_arithmetic_one_after_the_other(
    body: Callable[[torch.Tensor], torch.Tensor], flops: tuple[int, int]
) -> None:
    """Those of two matrices too: on no matrix units."""
    with torch.device("meta"):
        model, x = Drawing(body), torch.empty(128, 64)
    program = read(capture(model, (x,)).gm, {"b": 128}, training=True, device="cpu")
    op = [op for op in program.ops.values() if op.role == "op"][-2]  # the last one is the sum
    device = replace(Cluster.parse("cpu:1x1").device, vector_flops=1e3, launch_s=0.0)
    (option, *_) = table_of(program, 1, sections_of(program, None), None)[op.name]
    assert Kernels(device, Settings()).seconds(op, (option,), (1,)) == tuple(n * 128 * 64 / 1e3 for n in flops)


@pytest.mark.parametrize("what", ARITHMETIC)
def test_arithmetic_is_measured_by_the_flops_that_are_priced(what: str) -> None:
    flops, body = ARITHMETIC[what]
    with torch.device("meta"):
        model, x = Drawing(body), torch.empty(128, 64)
    program = read(capture(model, (x,)).gm, {"b": 128}, training=True, device="cpu")
    assert max(op.flops for op in program.ops.values() if "linear" not in op.name) == flops * 128 * 64
