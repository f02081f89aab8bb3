"""Stages in torch's schedules hold what comes and goes only as long as they must, and their gradients stay right."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from autopar.errors import RunError
from autopar.runtime.stages import OwnStage, Sent, left
from tests.helpers.ranks import on_ranks

PLACES, MICROBATCHES, ROWS, WIDTH = 2, 6, 3, 4
LOOP, V = (0, 1, 0, 1), (0, 1, 1, 0)
CASES = [
    ("Schedule1F1B", (0, 1)),
    ("ScheduleGPipe", (0, 1)),
    ("ScheduleInterleaved1F1B", LOOP),
    ("ScheduleLoopedBFS", LOOP),
    ("ScheduleInterleavedZeroBubble", LOOP),
    ("ScheduleZBVZeroBubble", V),
    ("ScheduleDualPipeV", V),
]


class Part(nn.Module):
    """Two values in and out; only the first of them has a gradient, though nothing says so. The last part gives the
    loss. `left`: what went to another place."""

    def __init__(self, index: int, places: tuple[int, ...], *, alone: bool = False) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear, self.last = nn.Linear(WIDTH, WIDTH).double(), index + 1 == len(places)
        self.leaves = not (self.last or alone or places[index] == places[index + 1])
        self.going: Sequence[Tensor] = ()
        self.left: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        y = self.linear(x).tanh()
        if self.last:
            return y.square().mean()
        if not self.leaves:
            return y, y * 2
        self.going = [y.detach(), (y * 2).detach()]
        self.left += map(weakref.ref, self.going)
        return left((y, y * 2))

    def summing(self) -> AbstractContextManager[None]:
        """Gradients are where they rest."""
        return nullcontext()

    def scatter(self, *, last: bool) -> None:
        """Gradients are where they rest."""


class Seen(OwnStage):
    """Counts the receive buffers that are in memory when a microbatch begins, and what the stage has made that goes to
    another place."""

    most, most_left = 0, 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        infos = [
            info for recv in (self.args_recv_info, self.grad_recv_info) for infos in recv.values() for info in infos
        ]
        part: Any = self.submod
        self.most_left = max(self.most_left, sum(there() is not None for there in part.left))
        self.most = max(
            self.most, sum(getattr(info, "buffer", None) is not None and not info.buffer.is_meta for info in infos)
        )
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


def wanted(parts: list[Part], rows: Tensor) -> None:
    for row in rows:
        x: Any = row
        for part in parts:
            x = part(*x) if isinstance(x, tuple) else part(x)
        x.backward()


def run(name: str, places: tuple[int, ...]) -> None:
    kind, rank, last = getattr(pipelining.schedules, name), dist.get_rank(), len(places) - 1
    rows = torch.randn(MICROBATCHES, ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole, mine = (
        [Part(i, places, alone=True) for i in range(last + 1)],
        {i: Part(i, places) for i in range(last + 1) if places[i] == rank},
    )
    sent = Sent() if last > 1 else None
    meta = torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta", requires_grad=True)
    loss = torch.empty((), dtype=torch.float64, device="meta", requires_grad=True)
    stages = [
        Seen(
            part,
            i,
            last + 1,
            torch.device("cpu"),
            input_args=(meta, meta) if i else (meta.detach(),),
            output_args=(meta, meta) if i < last else (loss,),
            sent=sent,
        )
        for i, part in mine.items()
    ]
    schedule = kind(stages if last > 1 else stages[0], MICROBATCHES, loss_fn=lambda x, _: x, scale_grads=False)
    for _ in range(2):  # gradients add up; buffers of the first step are gone in the second
        wanted(whole, rows)
        given = () if 0 not in mine else (rows.reshape(-1, WIDTH),)
        schedule.step(*given, target=torch.zeros(MICROBATCHES), return_outputs=False)
        if sent is not None:
            sent.finish()
        for stage in stages:
            infos = itertools.chain(*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            assert all(getattr(info, "buffer", None) is None or info.buffer.is_meta for info in infos)
            assert all(op.peer != rank for op in stage._get_init_p2p_neighbors_ops())
            assert sent is None or stage.most_left <= 2  # those of one microbatch
            assert stage.most <= (2 * MICROBATCHES if name in ("ScheduleGPipe", "ScheduleLoopedBFS") else MICROBATCHES)
    for i, part in mine.items():
        for key, value in part.named_parameters():
            assert value.grad is not None
            torch.testing.assert_close(
                value.grad, whole[i].get_parameter(key).grad, rtol=1e-12, atol=1e-12, msg=f"stage {i} {key}"
            )


@pytest.mark.parametrize(("name", "places"), CASES)
def test_buffers_are_there_while_they_are_needed(name: str, places: tuple[int, ...]) -> None:
    on_ranks(PLACES, run, name, places)


class Ends(nn.Module):
    """Runs into an error, or its backward does."""

    going: Sequence[Tensor] = ()

    def __init__(self, error: Exception, where: str) -> None:
        super().__init__()
        self.error, self.where, self.weight = error, where, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        loss = x.sum() * self.weight
        loss.register_hook(self.end)
        return loss if self.where == "backward" else self.end(loss)

    def summing(self) -> AbstractContextManager[None]:
        """Gradients are where they rest."""
        return nullcontext()

    def end(self, _: Tensor) -> Tensor:
        raise self.error from KeyError("why")


def _ends(error: Exception, where: str) -> None:
    meta, loss = torch.empty(ROWS, WIDTH, device="meta"), torch.empty((), device="meta", requires_grad=True)
    stage = OwnStage(Ends(error, where), 0, 1, torch.device("cpu"), input_args=(meta,), output_args=(loss,), sent=None)
    schedule = pipelining.ScheduleGPipe(stage, 1, loss_fn=lambda x, _: x)
    with pytest.raises(type(error), match="in row 7") as caught:
        schedule.step(torch.zeros(ROWS, WIDTH), target=torch.zeros(1))
    assert type(caught.value) is type(error) and isinstance(caught.value.__cause__, KeyError)
    assert any("ailed to run" in note and where in note for note in caught.value.__notes__)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", [RunError, IndexError, RuntimeError])
def test_what_ends_a_stage_is_raised_as_it_is(kind: type[Exception], where: str) -> None:
    """As from a module of one stage: torch raises a RuntimeError of its own."""
    on_ranks(1, _ends, kind("in row 7"), where)
