"""The Python interface: `compile` a model for a cluster, `load` what was saved.

compiled = autopar.compile(model, cluster, example_inputs)      a plan to look at, save and verify
compiled(*local_batch), compiled.train_step(*local_batch)       on ranks, under torchrun
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar import arguments
from autopar.bundle import Bundle
from autopar.cluster import Cluster
from autopar.compiled import Compiled
from autopar.garbage import seldom
from autopar.plan import Plan
from autopar.runtime import old_parameters
from autopar.runtime.shared_results import done_by, together
from autopar.timer import TIME_LIMIT_S

# Capture and search are imported where `compile` needs them: `load` runs where neither solver nor model code is
# installed.
if TYPE_CHECKING:
    from autopar.search import Search


_PLANNING = threading.RLock()


@contextmanager
def _planning() -> Iterator[None]:
    """One thread at a time: tracing and the settings of the garbage collector are global to the process. Never in
    inference mode: autograd is asked which tensors it saves, and saves none there."""
    with _PLANNING, torch.inference_mode(False), seldom():
        yield


@_planning()
def compile(
    model: nn.Module,
    cluster: Cluster | str,
    example_inputs: Any = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    search: str | Search = "ilp",
    recipe: str | None = None,
    mesh: Sequence[int] | int | str | None = None,
    mode: str = "train",
    precision: str | torch.dtype | None = None,
    optimizer: str = "adamw",
    batch: int | None = None,
    seq: int | None = None,
    dynamic_shapes: Any = None,
    rules: Mapping[Any, Any] | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    seed: int = 0,
    remat: str = "auto",
    progress: Callable[[str], None] | None = None,
    source: Mapping[str, Any] | None = None,
    pareto: bool = False,
    prove: bool = False,
) -> Compiled:
    """Plan `model` for `cluster` and emit the sharded module.

    What to plan. The weights of `model` are not needed to plan; on ranks, the sharded module starts from them.

        model, cluster  an nn.Module; a Cluster, or what `Cluster.parse` reads: a name such as "h100:1x8", a .toml file
                        or "here"
        example_inputs  a tuple of positional inputs, a dict of named ones, or (tuple, dict); only shapes and dtypes
                        count, and their sizes are planned for. Without them, inputs are made from a Hugging Face
                        model's config for `batch` (8) and `seq` (128)
        dynamic_shapes  as torch.export has it: (args, kwargs), or a dict by the names of inputs, with {dim: Dim or
                        name} or None at each, "b" for samples: the dims whose size may change from step to step.
                        Without it, batch and sequence are found by the shapes of the inputs
        loss_fn         `loss_fn(outputs, *targets)`, for models that do not compute their loss
        mode            "train" or "inference"
        precision       "bf16": mixed precision, computed in bfloat16, with parameters, sums of gradients and optimizer
                        state in float32 and buffers in their own dtypes (for inference everything in bfloat16). "fp16":
                        the same in float16; `train_step` takes a GradScaler then. A dtype ("bfloat16"): the model as
                        after `model.to(dtype)`, with gradients and optimizer state in that dtype. None: the model as it
                        is
        optimizer       the name of the optimizer whose state and step are priced (autopar.optimizers)

    How to plan.

        search          a name of autopar.search.SEARCHES, or a function as autopar.search.Search has it
        recipe          a named strategy, in place of the search
        mesh            the sizes of the mesh axes (of a pipeline: of the mesh of each place)
        rules           operator -> rule string, Rule or "derive". Without one, operators that are not torch's are
                        computed whole on every rank
        remat           which repeated blocks run again in the backward, in place of keeping what their operators save:
                        "none", "selective" (results of products, convolutions and attention are kept), "full", or
                        "auto", as much as memory requires
        time_limit_s    seconds, after which the best plan so far is returned; the search only goes on while no plan
                        fits
        pareto          plan for less and less memory too (`Compiled.frontier`)
        prove           prove `plan.predicted.gap` as closely as possible, which takes many times as long as the search;
                        else quickly
        seed, progress  the seed of what the search draws at random; a function that is called with a line of text on
                        what is being done
        source          what the plan keeps about where the model came from: a dict of text, numbers and lists of them,
                        which goes into plan.json

    Raises CaptureError, RuleError, InfeasibleError, PlanError and ClusterError.
    """
    from autopar.capture import own_state
    from autopar.capture.precision import capture_in
    from autopar.codegen.module import emit
    from autopar.codegen.tables import Names
    from autopar.joint import plan
    from autopar.joint.pareto import frontier
    from autopar.problem.read_graph import laid_out
    from autopar.problem.settings import Settings
    from autopar.request import Request
    from autopar.rules import as_rules

    given = arguments.checked(
        {
            "model": model,
            "cluster": cluster,
            "example_inputs": example_inputs,
            "loss_fn": loss_fn,
            "search": search,
            "recipe": recipe,
            "mesh": mesh,
            "mode": mode,
            "precision": precision,
            "batch": 8 if batch is None else batch,
            "seq": 128 if seq is None else seq,
            "rules": rules,
            "time_limit_s": time_limit_s,
            "seed": seed,
            "progress": progress,
            "source": source,
            "optimizer": optimizer,
            "remat": remat,
            "pareto": pareto,
            "prove": prove,
        }
    )
    if example_inputs is not None:
        arguments.unsized(batch=batch, seq=seq)
    args, kwargs = _inputs(model, example_inputs, batch=given["batch"], seq=given["seq"], labels=mode == "train")
    arguments.some(args, kwargs)
    captured, stated = capture_in(
        model,
        args,
        kwargs,
        precision=given["precision"],
        mode=mode,
        loss_fn=loss_fn,
        dynamic_shapes=dynamic_shapes,
        progress=progress,
    )
    settings = Settings(mode, optimizer, stated)
    request = Request(
        given["cluster"],
        settings,
        search,
        recipe,
        given["mesh"],
        given["time_limit_s"],
        given["seed"],
        as_rules(rules),
        progress,
        remat=remat,
        prove=prove,
    )
    about = {
        "model": captured.name,
        "graph_hash": captured.graph_hash,
        "source": dict(source or {}),
        "notes": tuple(captured.notes),
    }
    made = _agree(
        lambda: (
            frontier(captured.gm, captured.hints, request, **about)
            if pareto
            else [plan(captured.gm, captured.hints, request, **about)]
        )
    )
    chosen = made[0]
    chosen.check(captured.graph_hash, laid_out(captured.gm, captured.hints, training=mode == "train"))
    captured = captured.parted(chosen.parted)
    bundle = Bundle(chosen, emit(captured.gm, chosen, Names.of(captured)), captured.constants)
    if together():
        old_parameters.watch(model.parameters())
    weights = None if any(p.is_meta for p in model.parameters()) else own_state(model)
    return Compiled(bundle, weights, captured, made)


def load(folder: str | Path) -> Compiled:
    """Read what `Compiled.save` wrote; needs neither the model's code nor the solver. Parameters are nan until a state
    dict is loaded.

    Raises PlanError when the folder does not hold a saved plan.
    """
    return Compiled(Bundle.load(arguments.folder(folder)))


def _agree(make: Callable[[], list[Plan]]) -> list[Plan]:
    """The plans that `make` returns. Under torch.distributed rank 0 makes them and sends them to the other ranks, or
    the error that it raised."""
    if not together():
        return make()
    return [Plan.from_json(text) for text in done_by(0, lambda: [plan.to_json() for plan in make()])]


def _inputs(
    model: nn.Module, example: Any, *, batch: int, seq: int, labels: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if example is None:
        from autopar import frontend

        return frontend.inputs_for(model, batch=batch, seq=seq, labels=labels)
    return arguments.split(example)
