"""The work of one rank in a verification: it runs a training step (or a forward) and compares all that it holds with
its part of the reference. Nothing is gathered, and every replica is compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar._torch import local_of
from autopar.bundle import Bundle
from autopar.capture.lift_dtype import by_default
from autopar.layout import Layout, parse
from autopar.plan import Plan
from autopar.runtime import PipelinedModule, ShardedModule, count
from autopar.runtime.count import Counted, uncounted
from autopar.runtime.cuts import own
from autopar.runtime.outputs import Spread
from autopar.verify.compare import gap
from autopar.verify.reference import Results, optimizer
from autopar.verify.second_step import SECOND

Gaps = dict[tuple[str, str], float]
"""(kind, name) -> largest absolute difference on one rank."""
GRADIENTS = ("gradient", "accumulated")
"""Kinds of results that may be missing where they are zero."""


@dataclass(frozen=True)
class RankCase:
    """The part of a Case that a rank needs, picklable. `gathers`: whether the plan gathers weights at their use;
    `second`: the batch of the second step; `dtype`: that of floats that are computed of integers."""

    plan: Plan
    weights: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]
    gathers: bool = False
    second: Mapping[str, Tensor] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def build(self, source: str) -> ShardedModule:
        """The emitted module on this rank. Its outputs are by name, whatever the user's own structure is."""
        module = Bundle(self.plan, source, self.constants).build(self.weights)
        type(module).STRUCTURE = None
        return module


def step(source: str, rank_case: RankCase, wanted: Results) -> tuple[Gaps, list[Counted]]:
    """On one rank: run the step, and give every difference from `wanted` and the collectives that ran. Where weights
    are gathered at their use, the step runs twice from the same state: both runs are compared, and the collectives of
    the second are counted, since gathers are prefetched only from then on (`runtime.prefetch`)."""
    with by_default(rank_case.dtype):
        return _step(source, rank_case, wanted)


def _step(source: str, rank_case: RankCase, wanted: Results) -> tuple[Gaps, list[Counted]]:
    module = rank_case.build(source)
    training = rank_case.plan.mode == "train"
    batch = module.shard_batch(**rank_case.batch)
    found: Gaps = {}
    for again in range(2 if rank_case.gathers else 1):
        with _as_it_was(module) if rank_case.gathers and not again else nullcontext(), count() as seen:
            now: Gaps = {}
            for outputs in _run(module, batch, training=training):
                now |= {
                    key: max(gap, now.get(key, 0.0))
                    for key, gap in _compare("output", _outputs(module, outputs, wanted["output"]), wanted, module)
                }
                del outputs
            if wanted["buffer"]:
                now |= _compare("buffer", _state(module), wanted, module)
            if training:
                now |= gradient_gaps(module, wanted)
        found |= {key: max(gap, found.get(key, 0.0)) for key, gap in now.items()}
    # a place may have stages without any
    steps = optimizer(held) if training and (held := list(module.parameters())) else None
    found |= _updated(module, steps, "parameter", wanted) if training else {}
    if "second output" in wanted:
        found |= _second(module, rank_case, steps, wanted)
    return found, list(seen)


def gradient_gaps(module: ShardedModule, wanted: Results) -> Gaps:
    """The differences of this rank's gradients from its parts of those of the reference."""
    return dict(_compare("gradient", _gradients(module), wanted, module))


def _updated(module: ShardedModule, steps: torch.optim.Optimizer | None, kind: str, wanted: Results) -> Gaps:
    """Step the optimizer, then give the differences of the parameters from the results of `kind`."""
    if steps is not None:
        steps.step()
    return dict(_compare(kind, _state(module), wanted, module))


def _second(module: ShardedModule, rank_case: RankCase, steps: torch.optim.Optimizer | None, wanted: Results) -> Gaps:
    """Run the second step and the evaluation (`second_step`), and give the differences. Before each pass the parameters
    are set to those of the reference: an optimizer step amplifies the rounding of gradients, and a second one would
    amplify it again."""
    training = rank_case.plan.mode == "train"
    _reset(module, wanted["parameter"])
    batch = module.shard_batch(**rank_case.second)
    *_, outputs = _run(module, batch, training=training)
    found = dict(_compare("second output", _outputs(module, outputs, wanted["second output"]), wanted, module))
    del outputs
    if training:
        found |= _compare("accumulated", _gradients(module), wanted, module)
        found |= _updated(module, steps, "second parameter", wanted)
    if "evaluated" in wanted:
        _reset(module, wanted["second parameter"])
        module.eval()
        with torch.no_grad():
            outputs = module(*module.shard_batch(**rank_case.batch))
        found |= _compare("evaluated", _outputs(module, outputs, wanted["evaluated"]), wanted, module)
    return found | dict(_compare("second buffer", _state(module), wanted, module))


@torch.no_grad()
def _reset(module: ShardedModule, parameters: Mapping[str, Tensor]) -> None:
    """Set this rank's part of each parameter to its part of a whole one."""
    for name, (local, layout) in _state(module).items():
        if local is not None and name in parameters:
            local.copy_(own(parameters[name], layout, module.MESH.sizes, module.MESH.coord))


@contextmanager
def _as_it_was(module: ShardedModule) -> Iterator[None]:
    """A context after which buffers, random state and gradients are as before."""
    before, draws = {name: local_of(buffer).clone() for name, buffer in module.named_buffers()}, module.rng.copy()
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    yield
    for name, buffer in module.named_buffers():
        local_of(buffer).copy_(before[name])
    module.rng = draws
    for parameter, gradient in gradients:
        parameter.grad = gradient


def _run(module: ShardedModule, batch: Sequence[Tensor], *, training: bool) -> Iterator[dict[str, Tensor]]:
    """The outputs of a forward, and in training of a backward after it. A pipeline's forward has no gradient: there the
    outputs come from a separate forward, which is not counted and whose changes of state are undone, and then again
    with the loss of the training step."""
    if training and isinstance(module, PipelinedModule):
        with uncounted(), _as_it_was(module):
            outputs: dict[str, Tensor] = module(*batch)
        yield outputs
        yield {**outputs, "loss": module.train_step(*batch)}
        return
    outputs = module(*batch)
    if training:
        outputs["loss"].backward()
    yield outputs


Part = tuple[Tensor | None, Layout]


def _outputs(module: ShardedModule, outputs: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Part]:
    """This rank's part of each output; None where the program says that the whole one, which `full` makes of the parts,
    has another shape than `wanted`."""
    cut = module.spreads()
    whole = Spread(("R",) * len(module.MESH.sizes), ())
    lies = {name: cut.get(i, whole) for i, name in enumerate(outputs)}
    wrong = [
        name
        for name, spread in lies.items()
        if spread is not whole and name in wanted and spread.shape != wanted[name].shape
    ]
    return {name: (None if name in wrong else value.detach(), lies[name].layout) for name, value in outputs.items()}


def _state(module: ShardedModule) -> dict[str, Part]:
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: (local_of(held[name]).detach(), info.entries) for name, info in module.declared().items()}


def _gradients(module: ShardedModule) -> dict[str, Part]:
    declared = module.declared()
    return {
        name: (None if p.grad is None else local_of(p.grad), parse(declared[name].layout))
        for name, p in module.named_parameters()
    }


@torch.no_grad()
def _compare(
    kind: str, got: Mapping[str, Part], wanted: Results, module: ShardedModule
) -> Iterator[tuple[tuple[str, str], float]]:
    """The differences of all results of one kind that are this rank's."""
    mesh = module.MESH
    for name, whole in wanted[kind].items():
        if name not in got:
            continue
        local, layout = got[name]
        if local is None and kind in GRADIENTS and not whole.any():
            continue  # a parameter that the loss does not reach: no gradient here, zeros there
        yield (kind, name), gap(local, own(whole, layout, mesh.sizes, mesh.coord))


def merged(found: list[Gaps], wanted: Results, *, everywhere: bool) -> dict[tuple[str, str], float]:
    """The largest difference of any rank, by (kind, name), in the order of `wanted`. Infinity for what no rank has, or
    where every rank should have it `everywhere` (no pipeline), not all; but gradients that are zero may be missing."""
    merged: dict[tuple[str, str], float] = {}
    for kind in ("output", "buffer", "gradient", "parameter", *SECOND):
        for name, whole in wanted.get(kind, {}).items():
            gaps = [gap[kind, name] for gap in found if (kind, name) in gap]
            if not gaps and kind in GRADIENTS and not whole.any():
                continue
            complete = len(gaps) == len(found) if everywhere and kind not in GRADIENTS else bool(gaps)
            merged[kind, name] = max(gaps) if complete else math.inf
    return merged
