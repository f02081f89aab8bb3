"""Compiled: a planned model, which makes the sharded module of this process and hands on what training asks of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar import arguments
from autopar.bundle import Bundle
from autopar.errors import PlanError, RunError
from autopar.plan import Plan
from autopar.runtime import GradScaler, ShardedModule
from autopar.runtime.mesh import device_here
from autopar.runtime.rank0_weights import check_program, from_first
from autopar.runtime.rng import new_seed
from autopar.runtime.shared_results import together
from autopar.runtime.uncompiled import check_uncompiled
from autopar.text import seconds

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.memory import Prediction
    from autopar.simulate import Simulation
    from autopar.verify import Report


_PLACED = (
    "the plan says on which devices and in which dtype the model runs: cluster and precision= of compile are for that"
)
INSTEAD = {
    **dict.fromkeys(("to", "cuda", "cpu", "half", "float", "double", "bfloat16"), _PLACED),
    "no_sync": "gradients of several steps add up until zero_grad() as they are; train_step(..., loss_weight=1 / k) "
    "makes them the mean of k",
    "compile": "torch.compile takes its blocks: module.compile_blocks()",
    "apply": "initialise the model before compile, load_full what was initialised, or go over named_parameters()",
    "backward": "train_step is forward and backward; where they are apart, call backward() of the loss of a forward",
    "step": "call step() of an optimizer of parameters()",
    "generate": 'sampling is another program: a second plan, made without targets and with mode="inference"',
}
"""What code for other wrappers of models asks a compiled model for, and what to do."""


class Compiled:
    """A planned model: a plan, the source that was emitted for it, and on ranks the sharded module.

    `plan` is the Plan, `source` the Python text of the module. `frontier` are the Pareto-optimal plans in step time and
    memory, the fastest first, where `compile(..., pareto=True)` asked for them; else `plan` alone.

    `module` is the sharded module. It needs torch.distributed, initialised with as many ranks as the plan has. Calls,
    `train_step`, `parameters`, `state_dict` and so on are forwarded to it; pass `module` itself to code that expects an
    nn.Module.
    """

    def __init__(
        self,
        bundle: Bundle,
        weights: Mapping[str, torch.Tensor] | None = None,
        captured: Captured | None = None,
        frontier: Sequence[Plan] = (),
    ) -> None:
        self.bundle, self.captured, self._weights = bundle, captured, weights
        self.frontier = tuple(frontier) or (bundle.plan,)
        self._seed = new_seed()

    @property
    def plan(self) -> Plan:
        """How the model runs: plain data, `plan.save(path)` writes it."""
        return self.bundle.plan

    @property
    def source(self) -> str:
        """The emitted module as Python text, one class per distinct block."""
        return self.bundle.source

    @cached_property
    def module(self) -> ShardedModule:
        """The sharded module on this rank, an nn.Module, built at the first access: a collective operation.

        It has the weights and constants that the model has on rank 0. Its random numbers follow from a seed that rank 0
        drew from torch's generator when this object was made. Raises RunError when the number of ranks is not the
        plan's, when ranks have different plans, and where there are no devices of the plan's kind.
        """
        check_uncompiled()
        device, constants = device_here(self.plan.device_kind), self.bundle.constants
        check_program(self.source, f"{self.plan.strategy} on mesh {self.plan.grid} of {self.plan.model}", device)
        held, seed = from_first(
            {**constants, **{n: t for n, t in (self._weights or {}).items() if isinstance(t, torch.Tensor)}},
            self._seed,
            device,
        )
        bundle = replace(self.bundle, constants={name: held[name] for name in constants})
        return bundle.build(
            None if self._weights is None else {name: held[name] for name in self._weights if name in held}, seed=seed
        )

    if not TYPE_CHECKING:  # a type checker knows what there is

        def __getattr__(self, name: str) -> Any:
            """Only called for what there is not: an AttributeError that says what to do instead."""
            # what Python itself asks for, and errors inside of a property
            if name.startswith("__") or hasattr(type(self), name):
                return object.__getattribute__(self, name)
            if name in INSTEAD:
                instead = INSTEAD[name]
            elif hasattr(nn.Module, name):
                instead = f"module.{name} is that of this rank's nn.Module"
            else:
                instead = (
                    "what the model had beside its forward is not part of the plan: ask the model itself, and where "
                    "its methods go over parameters give them the compiled model in its place, "
                    f"type(model).{name}(compiled, ...)"
                )
            raise AttributeError(f"a compiled model has no attribute {name!r}; {instead}", name=name, obj=self)

    @property
    def training(self) -> bool:
        """Whether the next calls are those of training, as nn.Module.training."""
        return self.module.training

    def train(self, mode: bool = True) -> Compiled:
        """As nn.Module.train: switch to training, or with False to evaluation. Raises RunError where the model computes
        in evaluation what the planned training step does not have."""
        self.module.train(mode)
        return self

    def eval(self) -> Compiled:
        """`train(False)`."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters."""
        self.module.zero_grad(set_to_none)

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers on this rank with their original names."""
        return self.module.named_buffers()

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Forward of this rank's batch; see ShardedModule."""
        return self.module(*batch, **named)

    def train_step(
        self, *batch: Any, scaler: GradScaler | None = None, loss_weight: float = 1.0, **named: Any
    ) -> torch.Tensor:
        """Forward and backward of this rank's batch; the loss of the global batch, the same on every rank. Gradients
        are multiplied by `loss_weight` and by the scale of `scaler`."""
        return self.module.train_step(*batch, scaler=scaler, loss_weight=loss_weight, **named)

    def shard_batch(self, *batch: Any, **named: Any) -> Any:
        """This rank's part of a global batch."""
        return self.module.shard_batch(*batch, **named)

    def update_bn(self, batches: Iterable[Any]) -> Compiled:
        """Recompute the running statistics of batch norms over `batches`, each as `shard_batch` returns it; see
        ShardedModule."""
        self.module.update_bn(batches)
        return self

    @property
    def data_parallel_size(self) -> int:
        """The number of data loaders among which the samples of a global batch are divided; see ShardedModule."""
        return self.module.data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """The number of this rank's loader, from 0."""
        return self.module.data_parallel_rank

    def shard_loaded(self, *batch: Any, **named: Any) -> Any:
        """This rank's part of the samples that its loader returned; see ShardedModule."""
        return self.module.shard_loaded(*batch, **named)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of which this rank holds a part, DTensors, for any torch optimizer."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """`parameters` with their original names."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """DTensors under the original names, in the order of the model's own state dict."""
        return self.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """The inverse of `state_dict`. Whole tensors are taken as well; on a pipeline they may be those of the whole
        model. `strict` as in nn.Module."""
        return self.module.load_state_dict(state, strict=strict)

    def load_full(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> Compiled:
        """Fill parameters and buffers from whole tensors by original name (a state dict of the model), without
        communication.

        Raises RunError, before anything is loaded, on missing names, on other shapes, and on unknown names unless
        `strict` is False.
        """
        self.module.load_full(state, strict=strict)
        return self

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers by original name, on the CPU of every rank; a collective operation."""
        return self.module.full_state_dict()

    def rng_state(self) -> dict[str, int]:
        """The state of its random numbers (seed and number of steps), to save beside the state dicts."""
        return self.module.rng_state()

    def set_rng_state(self, state: Mapping[str, int]) -> None:
        """The inverse of `rng_state`; call it on all ranks with the same state. Raises RunError on anything that is no
        such state."""
        self.module.set_rng_state(state)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of an optimizer of `parameters` by original name, for torch.distributed.checkpoint; it can be
        loaded under another plan."""
        return self.module.optimizer_state_dict(optimizer)

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, strict: bool = True
    ) -> None:
        """The inverse of `optimizer_state_dict`. Raises RunError where parameters that are trained have no state in it;
        with `strict=False` these begin with fresh state."""
        self.module.load_optimizer_state_dict(optimizer, state, strict=strict)

    def full(self, outputs: Any) -> Any:
        """Outputs of the last call with every tensor gathered whole, on every rank; a collective operation."""
        return self.module.full(outputs)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of all ranks to a global norm of at most `max_norm`; returns the norm before. The other
        arguments are those of torch.nn.utils.clip_grad_norm_."""
        return self.module.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def memory(self) -> Prediction:
        """The memory that the plan needs on each device: the peak of each place of the pipeline, in bytes, and the
        tensors that make it up.

        Raises PlanError on what `load` gave, which has no graph.
        """
        from autopar.memory import memory_of

        return memory_of(self._graph("memory").gm, self.plan)

    def simulate(self, progress: Callable[[str], None] | None = None) -> Simulation:
        """One step of the plan, simulated: its time and what that is spent on, memory over time, and a trace
        (`Simulation.save_trace`).

        Raises PlanError on what `load` gave, which has no graph.
        """
        from autopar.simulate import simulate

        return simulate(self._graph("simulate").gm, self.plan, progress)

    def verify(self, *batch: Any, **named: Any) -> Report:
        """Compare two steps and an evaluation of the emitted module, on local CPU processes, with the captured graph on
        one device: what `autopar verify` does.

        Both run in float64 on the model's weights and the global batch given here. Compared are outputs, loss,
        gradients, parameters after an optimizer step, and collectives. `report.ok` says whether all agree,
        `str(report)` what does not and at which node. Use it to check sharding rules of your own.

        Raises PlanError where there is no graph (after `load`) or there are no weights (a model on the meta device),
        and RunError where a process group runs, or for inputs that the plan does not have.
        """
        from autopar.verify import case_of, inputs_of, verify

        captured = self._graph("verify")
        if self._weights is None:
            raise PlanError(
                f"{self.plan.model} was planned on the meta device, so there are no weights to compare with: verify a "
                "plan of the model with weights (a smaller one will do)"
            )
        if together():
            raise RunError(
                "verify starts ranks of its own, and a process group runs here: call it in a script of one process"
            )
        return verify(case_of(captured, self.plan.on("cpu"), self._weights, inputs_of(captured, batch, named)))

    def _graph(self, command: str) -> Captured:
        """The captured graph. Raises PlanError where there is none; the message names `command`, the shell command that
        does the same."""
        if self.captured is None:
            raise PlanError(
                f"the plan for {self.plan.model} was loaded without the graph that it was made for, which {command} "
                f"works on; use the object that autopar.compile gave, or `autopar {command} plan.json` where the plan "
                "names its model"
            )
        return self.captured

    def save(self, folder: str | Path) -> Path:
        """Write plan.json, sharded.py, README.md and the constants into `folder`; other files in it stay.

        Each file is replaced atomically, so that none is left half-written. One rank may call it or all of them, with a
        shared folder or one per node: all write the same files.
        """
        return self.bundle.save(arguments.folder(folder))

    def __copy__(self) -> Compiled:
        made = object.__new__(Compiled)
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        made = memo[id(self)] = object.__new__(Compiled)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        if self.captured is None:  # plain data, which can be sent to the processes of ranks
            return super().__reduce_ex__(protocol)
        raise PlanError(
            "a compiled model is not pickled, and torch.save does not take it: save(folder) writes the plan and its "
            "program, which autopar.load(folder) reads, and state_dict() is what a checkpoint has of the weights"
        )

    def __repr__(self) -> str:
        predicted = self.plan.predicted
        return (
            f"Compiled({self.plan.model}, {self.plan.strategy} on mesh {self.plan.grid}, "
            f"{seconds(predicted.step_s)} per step predicted)"
        )
