"""Running the stages of a pipeline: training by a schedule of torch.distributed.pipelining, evaluation forward only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from autopar._torch import is_view, waits_late
from autopar.errors import RunError
from autopar.runtime import regather, rng
from autopar.runtime.gradsync import GradSync
from autopar.runtime.outputs import Spread
from autopar.runtime.stages import OwnStage, Sent, count_sends, left

if TYPE_CHECKING:
    from autopar.runtime.pipeline import PipelinedModule
    from autopar.runtime.scopes import Stage

Micro = Sequence[Mapping[str, Any]]  # inputs and totals of each microbatch, by name


def run_stage(
    model: PipelinedModule,
    stage: Stage,
    received: Sequence[Tensor],
    micro: Micro,
    number: int,
    sizes: Mapping[str, int],
) -> tuple[tuple[Tensor, ...], dict[int, Tensor]]:
    """Run microbatch `number` of `micro` through one stage. Gives what it sends, and its results by number; new values
    of buffers are kept for the end of the step."""
    stage.spreads.clear()
    given = micro[number]
    with rng.using(model.rng.of(number)):
        sends, made = stage(*received, *(given[n] for n in stage.INPUTS), *(given[n] for n in stage.TOTALS), **sizes)
    results = dict(zip(stage.RESULTS, made, strict=True))
    return sends, model.mutate(stage, results)


class _Arrive(torch.autograd.Function):
    """Identity, whose gradient is made contiguous: it is sent back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


class Runner(nn.Module):
    """A stage as the module that torch's schedules expect: activations in, activations or the loss out, and the leaves
    as its parameters."""

    def __init__(self, engine: Engine, stage: Stage) -> None:
        super().__init__()
        self._engine, self._stage = [engine], [stage]  # in lists: no submodules
        self.going: Sequence[Tensor] = ()  # what is to go to another place

    def forward(self, *received: Tensor, microbatch: Tensor) -> Any:
        """Run one microbatch."""
        engine, stage = self._engine[0], self._stage[0]
        with ExitStack() as stack:
            stack.enter_context(regather.regathering(self._sync))
            arrived = [_Arrive.apply(x) if x.requires_grad else x for x in received]
            sends, results = engine.run(stage, arrived, engine.micro, int(microbatch), engine.sizes)
        if stage.index == engine.last:
            return _sendable(results[engine.loss], True)
        following = engine.following[stage.index]
        made = tuple(_sendable(tensor, grad) for tensor, (_, _, grad) in zip(sends, following, strict=True))
        if stage.index not in engine.leaving:
            return made
        self.going = [tensor.detach() for tensor in made]
        return left(made)

    @property
    def _sync(self) -> GradSync:
        return self._engine[0].syncs[self._stage[0].index]

    def summing(self) -> AbstractContextManager[None]:
        """A context for the last backward: gradients are summed over ranks as they arrive, while other stages go on."""
        return self._sync.summing(finish=False)

    def scatter(self, *, last: bool) -> None:
        """Reduce the gradients that are reduced after every microbatch, or begin to reduce all after the `last` one: in
        a split backward no hook of a leaf is called."""
        if last:
            self._sync.begin()
        else:
            self._sync.flush(each=True)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """The leaves that autograd sees."""
        return (held.leaf for held in self._stage[0].held.values() if held.leaf.requires_grad)


class Engine:
    """One schedule for one set of sizes. Raises RunError where the schedule cannot run that number of microbatches."""

    def __init__(self, model: PipelinedModule, stages: Sequence[Stage], sizes: Mapping[str, int], loss: int) -> None:
        self.sizes, self.loss, self.last = dict(sizes), loss, len(model.STAGES) - 1
        self.run = partial(run_stage, model)
        self.micro: Micro = ()
        self.scale: Tensor | None = None
        self.losses: list[Tensor] = []
        self.syncs: dict[int, GradSync] = {}
        self.stages = list(stages)
        # stage -> what comes in at the next one
        self.following: dict[int, Sequence[tuple[Sequence[int], str, bool]]] = {}
        self.count, places = model.PIPELINE.microbatches, model.PIPELINE.places
        self.leaving = [i for i, (here, there) in enumerate(itertools.pairwise(places)) if here != there]
        self.splitting = model.PIPELINE.splits
        self.schedule: Any = None
        self.sent: Sent | None = None
        if model.MESH.places > 1:
            kind: Any = getattr(pipelining.schedules, model.PIPELINE.torch_name)
            self.sent = Sent() if waits_late(kind) else None
            wrapped = [self._wrap(model, stage) for stage in stages]
            single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
            try:
                self.schedule = kind(
                    wrapped[0] if single else wrapped, self.count, loss_fn=self._seen, scale_grads=False
                )
            except ValueError as error:
                raise RunError(
                    f"{model.PIPELINE.torch_name} cannot run {self.count} microbatches in {len(model.STAGES)} stages: "
                    f"{error}"
                ) from error

    def _wrap(self, model: PipelinedModule, stage: Stage) -> OwnStage:
        """The stage as torch's schedules take it."""
        following = (
            model.STAGES[stage.index + 1].receives(**self.sizes) if stage.index < self.last else [((), "float32", True)]
        )
        self.following[stage.index] = following
        return OwnStage(
            Runner(self, stage),
            stage.index,
            len(model.STAGES),
            model.MESH.device,
            group=model.MESH.pipeline_group,
            input_args=_metas(type(stage).receives(**self.sizes)),
            output_args=_metas(following),
            sent=self.sent,
            # the whole backward at once, nothing left for later
            dw_builder=None if stage.SEPARABLE else lambda: lambda: None,
        )

    def step(self, micro: Micro, syncs: Sequence[GradSync], scale: Tensor | None = None) -> list[Tensor]:
        """All microbatches forward and backward, gradients times `scale`; their losses on the place of the last
        stage."""
        self.micro, self.scale, self.losses = micro, scale, []
        self.syncs = {stage.index: sync for stage, sync in zip(self.stages, syncs, strict=True)}
        for stage, sync in zip(self.stages, syncs, strict=True):
            sync.scattering = not (self.splitting and stage.SEPARABLE)
        if self.schedule is None:
            for number in range(self.count - 1):
                self._alone(number)
            with ExitStack() as stack:
                for sync in syncs:
                    stack.enter_context(sync.summing())
                self._alone(self.count - 1)
        else:
            numbers = torch.arange(self.count, device="cpu")  # for the host
            self.schedule.step(microbatch=numbers, target=numbers, return_outputs=False)
            if self.sent is not None:
                self.sent.finish()
        self.micro = ()
        return self.losses

    def _seen(self, loss: Tensor, target: Any = None) -> Tensor:
        """The loss function of torch's schedule: records the loss of a microbatch and gives the scaled one. `target` is
        not used."""
        self.losses.append(loss.detach())
        return loss if self.scale is None else loss * self.scale.to(loss.dtype)

    def _alone(self, number: int) -> None:
        """One microbatch through all stages of a model that is on one place."""
        received: tuple[Tensor, ...] = ()
        loss = torch.empty(0, device="cpu")
        with regather.regathering(self.syncs[0]):
            for stage in self.stages:
                received, results = self.run(stage, received, self.micro, number, self.sizes)
                loss = results.get(self.loss, loss)
        self._seen(loss).backward()


def run_forward(
    model: PipelinedModule, stages: Sequence[Stage], sizes: Mapping[str, int], micro: Micro
) -> dict[int, list[tuple[Tensor, Spread | None]]]:
    """All microbatches through this rank's stages, forward only: result number -> per microbatch (value, how it
    lies)."""
    found: dict[int, list[tuple[Tensor, Spread | None]]] = {}
    places, here = model.PIPELINE.places, model.MESH.place
    local: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    sent: list[Any] = []
    for stage in stages:
        for number in range(len(micro)):
            if stage.index and places[stage.index - 1] != here:
                received = _receive(model, stage, sizes)
            else:
                received = local.pop((stage.index, number), ())
            with regather.regathering(model._syncs[stages.index(stage)]):
                sends, results = run_stage(model, stage, received, micro, number, sizes)
            spreads = iter(stage.spreads)
            for index, value in results.items():
                lies = next(spreads) if model.OUTPUTS[index][0] == "output" else None
                found.setdefault(index, []).append((value, lies))
            if stage.index + 1 < len(places) and places[stage.index + 1] == here:
                local[stage.index + 1, number] = sends
            else:
                count_sends(sends)
                for tensor in sends:
                    sent.append(
                        dist.isend(
                            tensor.contiguous(), group=model.MESH.pipeline_group, group_dst=places[stage.index + 1]
                        )
                    )
    for work in sent:
        work.wait()
    return found


def _receive(model: PipelinedModule, stage: Stage, sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
    received = []
    for meta in _metas(type(stage).receives(**sizes)):
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=model.MESH.device)
        dist.recv(tensor, group=model.MESH.pipeline_group, group_src=model.PIPELINE.places[stage.index - 1])
        received.append(tensor)
    return tuple(received)


def _metas(values: Sequence[tuple[Sequence[int], str, bool]]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta", requires_grad=grad)
        for shape, dtype, grad in values
    )


def _sendable(tensor: Tensor, grad: bool) -> Tensor:
    """`tensor` as it can be sent: contiguous, detached where no gradient comes back, and no view, since schedules with
    split backwards detach sent tensors in place."""
    tensor = tensor.contiguous() if grad else tensor.detach().contiguous()
    return tensor.clone() if is_view(tensor) else tensor
