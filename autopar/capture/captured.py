"""What capture gives: the normalised, annotated, folded graph and everything that the graph itself does not say. Made
by capture.capture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.capture.evaluation import Evaluation
from autopar.errors import PlanError
from passes.part_runs import Parts, part_runs


@dataclass(frozen=True, eq=False)
class Captured:
    """One captured model.

    gm           the graph of docs/internals.md, folded and annotated
    name         class name of the model
    hints        symbolic dims and the sizes to plan for, `{"b": 8, "s": 128}`
    input_names  user inputs in the order of the graph's placeholders
    structure    the user's pytree of outputs, with output numbers as leaves
    aliases      tied parameters: other name -> the name that the graph uses
    constants    tensors that no state dict holds (non-persistent buffers, literals), on the CPU
    graph_hash   hash of the graph's text: a plan fits the graph it was made for
    fleeting     names of buffers that no state dict holds
    order        the names of the model's state dict, tied ones included, in its order
    notes        what a user should know: dims that are static and why, blocks that were not folded
    seconds      time per phase
    fixed        arguments that are no tensors, which are part of the graph: name -> (place among all arguments, value)
    nested       what arguments look like that hold several inputs, or are called otherwise: argument -> name of an
                 input, or a dict or tuple of such
    evaluation   what `model.eval()` makes of it
    parts        runs of blocks that were taken apart for a plan (`Plan.parted`); the hash is that of the graph before
    momenta      of batch norms with running statistics, by name
    left_out     names of outputs that are None in the sharded module: what is no tensor, lists as long as a batch
    valueless    names of constants without a value: the model is on meta and does not say how they are made
    """

    gm: fx.GraphModule
    name: str
    hints: Mapping[str, int]
    input_names: tuple[str, ...]
    structure: Any
    aliases: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    graph_hash: str
    fleeting: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    valueless: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[int, Any]] = field(default_factory=dict)
    nested: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    evaluation: Evaluation = field(default_factory=Evaluation)
    parts: Parts = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    momenta: Mapping[str, float] = field(default_factory=dict)

    def parted(self, parts: Parts) -> Captured:
        """The same for a plan that lays runs of blocks out in `parts`. Raises PlanError where the graph has no such
        runs."""
        if parts == self.parts:
            return self
        if self.parts:
            raise PlanError(f"the graph is parted for another plan: {dict(self.parts)}, wanted {dict(parts)}")
        try:
            return replace(self, gm=part_runs(self.gm, parts), parts=parts)
        except ValueError as error:
            raise PlanError(f"the plan does not fit the graph: {error}") from error
