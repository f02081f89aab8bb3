"""torch.export on the shadow, and what it says turned into the contract: roles, names, symbols, outputs."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export import export as torch_export
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from autopar._torch import export_errors, pytree, quietly, without_fake_cache
from autopar.capture.assigned import assigned, buffers_of, put_back, write_back
from autopar.capture.bags import bags_of_samples
from autopar.capture.batched import batched
from autopar.capture.chance import draws, where_drawn
from autopar.capture.devices import on_meta
from autopar.capture.dims import Dims
from autopar.capture.emptied import nothing_of_nothing
from autopar.capture.failures import advice, as_it_is, described, made_numbers, of_values, says, why_static
from autopar.capture.guards import passing_guards
from autopar.capture.hooks import refusing_hooks
from autopar.capture.inside import traced_forward, why_untraced
from autopar.capture.leaves import by_field
from autopar.capture.lengths import Rows, symbolic_lengths
from autopar.capture.lines import source
from autopar.capture.own_backwards import own_backwards
from autopar.capture.picking import Picking
from autopar.capture.shadow import WithLoss
from autopar.capture.spans import TRIED, Fixed, span
from autopar.errors import CaptureError
from passes._torch import make_graph_module, shape_check

ROLES = {InputKind.PARAMETER: "param", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "constant",
         InputKind.USER_INPUT: "input"}
LEAVES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float, str)
"""What outputs may be of."""
MANY = 256  # modules: from about twenty blocks on, operators come again often enough for torch's cache of fake tensors to pay (measured)
UNPICKED = ("branches on whether a mask picks anything are taken as if it did: where it does not (an expert that no token chose) parameters have gradients of zero, where the model leaves "
            "none, so that optimizers with momentum or weight decay move them as they move all others")
INNER = f"{WithLoss.INNER}."  # what stands before original names where a loss function was added


def export(fresh: Callable[[], nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], dims: Dims, *, training: bool) -> tuple[ExportedProgram, Dims, list[str], dict[str, str]]:
    """Export what `fresh` makes, anew for each attempt, for models keep what they computed, with as many symbolic dims as it allows: a dim that it fixes becomes
    static, with a note. `training`: gradients are to be right. Gives the notes, and what outputs are that leave the graph, by name.

    Raises CaptureError with the model's source line when it cannot be exported at all, and says so where that is because the model does not run.
    """
    notes: list[str] = []
    flat, tree = pytree.tree_flatten((args, kwargs))
    failure: BaseException | None = None
    numbers: set[str] = set()  # sizes that the model makes numbers: it is not traced with them once more, least of all with a loop over positions at the user's own size
    attempts, least = deque(_weaker(dims)), None  # so many rows, at least, are taken to be picked by any mask
    while attempts:
        tried = attempts.popleft()
        if not numbers.isdisjoint(tried.hints):
            continue
        inputs, named = pytree.tree_unflatten(tried.stand_ins(flat), tree)
        shapes = pytree.tree_unflatten(tried.shapes(flat), tree) if tried.hints else None
        kept: list[str] = []
        left_out: dict[str, str] = {}
        model = fresh()
        _name_keywords(model, kwargs)
        _assigned_buffers(model)
        _one_size(model, tried)
        _plain_outputs(model, left_out)
        try:
            with (quietly(), on_meta(), passing_guards(kept), _no_new_buffers(model), _cache(model), symbolic_lengths(model, *_functions(model)), bags_of_samples(), batched(training=training),
                  traced_forward() as taken, _as_differentiated(kept) if training else nullcontext(), draws() as drawn, nullcontext() if least is None else Picking(check=shape_check, least=least)):
                program = torch_export(model, tuple(inputs), named, dynamic_shapes=_spell(model, shapes), strict=False)
                if drawn:
                    _refuse_draws(fresh(), tuple(inputs), named)
        except export_errors() as error:
            if why := why_untraced(error, taken, dict(inspect.signature(model.forward).bind(*inputs, **named).arguments)):
                raise CaptureError(f"{_class(model)} cannot be exported: {why}") from error
            if least != 1 and of_values(error) and (least is None or nothing_of_nothing(fresh(), tuple(inputs), named)):
                least = 0 if least is None else 1
                attempts.appendleft(tried)
                continue
            if failure is None:
                _refuse_what_does_not_run(fresh, ((tuple(inputs), named), (args, kwargs)), dims, error)
            failure = failure or error
            numbers |= made_numbers(error)
            continue
        if tried.loose:
            try:
                allowed = span(program, tried.of, tried.loose, tried.hints[tried.loose], tried.limits.get(tried.loose))
            except Fixed:
                allowed = None
                numbers.add(tried.loose)
            if allowed is None:
                continue
            notes += [f"{tried.loose} may be {allowed}: {says(failure, dims)}"] if allowed.most < (tried.limits.get(tried.loose) or TRIED) or allowed.step > 1 else []
            tried = replace(tried, steps={tried.loose: allowed.step} if allowed.step > 1 else {})
        if least and training:
            notes.append(UNPICKED)
        fixed = [name for name in dims.hints if name not in tried.hints]
        if fixed:
            notes.append(why_static(failure, fixed, dims, model))
        return program, tried, notes + kept, left_out
    assert failure is not None
    place = source(failure, model)
    raise CaptureError(f"{_class(model)} cannot be exported: {says(failure, dims)}\n{place}; {advice(failure, place)}") from failure


def _refuse_what_does_not_run(fresh: Callable[[], nn.Module], sizes: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]], dims: Dims, failure: Exception) -> None:
    """Raise CaptureError if a model fails on its inputs without being traced as it did when it was, on the same line: no other dims would help. `sizes` are the inputs
    at small sizes and, for these may be long, last at those of the user."""
    for args, kwargs in sizes:
        model = fresh()
        own = as_it_is(model, args, kwargs)
        place = source(own, model)
        if own is None or type(own) is not type(failure) or place != source(failure, model):
            return
    raise CaptureError(f"{_class(model)} does not run on these inputs: {says(own, dims)}\n{place}; it was called as it is, not traced: "
                       f"look at the config and at the inputs, got {described(args, kwargs)}") from own


def _refuse_draws(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
    """Raise CaptureError, with the line where a model draws random numbers that its graph would repeat."""
    raise CaptureError(f"{_class(model)} cannot be captured: it draws random numbers of Python's or of numpy's generator, and its graph would have the same ones in every step\n"
                       f"{where_drawn(model, args, kwargs) or 'where it is traced'}; draw them with torch (torch.rand), turn that off in its config, or pass what is drawn as an input")


def _name_keywords(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Give `forward` parameters of their own for inputs that go into its `**kwargs`: torch.export counts those twice."""
    forward, signature = model.forward, inspect.signature(model.forward)
    extra = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs if name not in signature.parameters]
    if extra:
        def named(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        kept = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        _becomes(model, named, signature.replace(parameters=[*kept, *extra]))


def _becomes(model: nn.Module, forward: Callable[..., Any], signature: inspect.Signature) -> None:
    """Give `model` another forward, with the signature that others are to see."""
    forward.__signature__ = signature  # type: ignore[attr-defined]  # what inspect.signature reads
    model.forward = forward


def _one_size(model: nn.Module, dims: Dims) -> None:
    """Let `forward` begin by saying that all dims of one name have one size: where nothing else compares them, two inputs one behind the other would have
    a size of two symbols."""
    forward = model.forward

    def same(*args: Any, **kwargs: Any) -> Any:
        flat = pytree.tree_leaves((args, kwargs))
        for name in dims.hints:
            first, *others = [flat[index].shape[dim] for index, each in dims.of.items() for dim, named in each.items() if named == name]
            for size in others:
                shape_check(size == first)
        return forward(*args, **kwargs)

    _becomes(model, same, inspect.signature(forward))


def _assigned_buffers(model: nn.Module) -> None:
    """Let `forward` end by writing what it assigned to buffers into them."""
    forward, functions = model.forward, [function for function in _functions(model) if isinstance(function, nn.Module)]

    def written(*args: Any, **kwargs: Any) -> Any:
        before, of_functions = buffers_of(model), [buffers_of(function) for function in functions]
        result = forward(*args, **kwargs)
        for function, buffers in zip(functions, of_functions, strict=True):
            if names := list(assigned(function, buffers)):
                put_back(function, buffers)
                raise CaptureError(f"loss_fn {type(function).__name__} changes its buffer {names[0]}, and buffers are the model's: make it a part of the model, which then gives the loss")
        write_back(model, before)
        return result

    _becomes(model, written, inspect.signature(forward))


def _plain_outputs(model: nn.Module, left_out: dict[str, str]) -> None:
    """Let `forward` give dicts for dataclasses, and None for what is no tensor and torch.export does not know, and say what it is: caches of keys and values, lists as long as a batch."""
    forward = model.forward

    def plain(*args: Any, **kwargs: Any) -> Any:
        def known(path: Any, leaf: Any) -> Any:
            if leaf is None or isinstance(leaf, LEAVES):
                return leaf
            left_out[_label(path)] = "is a list with an item for each sample" if isinstance(leaf, Rows) else f"is a {type(leaf).__name__}"
            return None

        return pytree.tree_map_with_path(known, by_field(forward(*args, **kwargs)))

    _becomes(model, plain, inspect.signature(forward))


@contextmanager
def _no_new_buffers(model: nn.Module) -> Iterator[None]:
    """Inside, what `forward` registers is a plain attribute: torch.export takes a new buffer for a change of the first input."""
    register = nn.Module.register_buffer

    def keep(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        if name in module._buffers:
            register(module, name, tensor, persistent)
        else:
            vars(module)[name] = tensor

    for module in model.modules():
        for name in [name for name, tensor in module._buffers.items() if tensor is None]:
            vars(module)[name] = module._buffers.pop(name)
    with mock.patch.object(nn.Module, "register_buffer", keep):
        yield


def _cache(model: nn.Module) -> AbstractContextManager[None]:
    """With torch's cache of fake tensors or without it, whichever takes less time for this model."""
    return nullcontext() if sum(1 for _ in model.modules()) > MANY else without_fake_cache()


@contextmanager
def _as_differentiated(notes: list[str]) -> Iterator[None]:
    """The graph that is traced has the gradients of the model."""
    with refusing_hooks(), own_backwards(notes):
        yield


def _class(model: nn.Module) -> str:
    """The user's class, also where a loss function was added."""
    return type(getattr(model, WithLoss.INNER, model)).__name__


def _functions(model: nn.Module) -> list[Callable[..., Any]]:
    """The loss function, where one was added."""
    return [vars(model)["loss_fn"]] if isinstance(model, WithLoss) else []


def _spell(model: nn.Module, shapes: Any) -> Any:
    """`dynamic_shapes` as torch.export wants them: by the names of forward's parameters."""
    if shapes is None:
        return None
    positional, named = shapes
    arguments: dict[str, Any] = _listed(dict(inspect.signature(model.forward).bind(*positional, **named).arguments))
    return arguments


def _listed(shapes: Any) -> Any:
    """The same with a list for each structure that is a class of the user's own (a registered dataclass), as torch.export wants it."""
    if isinstance(shapes, dict):
        return {key: _listed(item) for key, item in shapes.items()}
    if type(shapes) in (list, tuple):
        return type(shapes)(_listed(item) for item in shapes)
    parts = pytree.tree_leaves(shapes, is_leaf=lambda item: item is not shapes)
    own = dataclasses.is_dataclass(shapes) and not isinstance(shapes, type) and any(part is not shapes for part in parts)
    return [_listed(part) for part in parts] if own else shapes


def _weaker(dims: Dims) -> list[Dims]:
    """The dims as asked; then with one size left to the model's conditions, that of the batch last, at a stand-in or, where those are not met by the user's own size, at that;
    then with fewer symbolic ones, the batch left to conditions there, too."""
    found = [dims, *_loosened(dims, sorted(dims.hints, key=lambda name: name in dims.of_samples))]
    for name in reversed(list(dims.hints)):
        if len(dims.hints) > 1:
            fewer = dims.without(name)
            found += [fewer, *_loosened(fewer, [other for other in fewer.hints if other in fewer.of_samples])]
    if dims.hints:
        nothing = dims
        for name in dims.hints:
            nothing = nothing.without(name)
        found.append(nothing)
    return found


def _loosened(dims: Dims, names: list[str]) -> list[Dims]:
    return [dims.loosened(name, own=own) for name in names for own in (False, True)]


def to_graph(program: ExportedProgram, dims: Dims, canonical: Callable[[str], str], requires_grad: Mapping[str, bool]) -> fx.GraphModule:
    """The exported graph with the contract's roles, symbols and outputs. Tied parameters become one placeholder."""
    gm = make_graph_module(program.graph_module, program.graph)
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    symbols: dict[str, Any] = {}
    seen: dict[str, fx.Node] = {}
    fixed: dict[str, tuple[int, Any]] = {}
    number, leaves = 0, list[str]()
    for node in [n for n in gm.graph.nodes if n.op == "placeholder"]:
        spec = specs[node.name]
        if spec.kind not in ROLES:
            readers = ", ".join(str(user.target) for user in node.users)
            raise CaptureError(f"{readers} in forward reads a {getattr(spec.arg, 'class_fqn', spec.kind.name)}, which is neither a tensor nor a plain value and cannot be part of a graph; a torch.Generator is left out "
                               "(torch.rand without one draws from the generator that every rank has), others go behind a torch.library.custom_op")
        node.meta["role"] = ROLES[spec.kind]
        if node.meta["role"] == "input":
            leaves.append(node.name)
        if node.meta["role"] == "input" and not isinstance(spec.arg, TensorArgument):
            fixed[node.name] = (number, getattr(spec.arg, "value", None))  # a plain value (use_cache=False): it is part of the graph
            number += 1
            gm.graph.erase_node(node)
            continue
        if node.meta["role"] == "input":
            node.meta["input"] = node.name
            for dim, name in dims.of.get(number, {}).items():
                symbols.setdefault(name, node.meta["val"].shape[dim].node.expr)
            number += 1
            continue
        name = canonical(spec.target.removeprefix(INNER))
        node.meta["fqn"] = name
        node._rename(node.name.replace(f"_{WithLoss.INNER}_", "_"))
        node.meta["requires_grad"] = requires_grad.get(name, False)
        if node.meta["role"] == "constant":  # derivatives by torch.func make some that know how they came about
            node.meta["val"] = node.meta["val"].detach()
        if name in seen:
            node.replace_all_uses_with(seen[name])
            gm.graph.erase_node(node)
        else:
            seen[name] = node
    gm.meta.update(symbols=symbols, fixed=fixed, leaves=leaves, steps=dims.steps)
    gm.meta["constants"] = {name.removeprefix(INNER): value.detach() if isinstance(value, torch.Tensor) else value for name, value in program.constants.items()}
    _mend_places(gm)
    gm.meta["outputs"] = _outputs(program, gm)
    gm.graph = copy.deepcopy(gm.graph)  # names as all copies have them, for plans go by names, and none twice: export's are those of arguments, builtins (`input`) and operators (`mean`) too
    gm.recompile()
    return gm


def _mend_places(gm: fx.GraphModule) -> None:
    """Module paths and source lines as the user knows them: without our own wrapper and frames."""
    here = re.compile(rf'\s*File "{re.escape(str(Path(__file__).parent))}/[^\n]*(\n(?!\s*File)[^\n]*)*')
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            stack = node.meta.get("nn_module_stack") or {}
            node.meta["nn_module_stack"] = {
                key: (path.removeprefix(INNER) if path != WithLoss.INNER else "", kind) for key, (path, kind) in stack.items()}
            node.meta["stack_trace"] = here.sub("", node.meta.get("stack_trace") or "")


def _outputs(program: ExportedProgram, gm: fx.GraphModule) -> list[dict[str, str]]:
    """One entry per output that is a tensor; names follow the user's pytree. The others leave the graph."""
    names = _names(program.call_spec.out_spec)
    specs = program.graph_signature.output_specs
    unknown = [spec.kind.name for spec in specs if spec.kind != OutputKind.USER_OUTPUT]
    if unknown:
        raise CaptureError(f"the exported graph has an output of kind {unknown[0]}, which autopar does not know")
    (output,) = [node for node in gm.graph.nodes if node.op == "output"]
    kept = [i for i, spec in enumerate(specs) if isinstance(spec.arg, TensorArgument)]
    output.args = (tuple(output.args[0][i] for i in kept),)
    return [{"name": names[i], "kind": "output", "target": ""} for i in kept]


def structure(program: ExportedProgram) -> tuple[Any, dict[str, str]]:
    """The user's pytree of outputs with numbers of tensor outputs as leaves, and what is left out, by name. What is no tensor
    stays as it is, but for numbers, which would pass for those of outputs: they become None."""
    leaves: list[Any] = []
    left_out: dict[str, str] = {}
    number = 0
    for name, spec in zip(_names(program.call_spec.out_spec), program.graph_signature.output_specs, strict=True):
        value = getattr(spec.arg, "value", spec.arg)
        if isinstance(spec.arg, TensorArgument):
            leaves.append(number)
            number += 1
        else:
            leaves.append(value if value is None or isinstance(value, (str, bool)) else None)
            left_out |= {name: "is no tensor"} if leaves[-1] is not value else {}
    return pytree.tree_unflatten(leaves, program.call_spec.out_spec), left_out


def _names(spec: Any) -> list[str]:
    return list(named_leaves(pytree.tree_unflatten(list(range(spec.num_leaves)), spec)))


def named_leaves(tree: Any) -> dict[str, Any]:
    """`loss`, `logits`, `states.0` for the leaves of a pytree, in order."""
    return {_label(path): leaf for path, leaf in pytree.tree_flatten_with_path(tree)[0]}


def _label(path: Any) -> str:
    return re.sub(r"^\.|['\]]", "", pytree.keystr(path).replace("['", ".").replace("[", ".")) or "output"
