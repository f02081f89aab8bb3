"""The door: `compile` a model for a cluster, `load` what was saved.

    compiled = autopar.compile(model, cluster, example_inputs)      a plan to look at, save and verify
    compiled(*local_batch), compiled.train_step(*local_batch)       on ranks, under torchrun
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar import arguments
from autopar.bundle import Bundle
from autopar.cluster import Cluster
from autopar.errors import PlanError, RunError
from autopar.garbage import seldom
from autopar.plan import Plan
from autopar.runtime import GradScaler, ShardedModule
from autopar.runtime.agreed import from_first
from autopar.runtime.everyones import done_by, together
from autopar.runtime.rng import new_seed
from autopar.text import seconds

# Capture and search are imported where `compile` needs them: `load` runs where neither solver nor model code is installed.
if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.memory import Prediction
    from autopar.search import Search
    from autopar.simulate import Simulation
    from autopar.verify import Report


class Compiled:
    """A planned model: a plan and its emitted source, and on ranks the sharded module.

    `plan` is the Plan, `source` the Python text of the module. `frontier` are the plans of which none is beaten in both step time and
    memory, where `compile(..., pareto=True)` asked for them, the fastest first. With torch.distributed initialised, on as many ranks as the
    plan has, `module` is the sharded module, and calls, `train_step`, `parameters`, `state_dict` go to it; give `module` itself to what wants an nn.Module.
    """

    def __init__(self, bundle: Bundle, weights: Mapping[str, torch.Tensor] | None = None,
                 captured: Captured | None = None, frontier: Sequence[Plan] = ()) -> None:
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
        """The sharded module on this rank, an nn.Module, with the model's weights if it had any: those of rank 0, where ranks made others. What it draws
        at random follows from a seed that rank 0 took from torch's generator when this object was made.

        Raises RunError when the number of ranks is not the plan's.
        """
        kind, constants = self.plan.device_kind, self.bundle.constants
        device = torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
        held, seed = from_first({**constants, **{n: t for n, t in (self._weights or {}).items() if isinstance(t, torch.Tensor)}}, self._seed, device)
        bundle = replace(self.bundle, constants={name: held[name] for name in constants})
        return bundle.build(None if self._weights is None else {name: held[name] for name in self._weights if name in held}, seed=seed)

    def train(self, mode: bool = True) -> Compiled:
        """As nn.Module.train: the next calls train, or with False evaluate. Raises RunError where the model does in evaluation what a training step does not."""
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

    def train_step(self, *batch: Any, scaler: GradScaler | None = None, loss_weight: float = 1.0, **named: Any) -> torch.Tensor:
        """Forward and backward of this rank's batch; the global loss, the same on every rank. Gradients are times `loss_weight` and the scale of `scaler`."""
        return self.module.train_step(*batch, scaler=scaler, loss_weight=loss_weight, **named)

    def shard_batch(self, *batch: Any, **named: Any) -> Any:
        """This rank's part of a global batch."""
        return self.module.shard_batch(*batch, **named)

    def update_bn(self, batches: Iterable[Any]) -> Compiled:
        """Make the running statistics of batch norms those of `batches`, each what `shard_batch` gives; see ShardedModule."""
        self.module.update_bn(batches)
        return self

    @property
    def data_parallel_size(self) -> int:
        """Among how many loaders the samples of a global batch are dealt; see ShardedModule."""
        return self.module.data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """Which of those loaders is this rank's."""
        return self.module.data_parallel_rank

    def shard_loaded(self, *batch: Any, **named: Any) -> Any:
        """This rank's part of what its own loader gave."""
        return self.module.shard_loaded(*batch, **named)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that rest on this rank, DTensors, for any torch optimizer."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """`parameters` with their original names."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """DTensors under the original names, in the order of the model's own state dict."""
        return self.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """The inverse of `state_dict`; takes whole tensors as well, of a pipeline those of all places. `strict` as nn.Module has it."""
        return self.module.load_state_dict(state, strict=strict)

    def load_full(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> Compiled:
        """Fill parameters and buffers from whole tensors by original name (a state dict of the model), without communication.

        Raises RunError on missing names and other shapes, and unless `strict` is False on unknown names; then nothing was loaded.
        """
        self.module.load_full(state, strict=strict)
        return self

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers by original name, on the CPU of every rank; a collective operation."""
        return self.module.full_state_dict()

    def rng_state(self) -> dict[str, int]:
        """Seed and number of steps of its random numbers, to save beside the state dicts."""
        return self.module.rng_state()

    def set_rng_state(self, state: Mapping[str, int]) -> None:
        """The inverse of `rng_state`, on all ranks alike. Raises RunError on what that did not give."""
        self.module.set_rng_state(state)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """State of an optimizer of `parameters` by original names, to save with torch.distributed.checkpoint under one plan and
        load under another."""
        return self.module.optimizer_state_dict(optimizer)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, strict: bool = True) -> None:
        """The inverse of `optimizer_state_dict`. Raises RunError where parameters that train have no state in it; `strict=False` lets these begin anew."""
        self.module.load_optimizer_state_dict(optimizer, state, strict=strict)

    def full(self, outputs: Any) -> Any:
        """Outputs of the last call with every tensor whole, on every rank; a collective operation."""
        return self.module.full(outputs)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients, of all ranks, to a global 2-norm of at most `max_norm`; the norm before."""
        return self.module.clip_grad_norm_(max_norm)

    def memory(self) -> Prediction:
        """What the plan needs of each device's memory: the peak of each place, and the tensors that make it up.

        Raises PlanError where the graph is not there: `load` reads emitted code, which has none.
        """
        from autopar.memory import memory_of

        return memory_of(self._graph("memory").gm, self.plan)

    def simulate(self, progress: Callable[[str], None] | None = None) -> Simulation:
        """One step of the plan, simulated: its time, where it goes, memory over time, and a trace (`Simulation.save_trace`).

        Raises PlanError where the graph is not there: `load` reads emitted code, which has none.
        """
        from autopar.simulate import simulate

        return simulate(self._graph("simulate").gm, self.plan, progress)

    def verify(self, *batch: Any, **named: Any) -> Report:
        """What `autopar verify` compares: one step of the emitted module on local CPU ranks with the captured graph on one device, on a global batch and the model's weights, in float64:
        outputs, loss, gradients, parameters after a step of an optimizer, collectives. `report.ok` says whether all is right, `str(report)` what is not and at which node. The way
        to check rules of your own.

        Raises PlanError where the graph or the weights are not there (`load` has neither, a model on the meta device no weights), RunError where a process group runs, and for
        inputs that the plan does not have.
        """
        from autopar.verify import case_of, inputs_of, verify

        captured = self._graph("verify")
        if self._weights is None:
            raise PlanError(f"{self.plan.model} was planned on the meta device, so there are no weights to compare with: verify a plan of the model with weights (a smaller one will do)")
        if together():
            raise RunError("verify starts ranks of its own, and a process group runs here: call it in a script of one process")
        return verify(case_of(captured, self.plan.on("cpu"), self._weights, inputs_of(captured, batch, named)))

    def _graph(self, command: str) -> Captured:
        """The graph that the plan was made for; `command` does without this object what needs it."""
        if self.captured is None:
            raise PlanError(f"the plan for {self.plan.model} was loaded without the graph that it was made for, which {command} works on; "
                            f"use the object that autopar.compile gave, or `autopar {command} plan.json` where the plan names its model")
        return self.captured

    def save(self, folder: str | Path) -> Path:
        """Write plan.json, sharded.py, README.md and the constants into `folder`; nothing half-written is left, and other files in it stay.

        Ranks may all call it, with one folder or with one of each node, or only one of them: the files are the same, and each is replaced in one move.
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
        if self.captured is None:  # nothing but plain data, as processes that ranks run in are given it
            return super().__reduce_ex__(protocol)
        raise PlanError("a compiled model is not pickled, and torch.save does not take it: save(folder) writes the plan and its program, which autopar.load(folder) reads, "
                        "and state_dict() is what a checkpoint has of the weights")

    def __repr__(self) -> str:
        predicted = self.plan.predicted
        return (f"Compiled({self.plan.model}, {self.plan.strategy} on mesh {self.plan.mesh}, "
                f"{seconds(predicted.step_s)} per step predicted)")


_PLANNING = threading.RLock()


@contextmanager
def _planning() -> Iterator[None]:
    """One thread at a time: tracing, and when garbage is collected, are of the whole process. What autograd keeps is asked of autograd, which inference mode would hide."""
    with _PLANNING, torch.inference_mode(False), seldom():
        yield


@_planning()
def compile(model: nn.Module, cluster: Cluster | str, example_inputs: Any = None, *,
            loss_fn: Callable[..., torch.Tensor] | None = None, search: str | Search = "ilp", recipe: str | None = None,
            mesh: Sequence[int] | int | str | None = None, mode: str = "train", precision: str | torch.dtype | None = None, optimizer: str = "adamw",
            batch: int = 8, seq: int = 128, dynamic_shapes: Any = None, rules: Mapping[Any, Any] | None = None,
            time_limit_s: float = 30.0, seed: int = 0, remat: str = "auto", progress: Callable[[str], None] | None = None,
            source: Mapping[str, Any] | None = None, pareto: bool = False, prove: bool = False) -> Compiled:
    """Plan `model` for `cluster`, a Cluster or what `Cluster.parse` reads, and emit the sharded module.

    `example_inputs` is a tuple of positional inputs, a dict of named ones, or (tuple, dict); only their shapes and dtypes
    count, and their sizes are what is planned for. Without them they are made from a Hugging Face model's config for
    `batch` and `seq`. `loss_fn(outputs, *targets)` is for models that do not compute their loss. `mode` is "train" or
    "inference". `optimizer` names the one whose state and step are priced (autopar.optimizers). `dynamic_shapes` names the sizes that may be others
    than those of the inputs, as torch.export has it: `(args, kwargs)`, or a dict by the names of inputs, with `{dim: "name"}` or None at each, "b" for samples; without it batch and
    sequence are found. `recipe` forces a named strategy, `mesh` the sizes of the mesh axes (of a pipeline: of each place). `search` is a name of
    autopar.search.SEARCHES or a function as autopar.search.Search has it, `seed` of what it draws at random. `rules` maps
    operators to rule strings, to Rules, or to "derive"; operators of others than torch are computed whole on every rank without. `precision` "bf16" is mixed precision: computed in bfloat16, with parameters, sums of gradients and
    optimizer state in float32, and buffers in their own dtypes (for inference all in bfloat16); "fp16" the same with float16, whose `train_step` takes a GradScaler. A dtype ("bfloat16") plans and emits the model as `model.to(dtype)` would
    be: weights, gradients and optimizer state too; without it the model stays in its own. `remat` says which repeated blocks are run again in the backward
    instead of keeping what their operators save: "none", "selective" (products, convolutions and attention are kept), "full", or "auto", as
    memory wants it. `pareto` plans for less and less memory as well (`Compiled.frontier`). A search ends after `time_limit_s`, proof included, with the best that it
    has then; only where nothing fits yet it goes on. `plan.predicted.gap` is proven at a glance, with `prove` as closely as can be (takes many times as long as the search).
    `progress` is called with a line of text for what is being done; `source`, a dict of text, numbers and lists of them, is kept in the plan. The weights of
    `model` are never needed to plan; on ranks they are what the sharded module starts from.

    Raises CaptureError, RuleError, InfeasibleError, PlanError and ClusterError.
    """
    from autopar.capture import own_state
    from autopar.capture.precision import capture_in
    from autopar.codegen.module import emit
    from autopar.codegen.tables import Names
    from autopar.joint import plan
    from autopar.joint.frontier import frontier
    from autopar.problem.settings import Settings
    from autopar.request import Request
    from autopar.rules import as_rules

    given = arguments.checked({"model": model, "cluster": cluster, "example_inputs": example_inputs, "loss_fn": loss_fn, "search": search, "recipe": recipe, "mesh": mesh, "mode": mode,
                               "precision": precision, "batch": batch, "seq": seq, "rules": rules, "time_limit_s": time_limit_s, "seed": seed, "progress": progress, "source": source,
                               "optimizer": optimizer, "remat": remat, "pareto": pareto, "prove": prove})
    args, kwargs = _inputs(model, example_inputs, batch=given["batch"], seq=given["seq"], labels=mode == "train")
    arguments.some(args, kwargs)
    captured, stated = capture_in(model, args, kwargs, precision=given["precision"], mode=mode, loss_fn=loss_fn, dynamic_shapes=dynamic_shapes, progress=progress)
    settings = Settings(mode, optimizer, stated)
    request = Request(given["cluster"], settings, search, recipe, given["mesh"], given["time_limit_s"], given["seed"],
                      as_rules(rules), progress, remat=remat, prove=prove)
    about = {"model": captured.name, "graph_hash": captured.graph_hash, "source": dict(source or {}), "notes": tuple(captured.notes)}
    made = _agree(lambda: frontier(captured.gm, captured.hints, request, **about) if pareto else
                  [plan(captured.gm, captured.hints, request, **about)])
    chosen = made[0]
    chosen.check(captured.graph_hash, captured.nodes)
    captured = captured.parted(chosen.parted)
    bundle = Bundle(chosen, emit(captured.gm, chosen, Names.of(captured)), captured.constants)
    weights = None if any(p.is_meta for p in model.parameters()) else own_state(model)
    return Compiled(bundle, weights, captured, made)


def load(folder: str | Path) -> Compiled:
    """What `Compiled.save` wrote: no search and no model code. Its parameters are nan until a state dict is loaded.

    Raises PlanError when the folder is not one.
    """
    return Compiled(Bundle.load(arguments.folder(folder)))


def _agree(make: Callable[[], list[Plan]]) -> list[Plan]:
    """The plans; where torch.distributed runs, rank 0 makes them and all the others get their bytes, or the error that ended it."""
    if not together():
        return make()
    return [Plan.from_json(text) for text in done_by(0, lambda: [plan.to_json() for plan in make()])]


def _inputs(model: nn.Module, example: Any, *, batch: int, seq: int, labels: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if example is None:
        from autopar import frontend

        return frontend.inputs_for(model, batch=batch, seq=seq, labels=labels)
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, tuple) and len(example) == 2 and isinstance(example[0], tuple) and isinstance(example[1], Mapping):
        return example[0], dict(example[1])
    return tuple(example), {}
