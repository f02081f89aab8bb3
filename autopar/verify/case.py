"""What is verified: a graph, its plan, weights and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture import Captured, lift
from autopar.capture.lift_dtype import by_default, lifted
from autopar.codegen.edges import Edges, edges
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.errors import RunError
from autopar.plan import Plan
from autopar.problem.graph import Program
from autopar.problem.read_graph import read
from autopar.runtime.batch import bind
from autopar.verify.digest import micro_dim, whole
from autopar.verify.randomness import keep_all
from autopar.verify.reference import Keep, Recorded, Results, Second, train_step
from autopar.verify.second_step import second_batch
from autopar.verify.step import RankCase
from autopar.verify.ties import ties
from passes import facts
from passes.annotate_memory import annotate_memory


@dataclass(frozen=True)
class Case:
    """What is verified.

    gm         the graph, with all floats in the dtype of the check
    plan       its plan; `names`: what emission needs beside the graph
    weights    whole parameters and buffers by original name; `constants`: tensors that no state dict holds
    batch      the global inputs by name
    notes      what the comparison leaves out
    mutate     applied to the emitted text: tests plant errors with it
    later      whether a second step and an evaluation are compared too (verify.second_step), which takes two to
               three times as long
    dtype      that of the check
    """

    gm: fx.GraphModule
    plan: Plan
    names: Names
    weights: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()
    mutate: Callable[[str], str] = str
    later: bool = True
    dtype: torch.dtype = torch.float64

    @property
    def training(self) -> bool:
        """Whether gradients and an optimizer step are compared too."""
        return self.plan.mode == "train"

    @property
    def rank_case(self) -> RankCase:
        """The part of the case that ranks need, without the graph."""
        fetches = any(r.fetches(self.plan.mesh) for r in self.edges[1].reshards)
        return RankCase(self.plan, self.weights, self.constants, self.batch, fetches, self.second, self.dtype)

    def source(self, *, probes: bool = False) -> str:
        """The emitted text."""
        return self.mutate(emit(self.gm, self.plan, self.names, probes=probes))

    def reference(self, *, record: Keep | None = None) -> Results:
        """The results of one device, computed in this process; the same for every plan of the same graph, weights and
        batch. With `record`, what it keeps of every node, too."""
        second = Second(self.second, self.training and not self.names.unevaluated, self.names.changing)
        with by_default(self.dtype):
            return train_step(
                self.gm,
                {**self.weights, **self.constants},
                self.batch,
                training=self.training,
                record=record,
                second=second if self.later and record is None else None,
            )

    def recorded(self) -> dict[str, list[Recorded]]:
        """The sums (`verify.digest`) of the value and the gradient of every node on one device, one entry per instance
        of its block."""
        values: dict[str, list[Recorded]] = self.reference(
            record=lambda name, value: whole(value, micro_dim(self.plan, name))
        )["values"]
        return values

    def ties(self, tolerance: float) -> dict[str, int]:
        """Operators that jump whose operands are at the jump on one device, with how often (`verify.ties`)."""
        with by_default(self.dtype):
            return ties(self.gm, {**self.weights, **self.constants}, self.batch, tolerance)

    @cached_property
    def second(self) -> dict[str, Tensor]:
        """The batch of a second step."""
        return second_batch(self.gm, self.batch)

    @cached_property
    def edges(self) -> tuple[Program, Edges]:
        """The program at the sizes of this batch, and its edges under the plan: what is priced."""
        program = read(self.gm, sizes(self), training=self.training, device=self.plan.device_kind)
        return program, edges(program, self.plan)


def case_of(
    captured: Captured,
    plan: Plan,
    weights: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float64,
) -> Case:
    """The case of a captured model: graph, weights and floating inputs lifted to `dtype`. `weights` are whole tensors
    by original name (`model.state_dict()`), `batch` the global inputs by name. Nothing is dropped at random in a case
    (`verify.randomness`); its notes say so."""

    def to(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # extra state of modules is no tensor
        return {n: t.to(lifted(t.dtype, dtype)).detach().cpu() for n, t in tensors.items() if isinstance(t, Tensor)}

    check_batch(captured.gm, batch)
    names = Names.of(captured)
    # of a dtype: some kernels keep more for the backward than others, which gathers weights that are kept once
    gm = annotate_memory(lift(captured.parted(plan.parted).gm, dtype))
    notes = keep_all(gm)
    return Case(gm, plan, names, to(weights), to(captured.constants), to(batch), notes, dtype=dtype)


def inputs_of(captured: Captured, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a call by the graph's names for them, those inside of structured arguments included. Raises
    RunError for inputs that the graph does not have."""
    names = captured.input_names
    return dict(zip(names, bind(dict.fromkeys(names, ""), args, kwargs, captured.fixed, captured.nested), strict=True))


def check_batch(gm: fx.GraphModule, batch: Mapping[str, Tensor]) -> None:
    """Raise RunError where an input is no tensor of the graph's sizes; a symbol must have the same size in all
    inputs."""
    seen: dict[facts.Size, int] = {}

    def unlike(wanted: facts.Size, got: int) -> bool:
        if isinstance(wanted, int):
            return wanted != got
        return wanted.is_Symbol and seen.setdefault(wanted, got) != got

    for node in gm.graph.nodes:
        if node.meta.get("role") == "input":
            name, wanted = node.meta["input"], facts.shape(node)
            got = tuple(getattr(batch[name], "shape", ()))
            if not isinstance(batch[name], Tensor) or len(got) != len(wanted) or any(map(unlike, wanted, got)):
                what = f"of sizes {got}" if isinstance(batch[name], Tensor) else f"a {type(batch[name]).__name__}"
                known = "".join(f", where {size} is {seen[size]}" for size in dict.fromkeys(wanted) if size in seen)
                raise RunError(
                    f"input {name!r} is {what}, wanted a tensor of sizes ({', '.join(map(str, wanted))}){known}"
                )


def sizes(case: Case) -> dict[str, int]:
    """The symbolic sizes of this batch (not those that were planned)."""
    inputs = [node for node in case.gm.graph.nodes if node.meta.get("role") == "input"]
    given: dict[facts.Size, int] = {}
    for node in inputs:
        given.update(zip(facts.shape(node), case.batch[node.meta["input"]].shape, strict=True))
    named = facts.symbols(case.gm)
    return {**case.plan.hints, **{name: given[symbol] for name, symbol in named.items() if symbol in given}}
