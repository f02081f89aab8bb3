"""torch.export of the shadow model, in attempts with fewer and fewer symbolic dims. Called by capture.capture."""

from __future__ import annotations

import dataclasses
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export import export as torch_export

from autopar._torch import pytree, without_fake_cache
from autopar.capture._torch import (
    export_errors,
    fakes_past_modes,
    let_go,
    quietly,
    stacks_of_callers,
    zeros_without_past,
)
from autopar.capture.autocast import refuse_regions
from autopar.capture.bags import bags_of_samples
from autopar.capture.batched import batched
from autopar.capture.devices import on_meta
from autopar.capture.dims import LEAST_POSITIONS, Dims
from autopar.capture.empty_branches import nothing_of_nothing
from autopar.capture.equal_masks import EqualMasks
from autopar.capture.failures import advice, as_it_is, described, made_numbers, of_values, says, why_static
from autopar.capture.forwards import (
    assigned_buffers,
    becomes,
    current_weights,
    functions_of,
    known_buffers,
    name_keywords,
    no_new_buffers,
    one_size,
)
from autopar.capture.hooks import refusing_hooks
from autopar.capture.inside import traced_forward, why_untraced
from autopar.capture.known_masks import KnownMasks
from autopar.capture.leaves import by_field
from autopar.capture.lengths import Rows, symbolic_lengths
from autopar.capture.lines import noting_fixed_sizes, source
from autopar.capture.mask_branches import Picking
from autopar.capture.own_backwards import own_backwards
from autopar.capture.python_random import draws, where_drawn
from autopar.capture.shadow import WithLoss
from autopar.capture.spans import LARGEST_TRIED_SIZE, Fixed, span, unkept
from autopar.capture.to_graph import label
from autopar.capture.torch_forwards import KnownCombinations, WholeLosses
from autopar.capture.value_checks import passing_guards
from autopar.errors import CaptureError
from passes._torch import shape_check, unasked_layouts

LEAVES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float, str)
"""The types that leaves of outputs may have."""
CACHED_MODULES = 200
"""Models with more modules are traced with torch's cache of fake tensors: from about fifteen blocks on, the same
operators come again often enough for it to pay (measured: the 254 modules of ResNet-50 take 7.5 s with it and 8.9 s
without, the 43 of Mixtral 3.7 s and 3.3 s)."""
# the note of a model of which one branch was traced (capture.mask_branches)
UNPICKED = (
    "branches on whether a mask picks anything are taken as if it did: where it does not (an expert that no token "
    "chose) parameters have gradients of zero, where the model leaves none, so that optimizers with momentum or "
    "weight decay move them as they move all others"
)


def export(
    fresh: Callable[[], nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dims: Dims,
    *,
    training: bool,
    masks: KnownMasks,
) -> tuple[ExportedProgram, Dims, list[str], dict[str, str]]:
    """The exported program, with as many symbolic dims as the model allows; a dim that the model fixes becomes static,
    with a note.

    `fresh` makes the model, anew for each attempt because models cache what they compute. `training`: gradients must be
    right. `masks` counts the rows that masks select where their values follow from sizes. Returns the program, its
    dims, notes, and by name the outputs that the graph cannot have, with what they are.

    Raises CaptureError with the model's source line where it cannot be exported at all, or does not run on its inputs
    even untraced."""
    return _Exporting(fresh, args, kwargs, dims, training, masks).exported()


@dataclass(eq=False)
class _Trial:
    """One attempt to export.

    dims        the symbolic dims of this attempt
    model       a new model, with a forward that torch.export accepts
    args, kwargs, shapes    its inputs at stand-in sizes, and torch.export's dynamic_shapes for them
    notes       notes for the user
    left_out    outputs that the graph cannot have, by name
    taken       lines of the user that compute gradients (capture.inside)
    """

    dims: Dims
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: Any
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    taken: Any = None


@dataclass(eq=False)
class _Exporting:
    """The export of one model, in attempts. The first fields are the arguments of `export`.

    failures    whether floating inputs have the sequence in dim 1 (Dims.wide) -> the first error of such an attempt
    conditions  size whose range was left open -> the error of the last such attempt
    notes       notes for the user
    numbers     (wide, symbol) pairs of which the model made a number: not tried again, because a loop over positions
                would then be traced at the user's size
    least       the least number of rows that any mask is assumed to select; None before any assumption
    """

    fresh: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dims: Dims
    training: bool
    masks: KnownMasks
    failures: dict[bool, BaseException] = field(default_factory=dict)
    conditions: dict[str, BaseException] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    numbers: set[tuple[bool, str]] = field(default_factory=set)
    least: int | None = None

    def exported(self) -> tuple[ExportedProgram, Dims, list[str], dict[str, str]]:
        """The result of the first attempt that succeeds. Raises CaptureError where none does, with the error of the
        last one: it has no symbolic dims, so that its error is of the model and not of dims that were guessed."""
        attempts = deque(_dims_to_try(self.dims))
        while True:
            dims = attempts.popleft()
            if any((wide, name) in self.numbers for wide in (False, dims.wide) for name in dims.hints):
                continue
            trial = self._trial(dims)
            try:
                program = self._traced(trial)
            except export_errors() as error:
                if self._picks_otherwise(trial, error):
                    attempts.appendleft(dims)
                elif not attempts:
                    _refuse_what_does_not_run(self.fresh, ((self.args, self.kwargs),), self.dims, error)
                    place = source(error, trial.model)
                    raise CaptureError(
                        f"{_user_class(trial.model)} cannot be exported: {says(error, self.dims)}\n{place}; "
                        f"{advice(error, place)}"
                    ) from error
                continue
            if self._holds(trial, program):
                return program, trial.dims, self._noted(trial), trial.left_out

    def _trial(self, dims: Dims) -> _Trial:
        """A new model, with its forward changed to one that torch.export accepts."""
        flat, tree = pytree.tree_flatten((self.args, self.kwargs))
        args, kwargs = pytree.tree_unflatten(dims.stand_ins(flat), tree)
        trial = _Trial(
            dims,
            self.fresh(),
            tuple(args),
            kwargs,
            pytree.tree_unflatten(dims.shapes(flat), tree) if dims.hints else None,
        )
        name_keywords(trial.model, self.kwargs)
        assigned_buffers(trial.model)
        known_buffers(trial.model)
        current_weights(trial.model)
        one_size(trial.model, dims)
        _plain_outputs(trial.model, trial.left_out)
        return trial

    def _traced(self, trial: _Trial) -> ExportedProgram:
        """The exported program of one attempt. Raises torch's errors, and CaptureError where the model draws random
        numbers of Python or numpy, or computes under autocast in another dtype."""
        model = trial.model
        picks = nullcontext() if self.least is None else Picking(check=shape_check, least=self.least)
        with (
            quietly(),
            noting_fixed_sizes(),
            let_go(),
            fakes_past_modes(),
            stacks_of_callers(),
            zeros_without_past(),
            on_meta() as regions,
            passing_guards(trial.notes),
            no_new_buffers(model),
            _without_cache_if_small(model),
            symbolic_lengths(model, *functions_of(model)),
            bags_of_samples(),
            unasked_layouts(),
            batched(training=self.training),
            traced_forward() as trial.taken,
            _as_differentiated(trial.notes) if self.training else nullcontext(),
            draws() as drawn,
            picks,
            self.masks,
            _modes(),
        ):
            program = torch_export(
                model, trial.args, trial.kwargs, dynamic_shapes=_dynamic_shapes(model, trial.shapes), strict=False
            )
            refuse_regions(_user_class(model), model, regions)
            if drawn:
                _refuse_draws(self.fresh(), trial.args, trial.kwargs)
        return program

    def _picks_otherwise(self, trial: _Trial, error: Exception) -> bool:
        """Whether to try the same dims again with another assumption of how many rows masks select (`least`); else
        `error` is recorded. Raises CaptureError where no attempt could succeed."""
        if why := why_untraced(
            error, trial.taken, dict(inspect.signature(trial.model.forward).bind(*trial.args, **trial.kwargs).arguments)
        ):
            raise CaptureError(f"{_user_class(trial.model)} cannot be exported: {why}") from error
        if (
            self.least != 1
            and of_values(error)
            and (self.least is None or nothing_of_nothing(self.fresh(), trial.args, trial.kwargs))
        ):
            self.least = 0 if self.least is None else 1
            return True
        if not self.failures:
            _refuse_what_does_not_run(
                self.fresh, ((trial.args, trial.kwargs), (self.args, self.kwargs)), self.dims, error
            )
        self.failures.setdefault(trial.dims.wide, error)
        if trial.dims.loose:
            self.conditions[trial.dims.loose] = error
        self.numbers |= {(trial.dims.wide, name) for name in made_numbers(error)}
        return False

    def _holds(self, trial: _Trial, program: ExportedProgram) -> bool:
        """Whether the program is right for all sizes of its dims. Where the range of one size was left open, finds it,
        and records it in the dims and a note."""
        dims = trial.dims
        if not dims.loose:
            if wanted := unkept(program, dims.of):
                self.failures.setdefault(dims.wide, ValueError(f"the model works only where {wanted}"))
            return not wanted
        try:
            allowed = span(program, dims.of, dims.loose, dims.hints[dims.loose], dims.limits.get(dims.loose))
        except Fixed:
            self.numbers.add((dims.wide, dims.loose))
            return False
        if allowed is None:
            self.conditions[dims.loose] = ValueError(
                f"the model works only where {dims.loose} is {dims.hints[dims.loose]} (a loop over parts of it)"
            )
            return False
        if allowed.most < (dims.limits.get(dims.loose) or LARGEST_TRIED_SIZE) or allowed.step > 1:
            self.notes.append(
                f"{dims.loose} may be {allowed}: {says(self.failures.get(dims.wide), self.dims, dims.loose)}"
            )
        if dims.wide and dims.loose in dims.of_samples:
            self.notes.append(f"s is at least {LEAST_POSITIONS}: with fewer positions the model may do something else")
        trial.dims = replace(dims, steps={dims.loose: allowed.step} if allowed.step > 1 else {})
        return True

    def _noted(self, trial: _Trial) -> list[str]:
        """All notes for the user."""
        picked = [UNPICKED] if self.least and self.training else []
        fixed = [name for name in self.dims.hints if name not in trial.dims.hints]
        # the error of the attempt with an open range says best why a size is fixed
        why = next(
            (self.conditions[name] for name in fixed if name in self.conditions), self.failures.get(trial.dims.wide)
        )
        static = [why_static(why, fixed, self.dims, trial.model)] if fixed else []
        return [*self.notes, *picked, *static, *trial.notes]


def _refuse_what_does_not_run(
    fresh: Callable[[], nn.Module],
    sizes: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]],
    dims: Dims,
    failure: Exception,
) -> None:
    """Raise CaptureError if the untraced model fails with the same type of error on the same line as the traced one,
    for each of the inputs in `sizes` (ordered by cost): other dims would not help."""
    for args, kwargs in sizes:
        model = fresh()
        own = as_it_is(model, args, kwargs)
        place = source(own, model)
        if own is None or type(own) is not type(failure) or place != source(failure, model):
            return
    raise CaptureError(
        f"{_user_class(model)} does not run on these inputs: {says(own, dims)}\n{place}; it was called as it is, not "
        f"traced: look at the config and at the inputs, got {described(args, kwargs)}"
    ) from own


def _refuse_draws(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
    """Raise CaptureError, with the user's line, where a model draws random numbers of Python or numpy: they would be
    constants of the graph."""
    raise CaptureError(
        f"{_user_class(model)} cannot be captured: it draws random numbers of Python's or of numpy's generator, and "
        "its graph would have the same ones in every step\n"
        f"{where_drawn(model, args, kwargs) or 'where it is traced'}; "
        "draw them with torch (torch.rand), turn that off in its config, or pass what is drawn as an input"
    )


def _plain_outputs(model: nn.Module, left_out: dict[str, str]) -> None:
    """Change `forward` to return dicts for dataclasses, and None for objects that torch.export does not know (caches of
    keys and values, lists as long as a batch), which are recorded in `left_out`."""
    forward = model.forward

    def plain(*args: Any, **kwargs: Any) -> Any:
        def known(path: Any, leaf: Any) -> Any:
            if leaf is None or isinstance(leaf, LEAVES):
                return leaf
            left_out[label(path)] = (
                "is a list with an item for each sample" if isinstance(leaf, Rows) else f"is a {type(leaf).__name__}"
            )
            return None

        return pytree.tree_map_with_path(known, by_field(forward(*args, **kwargs)))

    becomes(model, plain, inspect.signature(forward))


@contextmanager
def _modes() -> Iterator[None]:
    """A context in which functions of torch give what can be traced and split."""
    with EqualMasks(), WholeLosses(), KnownCombinations():
        yield


def _without_cache_if_small(model: nn.Module) -> AbstractContextManager[None]:
    """A context that turns torch's cache of fake tensor operators off for small models, where it costs more than it
    saves."""
    return nullcontext() if sum(1 for _ in model.modules()) > CACHED_MODULES else without_fake_cache()


@contextmanager
def _as_differentiated(notes: list[str]) -> Iterator[None]:
    """A context in which the traced graph has the gradients of the model: custom backwards are kept, hooks are
    refused."""
    with refusing_hooks(), own_backwards(notes):
        yield


def _user_class(model: nn.Module) -> str:
    """The name of the user's class, also where it is wrapped with a loss function."""
    return type(getattr(model, WithLoss.INNER, model)).__name__


def _dynamic_shapes(model: nn.Module, shapes: Any) -> Any:
    """`dynamic_shapes` by the names of forward's parameters, as torch.export takes them."""
    if shapes is None:
        return None
    positional, named = shapes
    arguments: dict[str, Any] = _listed(dict(inspect.signature(model.forward).bind(*positional, **named).arguments))
    return arguments


def _listed(shapes: Any) -> Any:
    """`dynamic_shapes` with a list for each registered dataclass of the user, as torch.export requires."""
    if isinstance(shapes, dict):
        return {key: _listed(item) for key, item in shapes.items()}
    if type(shapes) in (list, tuple):
        return type(shapes)(_listed(item) for item in shapes)
    parts = pytree.tree_leaves(shapes, is_leaf=lambda item: item is not shapes)
    own = (
        dataclasses.is_dataclass(shapes) and not isinstance(shapes, type) and any(part is not shapes for part in parts)
    )
    return [_listed(part) for part in parts] if own else shapes


def _dims_to_try(dims: Dims) -> list[Dims]:
    """The dims to try, in order: as asked; with floating inputs that may have the sequence; with the range of one size
    left open (the batch last), at a stand-in or, where that fails the model's conditions, at the user's size; the same
    with fewer symbols; none symbolic."""
    wide, names = dims.widened(), sorted(dims.hints, key=lambda name: name in dims.of_samples)
    found = [dims, *wide, *(each.loosened(name, own=False) for each in wide for name in names), *_loosened(dims, names)]
    for name in reversed(list(dims.hints)):
        if len(dims.hints) > 1:
            fewer = dims.without(name)
            found += [fewer, *_loosened(fewer, [other for other in fewer.hints if other in fewer.of_samples])]
    return [*found, Dims()] if dims.hints else found


def _loosened(dims: Dims, names: list[str]) -> list[Dims]:
    """`dims` with each of `names` left open, at a stand-in and at the user's size."""
    return [dims.loosened(name, own=own) for name in names for own in (False, True)]
