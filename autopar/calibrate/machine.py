"""What one rank does on its own: matmuls, memory, other arithmetic, starting operators, the optimizer's step. Runs on ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

from autopar.calibrate.clock import Clock
from autopar.calibrate.samples import Sample

SQUARES = {"cpu": (32, 64, 128, 256, 512), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
OBLONG = {"cpu": ((512, 2048, 256), (512, 256, 2048), (64, 1024, 1024), (1024, 64, 256), (2048, 384, 128)),
          "cuda": ((8192, 1024, 4096), (2048, 8192, 1024), (1024, 1024, 8192), (16384, 4096, 1024), (4096, 16384, 4096))}
"""Rows, columns and depth: as layers of transformers have them, cut into few and into many parts."""

STREAMS = {"cpu": tuple(1 << power for power in range(14, 26, 2)), "cuda": tuple(1 << power for power in range(20, 31, 2))}
"""Bytes of one tensor."""

ATTENTION = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""The dtype in which fused attention is measured."""

CHAIN = 20
"""Small operators in a row, forward and backward."""

# what -> FLOPs of one element as passes.annotate_flops counts them, and the operator
ARITHMETIC: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "gelu": (8, functional.gelu),
    "softmax": (5, lambda x: functional.softmax(x.view(-1, 128), -1)),
    "tanh": (5, torch.tanh),
    "layer_norm": (8, lambda x: functional.layer_norm(x.view(-1, 128), (128,))),
}


def matmuls(clock: Clock, dtype: str) -> list[Sample]:
    """`linear` without a bias, at several sizes; nothing where the device cannot do it in `dtype`."""
    kind, found = clock.kind, []
    for m, n, k in (*((size, size, size) for size in SQUARES[kind]), *OBLONG[kind]):
        rows, weight = (torch.randn(size, k, device=kind).to(getattr(torch, dtype)) for size in (m, n))
        found.append(Sample(f"matmul {dtype}", (m, n, k), clock.apart_s(lambda a=rows, b=weight: functional.linear(a, b))))  # type: ignore[misc]
    return found


def streams(clock: Clock) -> list[Sample]:
    """Operators bound by memory: a copy into memory that is there, and a sum into memory that is asked for."""
    found = []
    for nbytes in STREAMS[clock.kind]:
        x, y = (torch.randn(nbytes // 4, device=clock.kind) for _ in range(2))
        found.append(Sample("copy", (2 * nbytes,), clock.apart_s(lambda a=x, b=y: a.copy_(b))))  # type: ignore[misc]
        found.append(Sample("add", (3 * nbytes,), clock.apart_s(lambda a=x, b=y: a + b)))  # type: ignore[misc]
    return found


def arithmetic(clock: Clock) -> list[Sample]:
    """Operators that are neither matmuls nor bound by memory where arithmetic is slow; the size is FLOPs."""
    found = []
    for what, (flops, run) in ARITHMETIC.items():
        for elements in (1 << 14, 1 << 16, 1 << 18):
            x = torch.randn(elements, device=clock.kind)
            found.append(Sample(what, (flops * elements,), clock.apart_s(lambda a=x, do=run: do(a))))  # type: ignore[misc]
    return found


def launches(clock: Clock) -> list[Sample]:
    """One operator that has next to nothing to do, forward or backward, as autograd runs it; the size is its elements."""
    x = torch.randn(8, device=clock.kind, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(CHAIN):
            y = y * 1.5
        y.sum().backward()

    return [Sample("launch", (8,), clock.apart_s(chain) / (2 * CHAIN + 2))]


def updates(clock: Clock) -> list[Sample]:
    """AdamW's step on one parameter as emitted modules have them; the size is its elements."""
    mesh, found = init_device_mesh(clock.kind, (dist.get_world_size(),)), []
    for elements, count in ((1 << 10, 8), (1 << 17, 4), (1 << 20, 2)):
        parameters = [_parameter(elements, mesh) for _ in range(count)]
        optimizer = torch.optim.AdamW(parameters)
        found.append(Sample("update", (elements,), clock.apart_s(optimizer.step) / count))
    return found


def _parameter(elements: int, mesh: object) -> nn.Parameter:
    whole = torch.randn(math.isqrt(elements), math.isqrt(elements))
    made = nn.Parameter(DTensor.from_local(whole, mesh, [Replicate()]))  # type: ignore[arg-type]
    made.grad = DTensor.from_local(torch.randn_like(whole), mesh, [Replicate()])  # type: ignore[arg-type]
    return made


def attention(clock: Clock) -> list[Sample]:
    """Fused causal attention of 8 heads of 64, forward and backward; the sizes are samples and tokens."""
    found = []
    for samples, tokens in ((2, 128), (1, 256), (1, 512)) if clock.kind == "cpu" else ((8, 1024), (4, 2048), (1, 8192)):
        q, k, v = (torch.randn(samples, 8, tokens, 64, device=clock.kind, dtype=ATTENTION[clock.kind], requires_grad=True) for _ in range(3))

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        with torch.no_grad():
            found.append(Sample("attention forward", (samples, tokens), clock.apart_s(forward)))
        out = forward()
        grad = torch.randn_like(out)
        back = clock.apart_s(lambda o=out, g=grad, to=(q, k, v): torch.autograd.grad(o, to, g, retain_graph=True))  # type: ignore[misc]
        found.append(Sample("attention backward", (samples, tokens), back))
    return found


def schedules(clock: Clock) -> list[Sample]:
    """A step of torch's GPipe with next to nothing in each stage, one stage per rank; the size is its microbatches."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks < 2:
        return []
    found = []
    for count in (2 * ranks, 4 * ranks, 8 * ranks):
        meta = torch.empty(1, 8, device="meta", requires_grad=True)
        stage = pipelining.PipelineStage(nn.Linear(8, 8).to(clock.kind), rank, ranks, torch.device(clock.kind), input_args=(meta,), output_args=(meta,))
        schedule = pipelining.ScheduleGPipe(stage, count, loss_fn=lambda output, target: output.sum())
        rows = torch.randn(count, 8, device=clock.kind)
        given = (rows,) if rank == 0 else ()
        wanted = {"target": rows, "return_outputs": False} if rank == ranks - 1 else {}
        found.append(Sample("schedule", (count,), clock.together_s(lambda step=schedule.step, x=given, y=wanted: step(*x, **y))))  # type: ignore[misc]
    return found


def alone(clock: Clock) -> list[Sample]:
    """A matmul on all ranks at the same time, and on the first one while the others wait."""
    rows, weight = (torch.randn(256, 256, device=clock.kind) for _ in range(2))

    def run() -> object:
        return functional.linear(rows, weight)

    both = [(clock.apart_s(run), clock.alone_s(run)) for _ in range(3)]  # in turns: the machine may have other work for some of the time
    return [Sample(f"matmul {how}", (256, 256, 256), statistics.median(times)) for how, times in zip(("beside others", "alone"), zip(*both, strict=True), strict=True)]


JOBS: dict[str, Callable[[Clock], list[Sample]]] = {
    "memory": streams, "arithmetic": arithmetic, "attention": attention, "starting operators": launches, "optimizer": updates,
    "pipelines": schedules, "one rank alone": alone,
}
