"""`capture`, all steps from a model to its graph: copy it on meta, shorten runs of alike blocks, export, run the passes
(normalise, annotate, fold), and collect what the graph itself does not say."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

import passes
from autopar.capture import block_runs, dims
from autopar.capture._torch import code_when_asked
from autopar.capture.asked import Asked
from autopar.capture.captured import Captured
from autopar.capture.chain import chains
from autopar.capture.constants import constants, fleeting
from autopar.capture.evaluation import Evaluation, evaluation
from autopar.capture.export import export
from autopar.capture.failures import refuse_sizes_of_values
from autopar.capture.known_masks import KnownMasks
from autopar.capture.nested import nested
from autopar.capture.norms import momenta
from autopar.capture.outputs import check_loss, mark_loss, other_outputs, plain
from autopar.capture.python_random import draws
from autopar.capture.shadow import in_mode, shadow
from autopar.capture.shared_memory import refuse_shared
from autopar.capture.state import other_state, own_state
from autopar.capture.step_variation import one_step
from autopar.capture.to_graph import structure as outputs_of
from autopar.capture.to_graph import to_graph
from autopar.errors import CaptureError
from passes import edit, facts


@draws()  # a user's own random numbers go on where they were
def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    mode: str = "train",
    dynamic_shapes: Any = None,
    fold: bool = True,
    progress: Callable[[str], None] | None = None,
    rests: nn.Module | None = None,
) -> Captured:
    """Capture `model` for inputs like `args` and `kwargs`, of which only shapes and dtypes count. The model is not
    changed.

    With `loss_fn` (a function or module), the last positional inputs are its targets. `dynamic_shapes` is a pytree like
    `(args, kwargs)` with `{dim: "name"}` at tensors; without it batch and sequence are guessed. `fold=False` captures
    every block. `rests` is the model in the dtypes of its stored weights, where `model` is in the dtype of activations:
    its buffers keep their own dtypes.

    Raises CaptureError where the model cannot be exported, has no loss in train mode, or has gradients that its graph
    would lack."""
    asked = Asked.of(model, args, kwargs or {}, loss_fn, mode, dynamic_shapes, rests)
    masks = KnownMasks(counting=False)
    runs = block_runs.find(model) if fold else []
    try:
        return _folded(asked, runs, _Clock(progress), masks)
    except CaptureError:
        if not masks.left:
            raise
        return _folded(asked, runs, _Clock(progress), KnownMasks(counting=True))
    finally:
        asked.outside.put_back()


def _folded(asked: Asked, runs: list[block_runs.AlikeRun], clock: _Clock, masks: KnownMasks) -> Captured:
    """The model captured with `runs` of blocks shortened, or whole where that fails."""
    try:
        return _captured(asked, runs, clock, masks)
    except _Shortened:
        return _captured(asked, [], clock, masks)


class _Shortened(Exception):
    """The passes refused the graph of a shortened model, maybe because blocks are missing. The whole model is captured
    then."""


def _captured(asked: Asked, runs: list[block_runs.AlikeRun], clock: _Clock, masks: KnownMasks) -> Captured:
    """The model captured with `runs` of blocks shortened, if these are proven to be chains. Raises CaptureError, or
    _Shortened where the whole model is to be captured."""
    model, mode = asked.model, asked.mode
    with clock("shadow"):
        twin, runs, whole = _meta_copy(asked, runs)
        resting = {} if asked.rests is None else _buffer_dtypes(shadow(asked.rests, _kept_children(asked.rests, runs)))
    with clock("export"), code_when_asked():
        program, known, found, left_out = export(
            lambda: asked.with_loss(asked.fresh(twin)),
            asked.inputs,
            dict(asked.named),
            asked.dims,
            training=mode == "train",
            masks=masks,
        )
    with clock("evaluation"):
        evaluating = _evaluation(asked, twin, runs, known)
    with clock("passes"), code_when_asked():
        gm = _graph(asked, program, known, runs, evaluating.noises, resting)
    if asked.loss_fn is not None:
        with clock("steps of the loss"):
            one_step(lambda: asked.with_loss(asked.fresh(twin)), asked.name, *asked.stand_ins(known, targets=True))
    structure, numbers = outputs_of(program)
    left_out |= numbers
    check_loss(gm, asked, left_out)
    refuse_sizes_of_values(gm, asked.name)
    notes = (
        *asked.notes,
        *_capture_notes((*whole, *found), evaluating.rerun, differs=evaluating.differs and not model.training),
    )
    return _as_captured(asked, gm, known.hints, structure, left_out, evaluating, notes, clock)


def _as_captured(
    asked: Asked,
    gm: fx.GraphModule,
    hints: Mapping[str, int],
    structure: Any,
    left_out: Mapping[str, str],
    evaluating: Evaluation,
    notes: tuple[str, ...],
    clock: _Clock,
) -> Captured:
    """The Captured of the finished graph `gm`; further notes follow `notes`."""
    model = asked.model
    refuse_shared(asked.rests or model, gm, training=asked.mode == "train")
    with clock("constants"):
        values, valueless = constants(asked.rests or model, gm)
    further = (
        *valueless.values(),
        *other_outputs(left_out, structure),
        *_changed_weights(model, gm),
        *_other_state(model),
    )
    if gm.meta.get("noises", 0) != evaluating.noises:
        evaluating = Evaluation("what training multiplies by random numbers is not found in its graph")
    inputs = [n.meta["input"] for n in gm.graph.nodes if n.op == "placeholder" and n.meta.get("role") == "input"]
    signature = inspect.signature(asked.with_loss(model).forward)
    return Captured(
        gm,
        asked.name,
        hints,
        tuple(inputs),
        plain(structure),
        _aliases(model),
        values,
        graph_hash(gm),
        fleeting(model),
        (*notes, *further),
        clock.seconds,
        tuple(valueless),
        fixed=gm.meta["fixed"],
        nested=nested(signature, asked.inputs, asked.named, gm.meta["leaves"]),
        order=tuple(own_state(model)),
        evaluation=evaluating,
        left_out=tuple(left_out),
        momenta=momenta(model),
    )


def _capture_notes(found: Sequence[str], rerun: Sequence[str], *, differs: bool) -> Iterator[str]:
    """Notes on the capture: those `found` by its parts, the lines that `rerun` parts which change buffers, and whether
    evaluation `differs` from training."""
    yield from found
    if rerun:
        yield (
            f"buffers change in a checkpoint ({', '.join(rerun)}), which torch runs twice in a training step: in the "
            "sharded module they change once (running statistics move half as fast)"
        )
    if differs:
        yield (
            "the model is in evaluation, and planned as it trains: with dropout, statistics of the batch and whatever "
            "else it does in training alone"
        )


def _changed_weights(model: nn.Module, gm: fx.GraphModule) -> Iterator[str]:
    """A note on the model's parameters that forward changes, and that are buffers in the graph therefore."""
    buffers = {
        name
        for node in edit.nodes(gm)
        if node.meta.get("role") == "buffer"
        for name in node.meta.get("fqns") or [node.meta["fqn"]]
    }
    if changed := [name for name, _ in model.named_parameters() if name in buffers]:
        yield (
            f"{', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''} do not train, and forward changes them: "
            "buffers of the sharded module, and none of its parameters()"
        )


def _other_state(model: nn.Module) -> Iterator[str]:
    """Notes on entries of the model's state dict that the sharded module's lacks."""
    beside, renamed = other_state(model)
    if beside:
        yield (
            f"{', '.join(beside[:3])} of the state dict {'is' if len(beside) == 1 else 'are'} no tensors (extra "
            "state): the sharded module does not have them"
        )
    if renamed:
        yield (
            f"{', '.join(renamed[:3])} of the state dict "
            f"{'is no parameter' if len(renamed) == 1 else 'are no parameters'} of that name (a hook of the state dict "
            "makes them): the sharded module has parameters under their own names; load a checkpoint with the model's "
            "names into the model, and compile then"
        )


def _meta_copy(
    asked: Asked, runs: Sequence[block_runs.AlikeRun]
) -> tuple[nn.Module, list[block_runs.AlikeRun], list[str]]:
    """The model to export, without its loss function: a copy on meta, shortened where `runs` are proven to be chains.
    With the runs that were shortened, and notes on those that were not."""

    def short(some: Sequence[block_runs.AlikeRun]) -> nn.Module:
        return in_mode(shadow(asked.model, _kept_children(asked.model, some)), asked.mode == "train")

    shortened, notes = chains(asked.model, short, runs, *asked.stand_ins(asked.dims))
    if notes and not shortened:  # maybe the model does not run at stand-in sizes
        shortened, notes = chains(asked.model, short, runs, *asked.stand_ins(dims.Dims()))
    return short(shortened), shortened, notes


def _kept_children(model: nn.Module, runs: Sequence[block_runs.AlikeRun]) -> dict[str, Mapping[int, int]]:
    """The children that a shadow keeps of each container that `runs` shorten."""
    return {run.path: block_runs.kept(runs, run.path, len(model.get_submodule(run.path)._modules)) for run in runs}


def _buffer_dtypes(twin: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes of buffers, and of weights that do not train (buffers in the graph where forward changes them)."""
    held = (*twin.named_buffers(remove_duplicate=False), *twin.named_parameters(remove_duplicate=False))
    return {name: tensor.dtype for name, tensor in held if not tensor.requires_grad}


def _evaluation(asked: Asked, twin: nn.Module, runs: list[block_runs.AlikeRun], known: dims.Dims) -> Evaluation:
    """How the model evaluates; `twin` is its shortened shadow. Raises CaptureError where a second training step would
    be another computation than the first."""
    args, kwargs = asked.stand_ins(known)
    step = one_step(lambda: asked.fresh(twin), asked.name, args, kwargs)
    if asked.mode != "train":
        return Evaluation()
    found = evaluation(lambda: asked.fresh(twin), step, args, kwargs)
    return replace(
        found,
        rerun=() if step is None else tuple(step.rerun),
        changing=tuple(dict.fromkeys(name for short in found.changing for name in block_runs.meant(runs, short))),
    )


def _graph(
    asked: Asked,
    program: Any,
    known: dims.Dims,
    runs: list[block_runs.AlikeRun],
    noises: int,
    resting: Mapping[str, torch.dtype],
) -> fx.GraphModule:
    """The exported program as a graph of docs/internals.md, with all passes run. Raises as `_captured`."""
    training = asked.mode == "train"
    first = _first_names(asked.model)
    trained = {name: p.requires_grad and training for name, p in asked.model.named_parameters()}
    try:
        gm = to_graph(program, known, lambda name: first.get(name, name), trained)
        if training and gm.meta["outputs"]:
            mark_loss(gm)
        gm.meta.update(noises=noises, own_dtypes=resting)
        if runs:
            gm.meta["repeat_counts"] = _repeat_counts(runs)
        with torch.device("cpu"):  # passes evaluate masks: not on meta, even when the caller builds models there
            return passes.run(gm, (*passes.NORMALIZE, *passes.ANNOTATE))
    except ValueError as error:
        if runs:
            raise _Shortened from error
        raise CaptureError(f"{asked.name} cannot be captured: {error}") from error


def _repeat_counts(runs: list[block_runs.AlikeRun]) -> dict[str, list[tuple[int, int, int, int]]]:
    """Per container: (start, period, groups in the graph, groups in the model)."""
    found: dict[str, list[tuple[int, int, int, int]]] = {}
    for run in runs:
        found.setdefault(run.path, []).append((run.start, run.period, block_runs.KEPT, run.count))
    return found


def _first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for source in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in source:
            found[name] = first.setdefault(id(tensor), name)
    return found


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every further name of a tied parameter or buffer -> its first name."""
    return {name: first for name, first in _first_names(model).items() if name != first}


def graph_hash(gm: fx.GraphModule) -> str:
    """Hash of what the graph computes: ops, sizes, arguments and parameter names, not source lines."""
    text = [passes.run.__name__]
    for node in edit.nodes(gm):
        held = [(tuple(map(str, t.shape)), str(t.dtype)) for t in facts.tensors(node)] if "val" in node.meta else []
        target = getattr(node.target, "__name__", str(node.target))
        text.append(
            f"{node.name} {target} {node.args} {node.kwargs} {held} {node.meta.get('fqn')} {node.meta.get('repeat')}"
        )
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


class _Clock:
    """Seconds per phase; tells `progress` the phase's name when it begins."""

    def __init__(self, progress: Callable[[str], None] | None) -> None:
        self.progress, self.seconds, self.name, self.start = progress, {}, "", 0.0

    seconds: dict[str, float]

    def __call__(self, name: str) -> _Clock:
        self.name = name
        if self.progress is not None:
            self.progress(name)
        return self

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds[self.name] = time.perf_counter() - self.start
