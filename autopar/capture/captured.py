"""What capture gives: the normalised, annotated, folded graph and everything that the graph itself does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx


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
    order: tuple[str, ...] = ()

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the flat outputs, mutations of buffers left out."""
        return tuple(entry["name"] for entry in self.gm.meta["outputs"] if entry["kind"] != "mutation")

    @property
    def nodes(self) -> list[str]:
        """Names of what a plan lays out: tensors of the graph, those of blocks as `scope/name`."""
        return [f"{prefix}{node.name}" for prefix, module in (("", self.gm), *((f"{n}/", m) for n, m in self.gm.named_children()))
                if isinstance(module, fx.GraphModule) for node in module.graph.nodes if node.op != "output"]
