"""What all writers of one emitted file share: the program, the plan, its reshards, names of classes, prices for
comments. Made by codegen.module for each file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autopar.cluster import Cluster, Mesh
from autopar.codegen import sizes as size_text
from autopar.codegen.edges import Edges, Reshard, edges, in_pair, options, out_pair
from autopar.codegen.expressions import EXPRESSIONS, qualified, tuple_text
from autopar.cost.comm import collective_s, steps_s
from autopar.layout import Step, dim_of, fraction, is_shard, shard, ways_of
from autopar.plan import Plan
from autopar.problem.graph import Op, Program, Ref
from autopar.problem.op_algorithms import sites
from autopar.rules.site import InnerCollective, Site
from autopar.rules.tiles import tiled
from autopar.text import megabytes, seconds
from passes.grads import NO_GRADIENT

_VERBS = {  # kind of a step -> its name in comments
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "slice": "slice",
    "mask": "mask",
}


@dataclass(eq=False)
class Context:
    """Shared by the writers of one emitted file."""

    program: Program
    plan: Plan
    classes: dict[str, str]  # scope -> class name
    probes: bool = False
    fleeting: tuple[str, ...] = ()  # buffers that the state dict does not hold
    order: tuple[str, ...] = ()  # the names of the state dict
    functions: dict[str, str] = field(default_factory=dict)  # plain function -> module it is imported from
    algorithms: dict[str, None] = field(default_factory=dict)  # runtime algorithms that the file imports
    marks: dict[str, None] = field(default_factory=dict)  # keep, skip and enough, as far as the file uses them
    # (size, axes that must divide it, parts of the whole batch that must) -> why
    even: dict[tuple[str, tuple[int, ...], int], str] = field(default_factory=dict)

    @cached_property
    def edges(self) -> Edges:
        """The reshards of the plan."""
        return edges(self.program, self.plan)

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """The mesh of a place: one for each part of the cluster that places lie in."""
        places = Cluster.from_dict(dict(self.plan.cluster)).places(self.plan.places, self.plan.mesh)
        return tuple(places.mesh(place) for place in places.kinds)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each mesh axis."""
        return self.plan.mesh

    @cached_property
    def batch_axes(self) -> tuple[int, ...]:
        """The axes that cut the batch of the inputs, and so divide it."""
        inputs = [(op.name, op.samples) for op in self.program.ops.values() if op.samples is not None]
        cut = [(out_pair(self.plan, (name, 0)).value, shard(samples)) for name, samples in inputs]
        return tuple(a for a in range(len(self.sizes)) if cut and all(layout[a] == entry for layout, entry in cut))

    @cached_property
    def parts(self) -> int:
        """Into how many parts the batch falls: microbatches take one of each piece, and the pieces are those of the
        input that is cut over most ranks (`runtime.pipeline`)."""
        inputs = [(op.name, 0) for op in self.program.ops.values() if op.role == "input"]
        ways = [
            ways_of(out_pair(self.plan, ref).value, dim_of(entry), self.sizes)
            for ref in inputs
            if is_shard(entry := self.micro(ref))
        ]
        return self.plan.microbatches * math.lcm(*ways)

    def micro(self, ref: Ref) -> str:
        """How the microbatches share a value: cut along a dim (`S0`), each a part of a sum (`P`), or all the same
        (`R`)."""
        entries = self.plan.nodes[ref[0]].micro
        return entries[ref[1]] if entries else "R"

    def operand(self, op: Op, number: int, text: str) -> str:
        """The text of an operand of `op`, read as `text`. A trained weight is detached where no gradient comes back
        through `op` (a pass under no_grad): autograd would keep what the backward of this and of all behind it needs.
        Where it is gathered for `op` alone it is detached there."""
        ref, program = op.operands[number], self.program
        trained = program.is_weight(ref) and program.ops[ref[0]].call.outs[ref[1]].grad
        recorded = trained and not op.graded and op.target not in NO_GRADIENT
        if recorded and self.edges.between(ref, in_pair(self.plan, op.name, number), "edge", op.scope) is None:
            text += ".detach()"
        return self.shared(op.name, number, text)

    def shared(self, name: str, operand: int, text: str) -> str:
        """The text of an operand. One that is the same for all microbatches and is added to a partial sum is divided by
        their number (`Plan.shared`)."""
        return (
            f"({text} / {self.plan.microbatches})"
            if self.plan.microbatches > 1 and f"{name}:{operand}" in self._shared
            else text
        )

    @cached_property
    def _shared(self) -> frozenset[str]:
        return frozenset(self.plan.shared)

    def micro_bytes(self, ref: Ref) -> float:
        """Bytes of the whole value in one microbatch, on one device."""
        return self.program.bytes_of(ref) / (self.plan.microbatches if is_shard(self.micro(ref)) else 1)

    def local_sizes(self, ref: Ref) -> tuple[str, ...]:
        """The sizes of a value on this rank in one microbatch, as source."""
        tensor, layout = self.program.ops[ref[0]].call.outs[ref[1]], out_pair(self.plan, ref).value
        return tuple(
            size_text.shape(tensor.shape, layout, self.sizes, self.batch_axes, self.micro(ref), self.plan.microbatches)
        )

    def whole_sizes(self, ref: Ref) -> str:
        """The sizes of a value on all ranks together in one microbatch, as the source of a tuple."""
        tensor = self.program.ops[ref[0]].call.outs[ref[1]]
        texts = size_text.shape(
            tensor.shape, ("R",) * len(self.sizes), self.sizes, (), self.micro(ref), self.plan.microbatches
        )
        return tuple_text(texts)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of the symbolic dims."""
        return tuple(self.plan.hints)

    def class_of(self, scope: str) -> str:
        """The name of the class of a run of blocks."""
        return self.classes[scope]

    def short_name(self, op: Op) -> str:
        """The name of a parameter or buffer inside its class: relative to the block, or the full one at the top."""
        return str(op.node.meta["fqn"])

    @cached_property
    def function_names(self) -> tuple[str, ...]:
        """Names that no variable may have (`function_names`)."""
        return function_names(self.program)

    def use(self, target: Any) -> None:
        """Note that the file calls `target`: plain functions are imported."""
        module = getattr(target, "__module__", "")
        if module.startswith("passes.") and target not in EXPRESSIONS:
            self.functions[qualified(target)] = module

    def reason(self, reshard: Reshard) -> str:
        """The comment of a reshard: its steps, bytes and price of one run: `all-gather s on gpu: 33.6 MB, 0.11 ms;
        backward ...`."""
        size = self.micro_bytes(reshard.ref)
        forward = reshard.forward(self.sizes)
        parts = (
            [
                f"{self._words(forward, reshard)}: {megabytes(size * fraction(forward[-1].after, self.sizes))}, "
                f"{seconds(self._steps_s(forward, size))}"
            ]
            if forward
            else []
        )
        back = reshard.backward(self.sizes)
        if back:
            parts.append(f"backward {self._words(back, reshard)}, {seconds(self._steps_s(back, size))}")
        return "; ".join(parts)

    def tiles(self, op: Op) -> str:
        """What gathering the weight of an operator in tiles costs, each way: `8 tiles, all-gather on gpu: 8 x 3.36 GB,
        65 ms; backward ...`."""
        parts = []
        for algorithm, site in sites(op, options(self.plan.nodes[op.name]), self.sizes, self.plan.precision):
            for direction, inner in (
                ("", algorithm.forward),
                ("backward ", algorithm.backward if self.plan.mode == "train" and op.graded else ()),
            ):
                runs = {
                    kind: sum(one.times(site) for one in inner if one.kind == kind)
                    for kind in dict.fromkeys(one.kind for one in inner)
                }
                parts += [
                    f"{direction}{self._times(next(one for one in inner if one.kind == kind), site, count)}"
                    for kind, count in runs.items()
                    if count
                ]
            parts[:1] = [f"{tiled(site.options)} tiles, {part}" for part in parts[:1]]
        return "; ".join(parts)

    def _times(self, inner: InnerCollective, site: Site, count: int) -> str:
        nbytes = inner.nbytes(site)
        whole_s = count * max(collective_s(inner.kind, nbytes, mesh.axes[site.axis]) for mesh in self.meshes)
        return f"{_VERBS[inner.kind]} on {self.plan.axes[site.axis]}: {count} x {megabytes(nbytes)}, {seconds(whole_s)}"

    def _steps_s(self, steps: tuple[Step, ...], size: float) -> float:
        """Seconds of `steps` for a tensor of `size` bytes, on the slowest place."""
        return max(steps_s(steps, size, mesh) for mesh in self.meshes)

    def _words(self, steps: tuple[Step, ...], reshard: Reshard) -> str:
        return " then ".join(f"{_VERBS[s.kind]}{self._dim(s, reshard)} on {self.plan.axes[s.axis]}" for s in steps)

    def _dim(self, step: Step, reshard: Reshard) -> str:
        shape = self.program.ops[reshard.ref[0]].call.outs[reshard.ref[1]].shape
        names = []
        for entry in (step.before[step.axis], step.after[step.axis]):
            if is_shard(entry):
                size = shape[dim_of(entry)]
                names.append(f"dim {dim_of(entry)}" if isinstance(size, int) else str(size))
        return " " + " to ".join(names) if names else ""


def function_names(program: Program) -> tuple[str, ...]:
    """Names of the plain functions that a graph calls: no variable and no class may hide them."""
    targets = (op.target for op in program.ops.values() if op.role == "op")
    return tuple(dict.fromkeys(qualified(t) for t in targets if getattr(t, "__module__", "").startswith("passes.")))
