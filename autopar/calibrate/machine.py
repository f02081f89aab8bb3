"""What one rank does on its own: matmuls, memory, other arithmetic, starting operators, the optimizer's step. Runs on
ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

from autopar.calibrate.clock import Clock
from autopar.calibrate.cold_operands import Cold
from autopar.calibrate.samples import Sample
from autopar.runtime.optimizer_state import optimizer_of

# rows, columns and depth of square matmuls
SQUARES = {"cpu": (32, 64, 128, 256, 512), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
OBLONG = {
    "cpu": (
        (512, 2048, 256),
        (512, 256, 2048),
        (64, 1024, 1024),
        (1024, 64, 256),
        (2048, 384, 128),
        (16, 1024, 1024),
        (96, 1536, 512),
        (384, 768, 768),
        (128, 768, 3072),
    ),
    "cuda": ((8192, 1024, 4096), (2048, 8192, 1024), (1024, 1024, 8192), (16384, 4096, 1024), (4096, 16384, 4096)),
}
"""Rows, columns and depth: as layers of transformers have them, cut into few and into many parts."""

STREAMS = {
    "cpu": tuple(1 << power for power in range(14, 26, 2)),
    "cuda": tuple(1 << power for power in range(20, 31, 2)),
}
"""Bytes of one tensor."""

ATTENTION_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""The dtype in which fused attention is measured."""

LAYERS, WIDTH, CHAIN = 4, 16, 20
"""Of the models in which operators have next to nothing to do: layers, or single operators."""

OPERATORS = 7
"""Those of a layer as a program has them (`_layer`)."""

UPDATES = {"cpu": ((1 << 10, 64), (1 << 17, 32), (1 << 20, 8)), "cuda": ((1 << 10, 64), (1 << 22, 16), (1 << 26, 2))}
"""Elements of a parameter, and how many of them: those of a model are no longer in the caches when they come again."""

PAIRS = 9
"""So often a matmul is measured beside others and alone."""

# what -> FLOPs of one element as passes.annotate_flops counts them, and the operator
ARITHMETIC: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "gelu": (8, functional.gelu),
    "softmax": (5, lambda x: functional.softmax(x.view(-1, 128), -1)),
    "tanh": (35, torch.tanh),
    "layer_norm": (8, lambda x: functional.layer_norm(x.view(-1, 128), (128,))),
}


def matmuls(clock: Clock, dtype: str) -> list[Sample]:
    """`linear` without a bias, at several sizes; nothing where the device cannot do it in `dtype`."""
    kind, found = clock.kind, []
    cold = Cold(kind, getattr(torch, dtype))
    for m, n, k in (*((size, size, size) for size in SQUARES[kind]), *OBLONG[kind]):
        seconds = clock.apart_s(lambda m=m, n=n, k=k: cold.keep(functional.linear(cold.next(m, k), cold.next(n, k))))  # type: ignore[misc]
        found.append(Sample(f"matmul {dtype}", (m, n, k), seconds))
    return found


def streams(clock: Clock) -> list[Sample]:
    """Operators bound by memory: a copy into memory that is there, and a sum into memory that is asked for; of what was
    made just before, as in a step."""
    cold, found = Cold(clock.kind), []
    for nbytes in STREAMS[clock.kind]:
        last = [cold.next(nbytes // 4)]

        def copy(last: list[Tensor] = last, elements: int = nbytes // 4) -> None:
            last[0] = cold.next(elements).copy_(last[0])

        def add(last: list[Tensor] = last, elements: int = nbytes // 4) -> None:
            last[0] = cold.keep(last[0] + cold.next(elements))

        found += [Sample("copy", (2 * nbytes,), clock.apart_s(copy)), Sample("add", (3 * nbytes,), clock.apart_s(add))]
    return found


def arithmetic(clock: Clock) -> list[Sample]:
    """Operators that are neither matmuls nor bound by memory where arithmetic is slow; the size is FLOPs."""
    cold, found = Cold(clock.kind), []
    for what, (flops, run) in ARITHMETIC.items():
        for elements in (1 << 14, 1 << 16, 1 << 18):
            seconds = clock.apart_s(lambda n=elements, do=run: cold.keep(do(cold.next(n))))  # type: ignore[misc]
            found.append(Sample(what, (flops * elements,), seconds))
    return found


def launches(clock: Clock) -> list[Sample]:
    """One operator that has next to nothing to do, forward or backward, as autograd runs it; the size is its elements.
    On a CPU, whose rank is the host as well, the mean over those of the layers of a model, whose weights get gradients;
    on a GPU, which does them sooner than its host asks for them, the simplest."""
    step, operators = _layers() if clock.kind == "cpu" else _chain(clock.kind)
    return [Sample("launch", (WIDTH,), clock.apart_s(step) / operators)]


def _chain(kind: str) -> tuple[Callable[[], object], int]:
    x = torch.randn(WIDTH, device=kind, requires_grad=True)

    def step() -> None:
        y = x
        for _ in range(CHAIN):
            y = y * 1.5
        y.sum().backward()

    return step, 2 * CHAIN + 2


def _layers() -> tuple[Callable[[], object], int]:
    x = torch.randn(WIDTH)
    layers = [
        [
            torch.randn(shape, requires_grad=True)
            for shape in ((WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH, WIDTH), (WIDTH,))
        ]
        for _ in range(LAYERS)
    ]

    def step() -> None:
        y = x
        for layer in layers:
            y = _layer(y, *layer)
        y.sum().backward()
        for weight in (each for layer in layers for each in layer):
            weight.grad = None

    return step, 2 * OPERATORS * LAYERS + 2


def _layer(x: Tensor, scale: Tensor, up: Tensor, more: Tensor, down: Tensor, rest: Tensor) -> Tensor:
    inner = functional.gelu(functional.linear(functional.layer_norm(x, (WIDTH,), scale), up) + more)
    return x + (functional.linear(inner, down) + rest)


def updates(clock: Clock) -> list[Sample]:
    """AdamW's step on one parameter as emitted modules have them; the size is its elements."""
    mesh, found = init_device_mesh(clock.kind, (dist.get_world_size(),)), []
    for elements, count in UPDATES[clock.kind]:
        parameters = [_parameter(elements, mesh) for _ in range(count)]
        optimizer = optimizer_of("adamw", parameters, 1e-3)
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
        q, k, v = (
            torch.randn(
                samples, 8, tokens, 64, device=clock.kind, dtype=ATTENTION_DTYPE[clock.kind], requires_grad=True
            )
            for _ in range(3)
        )

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
        stage = pipelining.PipelineStage(
            nn.Linear(8, 8).to(clock.kind),
            rank,
            ranks,
            torch.device(clock.kind),
            input_args=(meta,),
            output_args=(meta,),
        )
        schedule = pipelining.ScheduleGPipe(stage, count, loss_fn=lambda output, target: output.sum())
        rows = torch.randn(count, 8, device=clock.kind)
        given = (rows,) if rank == 0 else ()
        wanted = {"target": rows, "return_outputs": False} if rank == ranks - 1 else {}
        found.append(
            Sample("schedule", (count,), clock.together_s(lambda step=schedule.step, x=given, y=wanted: step(*x, **y)))  # type: ignore[misc]
        )
    return found


def alone(clock: Clock) -> list[Sample]:
    """A matmul on all ranks at the same time, and on the first one while the others wait."""
    rows, weight = (torch.randn(256, 256, device=clock.kind) for _ in range(2))

    def run() -> object:
        return functional.linear(rows, weight)

    brief = replace(clock, repeats=1)
    # in turns: the machine may have other work for some of the time
    both = [(brief.apart_s(run), brief.alone_s(run)) for _ in range(PAIRS)]
    return [
        Sample(f"matmul {how}", (256, 256, 256), statistics.median(times))
        for how, times in zip(("beside others", "alone"), zip(*both, strict=True), strict=True)
    ]


JOBS: dict[str, Callable[[Clock], list[Sample]]] = {
    "memory": streams,
    "arithmetic": arithmetic,
    "attention": attention,
    "starting operators": launches,
    "optimizer": updates,
    "pipelines": schedules,
    "one rank alone": alone,
}
