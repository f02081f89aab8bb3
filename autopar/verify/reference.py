"""The reference: one training step of the captured graph on a single device, with something of the value and gradient
of every node on request; and the second step (`second_step`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.problem.graph import op_name
from autopar.verify.second_step import finite
from passes import edit, facts
from passes.interpret import Interpret
from passes.switches import evaluate

Results = dict[str, dict[str, Any]]
"""Whole results of one device by kind (output, gradient, parameter, buffer; of `second_step.SECOND`) and name."""


Keep = Callable[[str, Tensor], Tensor]
"""What is kept of a value or gradient of the node of that name."""


@dataclass
class Recorded:
    """What is kept of a value, and of its gradient: None where none has arrived."""

    value: Tensor
    gradient: Tensor | None = None


@dataclass(frozen=True)
class Second:
    """The second step: its `batch`; `evaluates`: whether an evaluation follows, and `changing`: the buffers that an
    evaluation changes."""

    batch: Mapping[str, Tensor]
    evaluates: bool = False
    changing: Collection[str] = ()


def optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """AdamW with a rate large enough that a wrong gradient shows in one step.

    Its first step is nearly the sign of the gradient; epsilon is raised, so that the rounding of a gradient that should
    be zero (of a bias in front of a batch norm) does not count as a difference of the parameter: it is multiplied by
    rate / epsilon. Each parameter is a group of its own, and stepped by one fused operator. DTensor decides about an
    operator once for all parameters that are alike, of this model and the next; about one on all parameters it decides
    for each of them, and anew for every model (288 parameters on three axes: 3.5 s, where groups take 0.14 s).
    """
    held = list(parameters)
    exact = all(p.dtype in (torch.float64, torch.complex128) for p in held)
    return torch.optim.AdamW(
        [{"params": [p]} for p in held],
        lr=1e-2,
        eps=1e-5 if exact else 1e-3,
        weight_decay=0.1,
        fused=not any(p.is_complex() for p in held),
    )


class Recorder(Interpret):
    """Interprets a graph and keeps something of every node's value, and of its gradient once a backward ran.

    Values are under `node` (`scope/node` in a block); one list entry per instance of a block.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        weights: Mapping[str, Tensor],
        keep: Keep,
        scope: str = "",
        values: dict[str, list[Recorded]] | None = None,
    ) -> None:
        super().__init__(gm, weights)
        self.keep, self.scope = keep, scope
        self.values: dict[str, list[Recorded]] = {} if values is None else values

    def body(self, body: fx.GraphModule, name: str) -> Interpret:
        """The interpreter of one block: it records into the same table."""
        return Recorder(body, self.weights, self.keep, name, self.values)

    def run_node(self, node: fx.Node) -> Any:
        """One node, recorded when it gives tensors."""
        result = super().run_node(node)
        if node.op == "call_function" and facts.tensors(node):
            items = list(enumerate(result)) if isinstance(result, (tuple, list)) else [(None, result)]
            for index, item in items:
                name = op_name(node, self.scope)
                if isinstance(item, Tensor):
                    self._record(name if index is None or len(items) == 1 else f"{name}:{index}", item)
        return result

    def _record(self, name: str, value: Tensor) -> None:
        entry = Recorded(self.keep(name, value.detach()))
        self.values.setdefault(name, []).append(entry)

        def note(gradient: Tensor | None) -> None:
            if gradient is not None:  # as behind a norm of order 0
                entry.gradient = self.keep(name, gradient.detach())

        if value.requires_grad:
            value.register_hook(note)


def train_step(
    gm: fx.GraphModule,
    weights: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    *,
    training: bool,
    record: Keep | None = None,
    second: Second | None = None,
) -> Results:
    """Results by kind: output (by name), gradient and parameter (by fqn), buffer; with `record`, `values`, what it
    keeps of every node. With `second`, the kinds of `second_step.SECOND`, too, where they are finite.

    `weights` are copied. Parameters are those that the graph reads and that may be trained.
    """
    trained = trainable(gm) if training else {}
    held = {name: w.detach().clone().requires_grad_(name in trained) for name, w in weights.items()}
    runner = Interpret(gm, held) if record is None else Recorder(gm, held, record)
    outputs = _pass(gm, runner, batch, training=training)
    found: Results = {"output": outputs, "gradient": {}, "parameter": {}, "buffer": {}}
    # parameters, and views of them, change in the optimizer's step
    found["buffer"] = {name: value.detach().clone() for name, value in runner.changed.items()}
    if training:
        found["gradient"] = _gradients(held, trained)
        steps = optimizer([held[name] for name in trained])
        steps.step()
        found["parameter"] = {name: held[name].detach() for name in trained}
    if isinstance(runner, Recorder):
        found["values"] = runner.values
    if second is not None:
        # which go on
        found["gradient"], found["parameter"] = (
            {name: value.clone() for name, value in found[kind].items()} for kind in ("gradient", "parameter")
        )
        found |= _later(gm, held, batch, second, found["buffer"], steps if training else None)
    return found


def _later(
    gm: fx.GraphModule,
    held: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    second: Second,
    changed: Mapping[str, Tensor],
    steps: torch.optim.Optimizer | None,
) -> Results:
    """The results of the second step and of an evaluation on the first `batch`; empty where they are not finite.
    `changed` are the buffers that the first step changed."""
    _take(held, changed)
    runner = Interpret(gm, held)
    found: Results = {"second output": _pass(gm, runner, second.batch, training=steps is not None)}
    _take(held, runner.changed)
    if steps is not None:
        found["accumulated"] = _gradients(held, trainable(gm))
        steps.step()
        found["second parameter"] = {name: held[name].detach() for name in found["accumulated"]}
    if second.evaluates:
        evaluated = copy.deepcopy(gm)
        evaluated.meta.update(gm.meta)
        runner = Interpret(evaluate(evaluated), held)
        with torch.no_grad():
            found["evaluated"] = _pass(gm, runner, batch, training=False)
        _take(held, {name: value for name, value in runner.changed.items() if name in second.changing})
    found["second buffer"] = {name: held[name].detach() for name in changed}
    return found if all(finite(found.get(kind, {})) for kind in ("second output", "evaluated")) else {}


def _pass(gm: fx.GraphModule, runner: Interpret, batch: Mapping[str, Tensor], *, training: bool) -> dict[str, Tensor]:
    """Run a forward, and in training a backward; gives the outputs by name."""
    found: dict[str, Tensor] = {}
    loss = None
    for value, about in zip(runner.run_named(batch), gm.meta["outputs"], strict=True):
        if about["kind"] != "mutation":
            found[about["name"]] = value.detach().clone()
            loss = value if about["kind"] == "loss" else loss
    if training:
        assert loss is not None, "a graph captured for training has a loss"
        loss.backward()
    return found


def _gradients(held: Mapping[str, Tensor], trained: Iterable[str]) -> dict[str, Tensor]:
    """The gradients of the parameters that are trained; zeros where the loss does not reach one."""
    grads = {name: held[name].grad for name in trained}
    return {name: torch.zeros_like(held[name]) if grad is None else grad for name, grad in grads.items()}


@torch.no_grad()
def _take(held: Mapping[str, Tensor], changed: Mapping[str, Tensor]) -> None:
    """Give buffers their new values."""
    for name, value in changed.items():
        held[name].copy_(value)


def trainable(gm: fx.GraphModule) -> dict[str, None]:
    """Names of the parameters that get gradients, in graph order, those of all block instances included."""
    found: dict[str, None] = {}
    for node in edit.nodes(gm):
        if facts.is_trained(node) and facts.is_float(node):
            found.update(dict.fromkeys(node.meta.get("fqns") or [node.meta["fqn"]]))
    return found
