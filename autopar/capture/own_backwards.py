"""Functions with a backward of their own (`torch.autograd.Function`), in models that train.

torch.export traces their forward and differentiates that: a rounding whose backward hands the gradient on would train
with zeros, and nothing would say so. So while a model is traced, such a function is first tried on random tensors of
the sizes of the call. Where autograd of its forward gives the same gradients as its own backward, nothing is done.
Otherwise its backward b is kept: where b is linear in the gradient g, b(g) = J^T g for a matrix J, and x -> J x, the
derivative of b with respect to g in direction x, has b as its backward. The result y becomes `y + (J x - J x)` with
everything but the first J x detached: the value y, with the gradient b(g). These are ordinary operators, and are split
like others. A function for which neither is right (a backward that clips, or adds a constant) is refused.

A forward is traced as plain code, not by `apply`: that runs it under no_grad, which the trace would record only partly.
Re-entrant checkpoints are traced as if they were not there, since the search decides which blocks are run again.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from autopar._torch import pytree
from autopar.capture._torch import OF_MODELS, functions_applied
from autopar.capture.leaves import tensors_of
from autopar.capture.lines import caller
from autopar.capture.traced_apart import aside
from autopar.errors import CaptureError
from autopar.tensors import as_real, differentiable

TOLERANCE = 1e-4
"""The largest error of a result or gradient in a trial, relative to its largest value."""
NOTHING = 1e-6
"""Values up to this count as zero, relative to the largest value of any result or gradient of a trial."""
Draw = tuple[Callable[..., Tensor], int]
DRAWS: tuple[Draw, ...] = tuple(
    (floating, whole)
    for whole in (2, 1)
    for floating in (torch.randn, torch.rand, lambda shape: torch.randn(shape) / 100)
)
"""The inputs of trials: how floating values are drawn, and the number of different integers (indices may have to be
small)."""
SCALES = (2.0**-13, 2.0**8)
"""Of gradients in trials, beside 1: those of a mean over a batch are small, and a backward may cut off small or large
ones. Powers of two, which round nothing."""
LARGE = 1e30
"""Dtypes with larger numbers have gradients of all SCALES."""
ENOUGH = 2
"""The number of trials that must count. A function need not accept all numbers (logarithms, angles of short vectors): a
trial counts if its gradients are finite and not all zero."""
Call = Callable[[type[Function], Sequence[Any]], Any]
"""A way to call a function."""


@contextmanager
def own_backwards(notes: list[str]) -> Iterator[None]:
    """A context in which every torch.autograd.Function that is not torch's own is traced with its own backward. Notes
    on functions whose backward was kept are added to `notes`.

    Raises CaptureError, inside, where a backward cannot be kept, or the function does not run on random numbers.
    """
    tracing, known = threading.current_thread(), dict[Any, bool]()

    def apply(original: Callable[..., Any], cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not tracing or not torch.is_grad_enabled():
            return original(cls, *args, **kwargs)
        if kwargs or cls.setup_context is not Function.setup_context:
            args = _by_position(cls, args, kwargs)
        if cls is CheckpointFunction:
            return once(*args)
        if not any(map(_wants_gradient, args)):
            with torch.no_grad():
                return _differentiated_forward(cls, args)
        key = (cls, *map(_spec, args))
        if key not in known:
            known[key] = not is_torchs(cls) and _way_to_trace(cls, args, original) is _with_own_backward
            if known[key]:
                notes.append(f"{cls.__qualname__} keeps its own backward ({caller()})")
        return _traced_with_own_backward(cls, args) if known[key] else _differentiated_forward(cls, args)

    with functions_applied(apply):
        yield


def once(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """What a re-entrant checkpoint gives (`CheckpointFunction.apply`), without running again. As there, nothing has a
    gradient where no input has one."""
    with nullcontext() if any(map(_wants_gradient, args)) else torch.no_grad():
        return run(*args)


def _by_position(cls: type[Function], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a function of the newer kind, which may have names and defaults."""
    bound = inspect.signature(cls.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


def is_torchs(cls: type[Function]) -> bool:
    """Whether a torch.autograd.Function is defined by torch."""
    return cls.__module__.partition(".")[0] == "torch"


def _wants_gradient(arg: Any) -> bool:
    """Whether an argument is a tensor that requires a gradient."""
    return isinstance(arg, Tensor) and arg.requires_grad


def _spec(arg: Any) -> Any:
    """The properties of an argument that a trial depends on, as a key."""
    return (tuple(map(str, arg.shape)), arg.dtype, arg.requires_grad) if isinstance(arg, Tensor) else repr(arg)


def _way_to_trace(cls: type[Function], args: Sequence[Any], original: Callable[..., Any]) -> Call | None:
    """How to trace the function for arguments like `args`: None for its differentiated forward, or
    `_with_own_backward`. Raises CaptureError where neither gives the function's own gradients."""
    said: list[str] = []
    ways: dict[Call | None, list[float]] = {None: [], _with_own_backward: []}
    like = pytree.tree_map(_stand_in, list(args))
    for draw in DRAWS:
        with ThreadPoolExecutor(1) as outside:  # modes are a thread's: nothing of this is traced
            trial = outside.submit(_trial, cls, like, draw, original, ways)
        if (error := trial.exception()) is not None:
            if isinstance(error, _ChangesArguments):
                raise CaptureError(
                    f"{cls.__module__}.{cls.__qualname__} ({caller()}) changes a tensor that it was given (argument "
                    f"{error}) in its backward, and a graph changes buffers in forward alone: change it there, or "
                    "behind the optimizer's step"
                )
            said.append(f"{type(error).__name__}: {error}".splitlines()[0][:200])
            continue
        for way, gap in trial.result().items():
            ways[way].append(gap)
        if len(ways[None]) == ENOUGH:
            break
    for way, found in ways.items():
        if found and max(found) <= TOLERANCE:
            return way
    if any(ways.values()):
        why = (
            "its backward is not linear in the gradient that comes in, or adds to it; autograd makes of its forward "
            f"what differs by {max(ways[None]):.1e}, a linear backward by {max(ways[_with_own_backward]):.1e}"
        )
    else:
        why = f"it does not run on random numbers of the sizes that it is called with: {'; '.join(dict.fromkeys(said))}"
    raise CaptureError(
        f"{cls.__module__}.{cls.__qualname__} ({caller()}) has a backward of its own that cannot be kept: {why}\n"
        "write its forward with operators that autograd differentiates as you want, or make it an operator with "
        "torch.library.custom_op "
        "and register_autograd, which every rank then runs whole"
    )


@dataclass(frozen=True)
class _TensorKind:
    """Sizes, dtype and whether a gradient is required of one tensor argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def drawn(self, draw: Draw) -> Tensor:
        """Random numbers of that kind."""
        floating, whole = draw
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return _of_dtype(self.dtype, floating, self.shape).requires_grad_(self.requires_grad)
        return torch.randint(whole, self.shape).to(self.dtype)


def _of_dtype(dtype: torch.dtype, floating: Callable[..., Tensor], shape: Sequence[int]) -> Tensor:
    """Numbers that `floating` draws for a shape, in a floating or complex dtype: then both parts are drawn."""
    parts = [floating(shape) for _ in range(1 + dtype.is_complex)]
    return (torch.complex(*parts) if dtype.is_complex else parts[0]).to(dtype)


def _stand_in(item: Any) -> Any:
    """An argument for a trial: tensors by shape and dtype, symbolic sizes as numbers."""
    if isinstance(item, torch.SymInt):
        return int(item.node.hint)
    return (
        _TensorKind(tuple(map(_stand_in, item.shape)), item.dtype, item.requires_grad)
        if isinstance(item, Tensor)
        else item
    )


def _trial(
    cls: type[Function], like: Sequence[Any], draw: Draw, original: Callable[..., Any], ways: Iterable[Call | None]
) -> dict[Call | None, float]:
    """For each way of tracing, the largest error of results and gradients against those of the function itself."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        args = pytree.tree_map(lambda x: x.drawn(draw) if isinstance(x, _TensorKind) else x, like)
        truth = _gradients(partial(original, cls), args)
        if not all(torch.isfinite(x).all() for x in truth):
            raise ValueError("its results or gradients are not finite")
        if not any(x.any() for x in truth[-sum(map(_wants_gradient, args)) :]):
            raise ValueError("its gradients are all zero")
        return {way: _error_of_way(way, cls, args, truth) for way in ways}


def _error_of_way(way: Call | None, cls: type[Function], args: Sequence[Any], truth: Sequence[Tensor]) -> float:
    """The largest error of one way against `truth`; infinity where it does not run."""
    try:
        got = _gradients(lambda *given: (_differentiated_forward if way is None else way)(cls, given), args)
    except OF_MODELS:
        return float("inf")
    least = NOTHING * max((float(x.abs().max()) for x in truth if x.numel()), default=0.0)
    return (
        max((_gap(a, b, least) for a, b in zip(got, truth, strict=True)), default=0.0)
        if len(got) == len(truth)
        else float("inf")
    )


def _gap(got: Tensor, wanted: Tensor, least: float) -> float:
    """The largest error of `got`, relative to the largest value of `wanted`, or to `least` where that is larger."""
    if got.shape != wanted.shape or not torch.isfinite(got).all():
        return float("inf")
    gap = float((got - wanted).abs().max()) if wanted.numel() else 0.0
    return gap / max(least, float(wanted.abs().max())) if gap else 0.0


def _gradients(call: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    """The results of `call(*args)`, and the gradients of `args` for random gradients of the results, which are the same
    in every call: of each result alone where there are several, far smaller and far larger ones, and last of all
    results at once. Raises _ChangesArguments where computing them changes one of `args`."""
    wanted = range(len([x for x in _results(call, args) if x.requires_grad]))
    asked = [*([number] for number in wanted if len(wanted) > 1)]
    found = [_derived(call, args, only, 1.0)[1] for only in asked]
    found += [_derived(call, args, wanted, scale)[1] for scale in SCALES]
    outs, of_all = _derived(call, args, wanted, 1.0)
    return [as_real(x.detach()).double() for x in (*outs, *itertools.chain(*found), *of_all)]


def _results(call: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    """The tensors that `call` gives, for copies of the `args` that require gradients: a leaf could not be changed in
    place."""
    with torch.enable_grad():
        return tensors_of(call(*(arg.clone() if _wants_gradient(arg) else arg for arg in args)))


def _derived(
    call: Callable[..., Any], args: Sequence[Any], only: Collection[int], scale: float
) -> tuple[list[Tensor], list[Tensor]]:
    """What `call` gives, and the gradients of `args` for random gradients of those of its results that have one (of
    these `only`), `scale` times as large where their dtype has such numbers; divided by `scale` again."""
    outs = _results(call, args)
    chance = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=chance)
    ups = [_of_dtype(x.dtype, draw, x.shape) if differentiable(x) else None for x in outs]
    pairs = [(x, up) for x, up in zip(outs, ups, strict=True) if up is not None and x.requires_grad]
    pairs = [pair for number, pair in enumerate(pairs) if number in only]
    scale = scale if all(torch.finfo(up.dtype).max > LARGE for _, up in pairs) else 1.0
    asked, versions = [arg for arg in args if _wants_gradient(arg)], _versions(args)
    found: Sequence[Tensor | None] = [None] * len(asked)
    if pairs:
        found = torch.autograd.grad([x for x, _ in pairs], asked, [up * scale for _, up in pairs], allow_unused=True)
    if changed := [number for number, version in _versions(args).items() if version != versions[number]]:
        raise _ChangesArguments(changed[0])
    return outs, [torch.zeros_like(arg) if g is None else g / scale for g, arg in zip(found, asked, strict=True)]


def _versions(args: Sequence[Any]) -> dict[int, int]:
    """Of each tensor among `args`, by its number, how often it was changed in place."""
    return {number: arg._version for number, arg in enumerate(args) if isinstance(arg, Tensor)}


class _ChangesArguments(RuntimeError):
    """A backward that changes an argument of its function in place; the text is the argument's number."""


def _differentiated_forward(cls: type[Function], args: Sequence[Any]) -> Any:
    """The function as torch.export traces it: its forward, differentiated by autograd."""
    return _Context([_wants_gradient(arg) for arg in args]).forward(cls, args)


def _with_own_backward(cls: type[Function], args: Sequence[Any]) -> Any:
    """The result of the function, with its own backward."""
    return _joined(*_results_and_products(cls, *_detached(args)))


def _traced_with_own_backward(cls: type[Function], args: Sequence[Any]) -> Any:
    """`_with_own_backward` while a model is traced. Results and products are traced separately below autograd, because
    the trace of the model cannot see values inside a custom function; the traced operators are then run in the
    trace."""
    plain, needs, comes = _detached(args)
    return _joined(
        *aside(lambda filled, xs: _results_and_products(cls, filled, needs, xs), (plain, comes), detaching=False)
    )


def _detached(args: Sequence[Any]) -> tuple[list[Any], tuple[bool, ...], list[Tensor]]:
    """The arguments detached, whether each requires a gradient, and those that do as they were given."""
    needs = tuple(map(_wants_gradient, args))
    return (
        [arg.detach() if isinstance(arg, Tensor) else arg for arg in args],
        needs,
        [arg for arg, wanted in zip(args, needs, strict=True) if wanted],
    )


def _results_and_products(
    cls: type[Function], args: Sequence[Any], needs: Sequence[bool], comes: Sequence[Tensor]
) -> tuple[list[Any], list[Tensor | None], Any]:
    """The results of the function, flat and without gradients; for each the product J x with the arguments `comes`
    (module docstring), None where it has no gradient; and the pytree of the results."""
    context = _Context(needs)
    with torch.no_grad():
        leaves, tree = pytree.tree_flatten(context.forward(cls, args))
    if context.dirty:
        raise NotImplementedError(f"{cls.__qualname__} changes its inputs in place")
    asked = [
        isinstance(x, Tensor) and differentiable(x) and not any(x is other for other in context.without) for x in leaves
    ]
    ups = [
        torch.zeros_like(x).requires_grad_(wanted) if isinstance(x, Tensor) else None
        for x, wanted in zip(leaves, asked, strict=True)
    ]
    into = [x for x, wanted in zip(ups, asked, strict=True) if wanted and x is not None]
    with torch.enable_grad():
        made = inspect.unwrap(cls.backward)(context, *(x.clone() if isinstance(x, Tensor) else x for x in ups))
    made = made if isinstance(made, tuple) else (made,)
    pairs = [
        (g, x)
        for g, x in zip([g for g, wanted in zip(made, needs, strict=False) if wanted], comes, strict=True)
        if isinstance(g, Tensor) and g.requires_grad
    ]
    found: Sequence[Tensor | None] = [None] * len(into)
    if pairs and into:
        found = torch.autograd.grad(
            [g for g, _ in pairs], into, [x.to(g.dtype) for g, x in pairs], create_graph=True, allow_unused=True
        )
    products = iter(found)
    return leaves, [next(products) if wanted else None for wanted in asked], tree


def _joined(outs: Sequence[Any], times: Sequence[Tensor | None], tree: Any) -> Any:
    """Results whose values are `outs` and whose gradients are those of `times`."""
    plain = [x.detach() if isinstance(x, Tensor) else x for x in outs]
    return pytree.tree_unflatten(
        [x if t is None else x + (t - t.detach()) for x, t in zip(plain, times, strict=True)], tree
    )


class _Context:
    """What a function's forward and backward are given as `ctx`."""

    saved_tensors: tuple[Tensor, ...] = ()

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs)
        self.without: tuple[Tensor, ...] = ()
        self.dirty: tuple[Tensor, ...] = ()

    def forward(self, cls: type[Function], args: Sequence[Any]) -> Any:
        """What `cls` gives, in either of the two ways that functions are written."""
        if cls.setup_context is Function.setup_context:
            return cls.forward(self, *args)
        result = cls.forward(*args)
        cls.setup_context(self, tuple(args), result)
        return result

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.without = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        self.dirty = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Gradients are always there."""

    def save_for_forward(self, *tensors: Tensor) -> None:
        """Forward-mode derivatives are not asked for."""
