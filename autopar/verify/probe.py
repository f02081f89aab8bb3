"""The first wrong node, found on ranks from an emitted file with probes.

In a pipeline a place has the nodes of its own stages, microbatch by microbatch: the parts of a value are joined, and
the verdicts of all places are gathered. Backwards are not split there (zero bubble), so that gradients pass every node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.capture.lift_dtype import by_default
from autopar.layout import NO_GRAD, Layout, dim_of, is_shard, sections_of, show
from autopar.plan import Plan
from autopar.problem.pairs import LayoutPair
from autopar.runtime import PipelinedModule, ShardedModule, reshard, rng
from autopar.runtime.replay import running_again
from autopar.runtime.scopes import Stage
from autopar.verify.compare import difference
from autopar.verify.reference import Results
from autopar.verify.step import Gaps, RankCase, gradient_gaps

OUTSIDE = -1
"""The stage number of nodes outside of stages: all of a model without stages, and totals over all microbatches."""


class Node(NamedTuple):
    """A node as the ranks run it: `number` is that of its block in the run of blocks, in the order in which they run, 0
    outside of blocks."""

    stage: int
    name: str
    number: int


@dataclass
class Seen:
    """The whole value of a node by microbatch, and its gradients: None where none has arrived; no entry where the plan
    has no gradient for it."""

    values: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor | None] = field(default_factory=dict)


class Verdict(NamedTuple):
    """Whether the value and the gradient of a node are wrong."""

    node: Node
    value: bool
    gradient: bool


class _Probes:
    """Collects every value, whole, in forward order, and, once the backward ran, every gradient."""

    def __init__(self, module: ShardedModule) -> None:
        self.mesh: Any = module.MESH
        self.seen: dict[Node, Seen] = {}
        self.places = dict(_places(module))
        self.calls = Counter[tuple[int, str, int]]()

    def __call__(self, owner: Any, name: str, value: Tensor, pair: str, shape: tuple[int, ...]) -> Tensor:
        if running_again():
            return value
        (stage, first), microbatch, lies = self.places[id(owner)], rng.current().microbatch, LayoutPair.of(pair)
        seen = self.seen.setdefault(Node(stage, name, first + self.calls[stage, name, microbatch]), Seen())
        self.calls[stage, name, microbatch] += 1
        seen.values[microbatch] = self._whole(value.detach(), lies.value, shape)
        if NO_GRAD in lies.grad:
            return value
        seen.gradients[microbatch] = None
        if value.requires_grad:
            value = value.view_as(value)  # a node of its own: the hook sees the gradient of all readers together

            def note(grad: Tensor | None) -> None:
                if grad is not None:  # as behind a norm of order 0
                    seen.gradients[microbatch] = self._whole(grad.detach(), lies.grad, shape)

            value.register_hook(note)
        return value

    def _whole(self, value: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
        whole = show(("R",) * len(layout))
        return reshard(value, f"{show(layout)} -> {whole}", grad=None, shape=shape, mesh=self.mesh).clone()


def _places(module: ShardedModule) -> Iterator[tuple[int, tuple[int, int]]]:
    """(id of the object that calls a probe, (its stage, number in the model of the first block of its run in that
    stage; 0 outside of blocks))."""
    yield id(module), (OUTSIDE, 0)
    stages = module.stages if isinstance(module, PipelinedModule) else []
    for stage in stages:
        yield id(stage), (stage.index, 0)
    for index, scope in [(OUTSIDE, module), *((stage.index, stage) for stage in stages)]:
        for run, blocks in scope.runs.items():
            first = (
                sum(len(kind.RUNS[run][1]) for kind in module.STAGES[:index] if run in kind.RUNS)
                if isinstance(module, PipelinedModule) and index != OUTSIDE
                else 0
            )
            yield from ((id(block), (index, first)) for block in blocks)


def first_difference(source: str, rank_case: RankCase, wanted: Mapping[str, list[Any]], tolerance: float) -> str:
    """One rank: run with probes and name the first node whose value differs, or the last whose gradient does; "" where
    none does; the same on all ranks. `wanted` has the value and the gradient of every node, one pair per instance of
    its block."""
    module = rank_case.build(source)
    probes = _Probes(module)
    scopes = (type(module), *_with_whole_backwards(module))
    for kind in (*scopes, *(block for scope in scopes for block, _ in scope.RUNS.values())):
        setattr(kind, "probe", lambda *args: probes(*args))  # noqa: B010 -- classes of this source only; no other has it
    with by_default(rank_case.dtype):
        _run(module, rank_case)
    found = _together(
        [_verdict(node, seen, wanted, rank_case.plan, module, tolerance) for node, seen in probes.seen.items()], module
    )
    for node, wrong, _ in found:
        if wrong:
            return f"{node.name} (value{_instance(node.number, wanted[node.name])})"
    runs = Counter(node[1:] for node, *_ in found)
    for node, _, wrong in reversed(found):
        if wrong and runs[node[1:]] == 1:  # a node that several stages run has a part of its gradient in each
            return f"{node.name} (gradient{_instance(node.number, wanted[node.name])})"
    return ""


def unsplit(source: str, rank_case: RankCase, wanted: Results) -> Gaps:
    """One rank: the differences of the gradients of a training step in which each backward of a stage runs as a whole,
    whatever the schedule is."""
    module = rank_case.build(source)
    _with_whole_backwards(module)
    _run(module, rank_case)
    return gradient_gaps(module, wanted)


def _with_whole_backwards(module: ShardedModule) -> Sequence[type[Stage]]:
    """The stages of a pipeline, after their backwards were set to run as a whole. These classes are of one source, and
    no other module has them."""
    stages = module.STAGES if isinstance(module, PipelinedModule) else ()
    for stage in stages:
        stage.SEPARABLE = False
    return stages


def _run(module: ShardedModule, rank_case: RankCase) -> None:
    """Run a training step, or a forward of a plan for inference."""
    batch = module.shard_batch(**rank_case.batch)
    if rank_case.plan.mode != "train":
        module(*batch)
    elif isinstance(module, PipelinedModule):
        module.train_step(*batch)
    else:
        module(*batch)["loss"].backward()


def _together(mine: list[Verdict], module: ShardedModule) -> list[Verdict]:
    """The verdicts of all ranks, in forward order; a node is wrong where it is wrong on any rank. A collective
    operation."""
    everyone: list[Any] = [mine]
    if module.MESH.ranks > 1:
        everyone = [None] * module.MESH.ranks
        dist.all_gather_object(everyone, mine)
    found: dict[Node, Verdict] = {}
    for verdict in (verdict for each in everyone for verdict in each):
        before = found.get(verdict.node, verdict)
        found[verdict.node] = Verdict(verdict.node, verdict.value or before.value, verdict.gradient or before.gradient)
    return sorted(found.values(), key=lambda verdict: verdict.node.stage)


def _verdict(
    node: Node, seen: Seen, wanted: Mapping[str, list[Any]], plan: Plan, module: ShardedModule, tolerance: float
) -> Verdict:
    """Compare a node with one device."""
    value, grad = wanted[node.name][node.number]
    name, _, index = node.name.partition(":")
    shared = plan.nodes[name].micro if node.stage != OUTSIDE else ()
    entry = shared[int(index or 0)] if shared else "R"
    wrong = any(
        difference(each, value) > tolerance
        for each in _joined([seen.values[k] for k in sorted(seen.values)], entry, module)
    )
    if grad is None or not seen.gradients:
        return Verdict(node, wrong, False)
    if not any(each is not None for each in seen.gradients.values()):
        return Verdict(node, wrong, bool(grad.any()))
    gradients = [
        torch.zeros_like(seen.values[k]) if each is None else each for k, each in sorted(seen.gradients.items())
    ]
    return Verdict(
        node,
        wrong,
        any(difference(each, grad) > tolerance for each in _joined(gradients, GRADIENT.get(entry, entry), module)),
    )


GRADIENT = {"P": "R", "R": "P"}
"""How microbatches share the gradient of a value that they share so, where it differs: each has the whole gradient of a
partial sum, and a partial gradient of a common value."""


def _joined(values: Sequence[Tensor], entry: str, module: ShardedModule) -> Sequence[Tensor]:
    """The values of all microbatches joined, as `entry` says they share them. Of a common value all are given, each to
    be compared; of a value cut in sections none."""
    if len(values) == 1 or not isinstance(module, PipelinedModule):
        return values
    if not is_shard(entry):
        return [torch.stack(list(values)).sum(0)] if entry == "P" else values
    dim, pieces = dim_of(entry), module._pieces()
    if len(sections_of(entry)) > 1:
        return []
    return [torch.stack([value.unflatten(dim, (pieces, -1)) for value in values], dim + 1).flatten(dim, dim + 2)]


def _instance(number: int, items: list[Any]) -> str:
    return f", block {number}" if len(items) > 1 else ""
