"""What one rank does in a verification: a training step (or a forward), and the comparison of all that it holds with its part of
what one device computed. Nothing is gathered, and every replica is compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar._torch import local_of
from autopar.bundle import Bundle
from autopar.layout import Layout, parse
from autopar.plan import Plan
from autopar.runtime import ShardedModule, count
from autopar.runtime.count import Counted
from autopar.runtime.cuts import own
from autopar.verify.compare import gap
from autopar.verify.reference import Results, optimizer

Gaps = dict[tuple[str, str], float]
"""(kind, name) -> largest absolute difference on one rank."""


@dataclass(frozen=True)
class Light:
    """What a rank needs of a Case: everything is plain and picklable."""

    plan: Plan
    weights: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]

    def build(self, source: str) -> ShardedModule:
        """The emitted module on this rank. Its outputs are by name, whatever the user's own structure is."""
        module = Bundle(self.plan, source, self.constants).build(self.weights)
        type(module).STRUCTURE = None
        return module


def step(source: str, light: Light, wanted: Results) -> tuple[Gaps, list[Counted]]:
    """One rank: every difference from `wanted`, and the collectives of the step."""
    module = light.build(source)
    training = light.plan.mode == "train"
    with count() as seen:
        outputs = module(*module.shard_batch(**light.batch))
        if training:
            outputs["loss"].backward()
    found = dict(_compare("output", _outputs(module, outputs), wanted, module))
    del outputs
    if wanted["buffer"]:
        found |= _compare("buffer", _state(module), wanted, module)
    if training:
        found |= _compare("gradient", _gradients(module), wanted, module)
        optimizer(module.parameters()).step()
        found |= _compare("parameter", _state(module), wanted, module)
    return found, list(seen)


Part = tuple[Tensor | None, Layout]


def _outputs(module: ShardedModule, outputs: Mapping[str, Tensor]) -> dict[str, Part]:
    cut = module.spreads()
    whole: Layout = ("R",) * len(module.MESH.sizes)
    return {name: (value.detach(), cut[i].layout if i in cut else whole) for i, (name, value) in enumerate(outputs.items())}


def _state(module: ShardedModule) -> dict[str, Part]:
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: (local_of(held[name]).detach(), info.entries) for name, info in module.declared().items()}


def _gradients(module: ShardedModule) -> dict[str, Part]:
    declared = module.declared()
    return {name: (None if p.grad is None else local_of(p.grad), parse(declared[name].layout)) for name, p in module.named_parameters()}


@torch.no_grad()
def _compare(kind: str, got: Mapping[str, Part], wanted: Results, module: ShardedModule) -> Iterator[tuple[tuple[str, str], float]]:
    """The differences of all results of one kind; infinity for one that this rank does not have."""
    mesh = module.MESH
    for name, whole in wanted[kind].items():
        local, layout = got.get(name, (None, ("R",) * len(mesh.sizes)))
        if local is None and kind == "gradient" and not whole.any():
            continue  # a parameter that the loss does not reach: no gradient here, zeros there
        yield (kind, name), gap(local, own(whole, layout, mesh.sizes, mesh.coord))


def merged(found: list[Gaps], wanted: Results) -> dict[tuple[str, str], float]:
    """The largest difference of any rank, by (kind, name), in the order of `wanted`."""
    return {(kind, name): max(gaps[kind, name] for gaps in found if (kind, name) in gaps)
            for kind in ("output", "buffer", "gradient", "parameter") for name in wanted[kind]
            if any((kind, name) in gaps for gaps in found)}


