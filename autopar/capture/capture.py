"""`capture`: shadow, shorten, export, normalise, annotate, fold."""

from __future__ import annotations

import copy
import hashlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

import passes
from autopar._torch import code_when_asked, pytree
from autopar.capture import alike, dims
from autopar.capture.captured import Captured
from autopar.capture.chain import is_chain
from autopar.capture.chance import draws
from autopar.capture.constants import constants, fleeting
from autopar.capture.evaluation import Evaluation, evaluation
from autopar.capture.export import export, to_graph
from autopar.capture.export import structure as outputs_of
from autopar.capture.failures import refuse_sizes_of_values
from autopar.capture.hooks import refuse_hooks
from autopar.capture.nested import nested
from autopar.capture.norms import momenta
from autopar.capture.shadow import WithLoss, shadow
from autopar.capture.state import other_state, own_state
from autopar.capture.steps import one_step
from autopar.capture.tape import Tape
from autopar.capture.targets import count_targets, refuse_trained
from autopar.capture.wrapped import refuse_wrapped
from autopar.errors import CaptureError
from autopar.frontend import max_positions
from passes import facts


@draws()  # a user's own random numbers go on where they were
def capture(model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *,
            loss_fn: Callable[..., torch.Tensor] | None = None, mode: str = "train", dynamic_shapes: Any = None,
            fold: bool = True, progress: Callable[[str], None] | None = None, rests: nn.Module | None = None) -> Captured:
    """Capture `model` for inputs like `args` and `kwargs`, of which only shapes and dtypes count. The model is not touched.

    With `loss_fn`, a function or a module, the last positional inputs are its targets. `dynamic_shapes` is a pytree like `(args, kwargs)` with
    `{dim: "name"}` at tensors; without it batch and sequence are found. `fold=False` captures every block.
    `rests` is the model as it rests, where `model` is it in the dtype of activations: its buffers keep their own dtypes.
    Raises CaptureError where the model cannot be exported, has no loss in train mode, or gradients that its graph would not have.
    """
    clock = _Clock(progress)
    refuse_wrapped(model)
    refuse_trained(loss_fn)
    loss_fn = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn  # what it changes when it is traced, the user's own does not
    targets = count_targets(loss_fn, model, len(args), kwargs or {})
    _check_inputs(model, args, kwargs or {}, targets)
    if mode == "train":
        refuse_hooks(model)
    inputs, named = _to_meta(args), _to_meta(dict(kwargs or {}))
    flat, tree = pytree.tree_flatten((inputs, named))
    asked = dims.explicit(flat, dynamic_shapes, tree) if dynamic_shapes is not None else dims.find(flat, max_positions(model))
    runs = alike.find(model) if fold else []
    notes = [note] if dynamic_shapes is None and (note := dims.unshared(flat)) else []
    with clock("shadow"):
        twin, runs, why = _shadow(model, runs, targets, mode, asked, flat, tree)
        resting = {} if rests is None else _buffer_dtypes(shadow(rests, _kept(rests, runs)))
        notes += [f"blocks are captured one by one: {why}"] if why else []
    with clock("export"), code_when_asked():
        program, known, found, left_out = export(lambda: _with_loss(shadow(twin), loss_fn, targets, len(inputs)), tuple(inputs), dict(named), asked, training=mode == "train")
    notes += found
    with clock("evaluation"):
        given, keywords = pytree.tree_unflatten(known.stand_ins(flat), tree)
        given = given[:len(given) - targets]  # the loss function is not asked
        step = one_step(lambda: shadow(twin), type(model).__name__, given, keywords)
        evaluating = _evaluation(twin, runs, step, given, keywords) if mode == "train" else Evaluation()
    if evaluating.differs and not model.training:
        notes.append("the model is in evaluation, and planned as it trains: with dropout, statistics of the batch and whatever else it does in training alone")
    with clock("passes"), code_when_asked():
        try:
            gm = _graph(model, program, known, runs, mode, evaluating.noises, resting)
        except ValueError as error:
            if not runs:  # nothing was shortened: the error is about the model itself
                raise CaptureError(f"{type(model).__name__} cannot be captured: {error}") from error
            return capture(model, args, kwargs, loss_fn=loss_fn, mode=mode, dynamic_shapes=dynamic_shapes, fold=False, progress=progress, rests=rests)
    if gm.meta.get("noises", 0) != evaluating.noises:
        evaluating = Evaluation("what training multiplies by random numbers is not found in its graph")
    structure, numbers = outputs_of(program)
    left_out |= numbers
    _check_loss(gm, mode, model, left_out)
    refuse_sizes_of_values(gm, type(model).__name__)
    leaves = [n.meta["input"] for n in gm.graph.nodes if n.op == "placeholder" and n.meta.get("role") == "input"]
    with clock("constants"):
        values, valueless = constants(rests or model, gm)
    notes += [*valueless.values(), *_other_outputs(left_out, structure), *_other_state(model)]
    return Captured(gm, type(model).__name__, known.hints, tuple(leaves), _plain(structure), _aliases(model), values,
                    graph_hash(gm), fleeting(model), tuple(notes), clock.seconds, tuple(valueless), fixed=gm.meta["fixed"],
                    nested=nested(inspect.signature(_with_loss(model, loss_fn, targets, len(inputs)).forward), inputs, named, gm.meta["leaves"]),
                    order=tuple(own_state(model)), evaluation=evaluating, left_out=tuple(left_out), momenta=momenta(model))


def _other_outputs(left_out: Mapping[str, str], structure: Any) -> Iterator[str]:
    """Notes of outputs that the sharded module gives otherwise than the model does."""
    yield from (f"output {name} {what}: it is None in the sharded module" for name, what in left_out.items())
    yield from (f"the model returns a {name}: it is a plain tuple in the sharded module ({', '.join(fields)}, in this order)" for name, fields in dict(_named_tuples(structure)).items())


def _other_state(model: nn.Module) -> Iterator[str]:
    """Notes of what is in the model's state dict and not in that of the sharded module."""
    beside, renamed = other_state(model)
    if beside:
        yield f"{', '.join(beside[:3])} of the state dict {'is' if len(beside) == 1 else 'are'} no tensors (extra state): the sharded module does not have them"
    if renamed:
        yield (f"{', '.join(renamed[:3])} of the state dict {'is no parameter' if len(renamed) == 1 else 'are no parameters'} of that name (a hook of the state dict makes them): "
               "the sharded module has parameters under their own names; load a checkpoint with the model's names into the model, and compile then")


def _shadow(model: nn.Module, runs: list[alike.AlikeRun], targets: int, mode: str,
            asked: dims.Dims, flat: list[Any], tree: Any) -> tuple[nn.Module, list[alike.AlikeRun], str]:
    """What is exported, without its loss function: a meta twin, shortened where the runs are proven chains; and why they are not, if so."""
    why = ""
    twin = _in_mode(shadow(model, _kept(model, runs)), mode)
    args, kwargs = pytree.tree_unflatten(asked.stand_ins(flat), tree)
    if runs:
        why = is_chain(model, shadow(twin), runs, tuple(args[:len(args) - targets]), kwargs)
    if why:
        runs, twin = [], _in_mode(shadow(model), mode)
    return twin, runs, why


def _kept(model: nn.Module, runs: list[alike.AlikeRun]) -> dict[str, Mapping[int, int]]:
    """The children that a shadow keeps of each container that `runs` shorten."""
    return {run.path: alike.kept(runs, run.path, len(model.get_submodule(run.path)._modules)) for run in runs}


def _buffer_dtypes(twin: nn.Module) -> dict[str, torch.dtype]:
    return {name: buffer.dtype for name, buffer in twin.named_buffers(remove_duplicate=False)}


def _with_loss(twin: nn.Module, loss_fn: Callable[..., torch.Tensor] | None, targets: int, inputs: int) -> nn.Module:
    """A model that takes so many positional `inputs`, the `targets` of its loss function included."""
    return twin if loss_fn is None else WithLoss(twin, loss_fn, targets, inputs - targets)


def _evaluation(twin: nn.Module, runs: list[alike.AlikeRun], step: Tape | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Evaluation:
    """How the model of which `twin` is the short shadow evaluates."""
    found = evaluation(twin, step, args, kwargs)
    return replace(found, changing=tuple(dict.fromkeys(name for short in found.changing for name in alike.meant(runs, short))))


def _check_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: int) -> None:
    """Raise CaptureError where the inputs are not what forward takes, and the loss function behind it so many `targets`."""
    signature = inspect.signature(model.forward)
    got = f"got {len(args)} positional inputs" + (f" and {', '.join(kwargs)}" if kwargs else "")
    if len(args) < targets:
        raise CaptureError(f"{type(model).__name__}: {got}, wanted those of the model and, last, {targets} for loss_fn")
    try:
        signature.bind(*args[:len(args) - targets], **kwargs)
    except TypeError as error:
        taken = f", of which the last {targets} go to loss_fn" if targets else ""
        raise CaptureError(f"{type(model).__name__} does not take these inputs: {error}; {got}{taken}, wanted forward{signature}") from None


def _in_mode(twin: nn.Module, mode: str) -> nn.Module:
    """Training flags for `mode`. A model that trains keeps the parts that its user has set to evaluate (frozen norms)."""
    return twin.train(mode == "train") if mode != "train" or not twin.training else twin


def _graph(model: nn.Module, program: Any, known: dims.Dims, runs: list[alike.AlikeRun], mode: str, noises: int, resting: Mapping[str, torch.dtype]) -> fx.GraphModule:
    """The exported program as the contract's graph, all passes run."""
    first = _first_names(model)
    trained = {name: p.requires_grad and mode == "train" for name, p in model.named_parameters()}
    gm = to_graph(program, known, lambda name: first.get(name, name), trained)
    kinds = gm.meta["outputs"]
    if mode == "train" and kinds:
        _mark_loss(gm)
    gm.meta.update(noises=noises, own_dtypes=resting)
    if runs:
        gm.meta["repeat_counts"] = _repeat_counts(runs)
    with torch.device("cpu"):  # passes evaluate masks: not on meta, even when the caller builds models there
        return passes.run(gm, (*passes.NORMALIZE, *passes.ANNOTATE))


def _repeat_counts(runs: list[alike.AlikeRun]) -> dict[str, list[tuple[int, int, int, int]]]:
    """(start, period, groups in the graph, groups meant) per container."""
    found: dict[str, list[tuple[int, int, int, int]]] = {}
    for run in runs:
        found.setdefault(run.path, []).append((run.start, run.period, alike.KEPT, run.count))
    return found


def _mark_loss(gm: fx.GraphModule) -> None:
    """The output called loss, or else the only scalar float, is the loss."""
    (output,) = [n for n in gm.graph.nodes if n.op == "output"]
    entries = gm.meta["outputs"]
    scalars = [i for i, n in enumerate(output.args[0]) if isinstance(n, fx.Node) and facts.is_tensor(n) and facts.is_float(n)
               and facts.numel(n) == 1]
    named = [i for i in scalars if entries[i]["name"].rsplit(".", 1)[-1] == "loss"]
    chosen = named or (scalars if len(scalars) == 1 else [i for i in scalars if i == 0])
    if chosen:
        entries[chosen[0]] = {"name": "loss", "kind": "loss", "target": ""}


def _check_loss(gm: fx.GraphModule, mode: str, model: nn.Module, left_out: Mapping[str, str]) -> None:
    if mode == "train" and not any(entry["kind"] == "loss" for entry in gm.meta["outputs"]):
        others = "".join(f"; {name} {what}, into which nobody looks (return a dict, a tuple or a dataclass)" for name, what in left_out.items())
        raise CaptureError(f"{type(model).__name__} gives no scalar loss in train mode, got outputs "
                           f"{[entry['name'] for entry in gm.meta['outputs']]}{others}: pass labels among the inputs, or loss_fn=, or mode='inference'")


def _first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for source in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in source:
            found[name] = first.setdefault(id(tensor), name)
    return found


def _aliases(model: nn.Module) -> dict[str, str]:
    return {name: first for name, first in _first_names(model).items() if name != first}


def _plain(structure: Any) -> Any:
    """The user's pytree as plain dicts, lists and numbers: what an emitted file can say. Raises CaptureError on nodes that are none of these."""
    if isinstance(structure, Mapping):
        return {k if type(k) is int else str(k): _plain(v) for k, v in structure.items()}
    if isinstance(structure, (tuple, list)):
        return tuple(_plain(v) for v in structure)
    if structure is not None and not isinstance(structure, (bool, int, str)):
        raise CaptureError(f"the model returns a {type(structure).__name__}, which torch flattens and an emitted program cannot make again: return its tensors in a dict, a tuple or a dataclass")
    return structure


def _named_tuples(structure: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and fields of the named tuples in the user's pytree."""
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        yield type(structure).__name__, structure._fields
    if isinstance(structure, (Mapping, tuple, list)):
        for item in structure.values() if isinstance(structure, Mapping) else structure:
            yield from _named_tuples(item)


def graph_hash(gm: fx.GraphModule) -> str:
    """Hash of what the graph computes: ops, sizes, arguments and parameter names, not source lines."""
    text = [passes.run.__name__]
    for module in (gm, *(m for m in gm.children() if isinstance(m, fx.GraphModule))):
        for node in module.graph.nodes:
            held = [(tuple(map(str, t.shape)), str(t.dtype)) for t in facts.tensors(node)] if "val" in node.meta else []
            target = getattr(node.target, "__name__", str(node.target))
            text.append(f"{node.name} {target} {node.args} {node.kwargs} {held} {node.meta.get('fqn')} {node.meta.get('repeat')}")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _to_meta(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, tree)


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
