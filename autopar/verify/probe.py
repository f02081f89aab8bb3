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
from autopar.layout import NO_GRAD, Layout, dim_of, is_partial, is_shard, local_shape, sections_of, show
from autopar.plan import Plan
from autopar.problem.pairs import LayoutPair
from autopar.runtime import PipelinedModule, ShardedModule, reshard, rng
from autopar.runtime.batch import joined
from autopar.runtime.cuts import check_shape
from autopar.runtime.replay import running_again
from autopar.runtime.scopes import Stage
from autopar.verify.compare import difference
from autopar.verify.digest import Digest, local, micro_dim, micro_entry
from autopar.verify.reference import Recorded, Results
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
    """The sums of this rank's part of a node's value by microbatch, and of its gradients: zeros until one has
    `arrived`; no entry where the plan has no gradient for it."""

    values: dict[int, Digest] = field(default_factory=dict)
    gradients: dict[int, Digest] = field(default_factory=dict)
    arrived: bool = False


class Verdict(NamedTuple):
    """Whether the value and the gradient of a node are wrong, and whether the gradient is missing on all ranks."""

    node: Node
    value: bool
    gradient: bool
    missing: bool = False


class _Probes:
    """Collects the sums of every value in forward order, and, as the backward runs, of every gradient. No collective
    operation but those for maxima of ranks: a gradient need not arrive on all of them."""

    def __init__(self, module: ShardedModule, plan: Plan) -> None:
        self.mesh, self.plan = module.MESH, plan
        self.seen: dict[Node, Seen] = {}
        self.places = dict(_places(module))
        self.calls = Counter[tuple[int, str, int]]()

    def __call__(self, owner: Any, name: str, value: Tensor, pair: str, shape: tuple[int, ...]) -> Tensor:
        if running_again():
            return value
        (stage, first), microbatch, lies = self.places[id(owner)], rng.current().microbatch, LayoutPair.of(pair)
        seen = self.seen.setdefault(Node(stage, name, first + self.calls[stage, name, microbatch]), Seen())
        self.calls[stage, name, microbatch] += 1
        seen.values[microbatch] = self._digest(name, value, lies.value, shape)
        if NO_GRAD in lies.grad:
            return value
        nothing = value.new_zeros(()).expand(local_shape(shape, lies.grad, self.mesh.sizes, self.mesh.coord))
        seen.gradients[microbatch] = self._digest(name, nothing, lies.grad, shape)
        if value.requires_grad:
            value = value.view_as(value)  # a node of its own: the hook sees the gradient of all readers together

            def note(grad: Tensor | None) -> None:
                if grad is not None:  # as behind a norm of order 0
                    seen.gradients[microbatch], seen.arrived = self._digest(name, grad, lies.grad, shape), True

            value.register_hook(note)
        return value

    def _digest(self, name: str, value: Tensor, layout: Layout, shape: tuple[int, ...]) -> Digest:
        check_shape(value, layout, shape, self.mesh.sizes, self.mesh.coord, name)
        added = tuple("R" if is_partial(entry) and entry != "P" else entry for entry in layout)
        value = reshard(value.detach(), f"{show(layout)} -> {show(added)}", grad=None, shape=shape, mesh=self.mesh)
        return local(value, added, shape, micro_dim(self.plan, name), self.mesh.sizes, self.mesh.coord)

    def whole(self, digest: Digest) -> Tensor:
        """The sums of all ranks' parts together. A collective operation."""
        lies, everywhere = show(digest.layout), show(("R",) * len(digest.layout))
        return reshard(digest.local, f"{lies} -> {everywhere}", grad=None, shape=digest.shape, mesh=self.mesh)


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


def first_difference(source: str, rank_case: RankCase, wanted: Mapping[str, list[Recorded]], tolerance: float) -> str:
    """One rank: run with probes and name the first node whose value differs, or the last whose gradient does; "" where
    none does; the same on all ranks. `wanted` has the sums of every node, one entry per instance of its block."""
    module = rank_case.build(source)
    probes = _Probes(module, rank_case.plan)
    scopes = (type(module), *_with_whole_backwards(module))
    for kind in (*scopes, *(block for scope in scopes for block, _ in scope.RUNS.values())):
        setattr(kind, "probe", lambda *args: probes(*args))  # noqa: B010 -- classes of this source only; no other has it
    with by_default(rank_case.dtype):
        _run(module, rank_case)
    found = _together([_verdict(node, wanted, probes, module, tolerance) for node in probes.seen], module)
    for node, wrong, *_ in found:
        if wrong:
            return f"{node.name} (value{_instance(node.number, wanted[node.name])})"
    runs = Counter(node[1:] for node, *_ in found)
    for node, _, wrong, missing in reversed(found):
        # a node that several stages run has a part of its gradient in each
        if (wrong or missing) and runs[node[1:]] == 1:
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
        found[verdict.node] = Verdict(
            verdict.node,
            verdict.value or before.value,
            verdict.gradient or before.gradient,
            verdict.missing and before.missing,
        )
    return sorted(found.values(), key=lambda verdict: verdict.node.stage)


def _verdict(
    node: Node, wanted: Mapping[str, list[Recorded]], probes: _Probes, module: ShardedModule, tolerance: float
) -> Verdict:
    """Compare a node with one device. A collective operation, in the same order on the ranks of a place: all run the
    same operators."""
    seen, expected = probes.seen[node], wanted[node.name][node.number]
    entry = micro_entry(probes.plan, node.name) if node.stage != OUTSIDE else "R"

    def differs(digests: Mapping[int, Digest], entry: str, reference: Tensor) -> bool:
        parts = [probes.whole(digests[k]) for k in sorted(digests)]
        return any(difference(each, reference) > tolerance for each in _joined(parts, entry, module))

    wrong = differs(seen.values, entry, expected.value)
    if expected.gradient is None or not seen.gradients:
        return Verdict(node, wrong, False)
    return Verdict(
        node,
        wrong,
        differs(seen.gradients, GRADIENT.get(entry, entry), expected.gradient),
        missing=not seen.arrived and bool(expected.gradient.any()),
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
    return [joined(values, dim, pieces)]


def _instance(number: int, items: list[Any]) -> str:
    return f", block {number}" if len(items) > 1 else ""
