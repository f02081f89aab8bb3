"""Private names of torch that capture alone uses, each with its reason; see autopar._torch."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary, StackSummary
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.autograd import Function
from torch.export import ExportedProgram
from torch.utils._sympy.value_ranges import ValueRanges  # what a symbolic size may be

from autopar._torch import copied


@dataclass(frozen=True)
class Conditions:
    """The conditions on sizes that an exported program assumes: `texts` as Python expressions in the names of `names`,
    which are sizes of inputs."""

    texts: tuple[str, ...]
    names: Mapping[str, torch.SymInt]


def conditions(program: ExportedProgram, dims: Mapping[int, Mapping[int, str]]) -> Conditions | None:
    """The conditions of `program`, in the names that `dims` gives to the dims of each input; None where two sizes have
    one name, or a size has none.

    torch keeps them for its checks of inputs (`_guards_code`), with where each size is read (`source_to_var`); neither
    has a public name."""
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"][
        -len(program.graph_signature.user_inputs) :
    ]
    sizes = [(name, values[number].shape[dim]) for number, each in dims.items() for dim, name in each.items()]
    names = {name: size for name, size in sizes if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol}
    if any(str(size) != str(names.get(name)) for name, size in sizes if name in names) or not names:
        return None
    found = {str(size): name for name, size in names.items()}
    environment = next(iter(names.values())).node.shape_env
    symbols = {place: str(environment.replace(symbol)) for place, symbol in environment.source_to_var.items()}
    places = {place: found.get(symbol, symbol) for place, symbol in symbols.items()}
    pattern = re.compile("|".join(re.escape(place) for place in sorted(places, key=len, reverse=True)))
    texts = dict.fromkeys(pattern.sub(lambda match: places[match.group()], text) for text in program._guards_code)
    return Conditions(tuple(texts), names)


def narrow(size: torch.SymInt, least: int, most: int) -> None:
    """Restrict the range of `size` to `least` to `most`, without a condition in the graph. torch has a public function
    only for sizes that depend on data."""
    size.node.shape_env.var_to_range[size.node.expr] = ValueRanges(least, most)


def backward_hooks_of_all_modules() -> bool:
    """Whether hooks of the backward are registered for every module there is (`register_module_full_backward_hook`).
    torch has public functions that register them, and none that says so."""
    from torch.nn.modules import module

    return bool(module._global_backward_hooks or module._global_backward_pre_hooks)


OF_MODELS = (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError)
"""Errors that a model's own code may raise where it is traced, or runs without values, in the other training mode, or
with fewer blocks."""


def export_errors() -> tuple[type[Exception], ...]:
    """The types of errors that torch.export raises when a model, or one of its symbolic dims, cannot be exported; the
    model's own errors are among them. The base class of dynamo's errors, and the errors on symbolic shapes, have no
    public names."""
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

    return TorchDynamoException, ConstraintViolationError, GuardOnDataDependentSymNode, *OF_MODELS


@contextmanager
def quietly() -> Iterator[None]:
    """A context in which torch.export does not print the graph of a failed export, and does not log what its error says
    anyway. There is no public way to silence it."""
    from torch.export import _trace

    with (
        mock.patch.object(_trace, "print", lambda *_, **__: None, create=True),
        mock.patch.object(logging.getLogger("torch.fx.experimental.symbolic_shapes"), "disabled", True),
        mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),
    ):
        yield


@contextmanager
def let_go() -> Iterator[None]:
    """A context after which nothing of torch holds what torch.export made in it, whether it succeeded or not.

    The environment of its symbolic sizes has a list of the fake inputs, whose sizes have the environment: a cycle
    through C++, which Python's collector does not see. For graphs of torch.compile torch ends it so, too; for
    torch.export it has no way. And methods of environments remember their last calls, with the environment, in caches
    of the class."""
    from torch._export import non_strict_utils

    kind, made = non_strict_utils.ShapeEnv, list[Any]()

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(kind(*args, **kwargs))
        return made[-1]

    with mock.patch.object(non_strict_utils, "ShapeEnv", noted):
        try:
            yield
        finally:
            for environment in made:
                environment.tracked_fakes = None
            for method in vars(kind).values():
                if hasattr(method, "cache_clear"):
                    method.cache_clear()


def past_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called so that modes of torch functions that are on see nothing of what it does."""

    def quick(*args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction():
            return function(*args, **kwargs)

    return quick


dtype_of = past_modes(torch.Tensor.dtype.__get__)  # type: ignore[attr-defined]  # a property in C
"""The dtype of a tensor. Each mode that is on would see that it is asked for, which takes as long as a small
operator."""


@contextmanager
def fakes_past_modes() -> Iterator[None]:
    """A context in which torch.export makes fake tensors of weights and inputs past modes of torch functions. These
    would see every attribute that it reads of each, which takes longer than all else about it."""
    from torch.export import _trace

    with ExitStack() as stack:
        for name in ("_fakify_params_buffers", "make_fake_inputs"):
            stack.enter_context(mock.patch.object(_trace, name, past_modes(getattr(_trace, name))))
        yield


@contextmanager
def zeros_without_past() -> Iterator[None]:
    """A context in which fake tensors are made of tangents that are zero (`_efficientzerotensor`, of forward-mode
    derivatives) without how these came about. Where one is a view of another, in a derivative of a derivative, torch
    makes a fake tensor without a past and then refuses it for that."""
    from torch._subclasses.fake_tensor import FakeTensorConverter

    made = FakeTensorConverter.from_real_tensor

    def from_real_tensor(self: Any, mode: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return made(self, mode, tensor.detach() if tensor._is_zerotensor() else tensor, *args, **kwargs)

    with mock.patch.object(FakeTensorConverter, "from_real_tensor", from_real_tensor):
        yield


class _Callers:
    """The stack without frames of torch, in place of a CapturedTraceback, which torch asks at once."""

    FOLDER = str(Path(torch.__file__).parent)

    @classmethod
    def extract(cls) -> _Callers:
        """Of whoever asks."""
        return cls()

    def summary(self) -> StackSummary:
        """The frames, the innermost last."""
        found, frame = list[FrameSummary](), inspect.currentframe()
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(self.FOLDER):  # asked first: a frame's line takes longer to find
                found.append(FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False))
            frame = frame.f_back
        return StackSummary(reversed(found))


@contextmanager
def stacks_of_callers() -> Iterator[None]:
    """A context in which traced nodes say who called torch, and nothing of torch's own frames. torch looks up the text
    of every frame, of which there are a hundred for each operator, and then drops nearly all. It offers to record
    either all of that or nothing."""
    from torch.fx import proxy

    with mock.patch.object(proxy, "CapturedTraceback", _Callers):
        yield


@contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """A context in which torch.distributions do not check their arguments. The setting has a public setter, but no
    public getter to restore it by."""
    from torch.distributions import Distribution

    with mock.patch.object(Distribution, "_validate_args", False):
        yield


@contextmanager
def masks_unread() -> Iterator[None]:
    """A context in which torch.nn's transformers do not look whether a mask is causal, which has no values here: they
    compute the same with the mask as with the hint that it is."""
    from torch.nn.modules import transformer

    def hinted(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    with mock.patch.object(transformer, "_detect_is_causal_mask", hinted):
        yield


@contextmanager
def tracing() -> Iterator[None]:
    """A context in which `torch.compiler.is_compiling()` and `is_exporting()` are true, as under torch.export, which
    sets the same two flags. Model code asks them before it uses kernels that need real tensors."""
    flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags


def below_autograd(body: Callable[..., list[Tensor]], inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """The graph of the operators that `body(*inputs)` runs on fake tensors, traced below autograd: operators of a
    backward inside it are recorded too. torch.export traces above autograd and does not see these."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import make_fx

    modes = dict.fromkeys(x.fake_mode for x in inputs if isinstance(x, FakeTensor))
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        program: torch.fx.GraphModule = make_fx(body, tracing_mode="real")(*inputs)
    return program


def getitem_modes() -> list[Any]:
    """The active modes in which a tensor without dims is a valid index, and is not converted to a number. Models enter
    such a mode around functions of single samples."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.overrides import _get_current_function_mode_stack

    return [mode for mode in _get_current_function_mode_stack() if isinstance(mode, TransformGetItemToIndex)]


def items_are_indices() -> AbstractContextManager[None]:
    """A context in which a tensor without dims is a valid index, and is not converted to a number; flex_attention
    enters it around the functions that it is given."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    mode: AbstractContextManager[None] = TransformGetItemToIndex()
    return mode


def flex_attention_by(own: Callable[..., Any], attend: Callable[..., Any]) -> Callable[..., Any]:
    """`own`, torch's flex_attention, with its kernels replaced by `attend(query, key, value, score_mod, block_mask,
    scale, kernel_options)`, for any device. `attend` returns the attention, and the log-sum-exp and the maximum of the
    scores, both to the base 2. The checks of arguments and the form of the results are torch's, which have no other
    public name."""
    found: Callable[..., Any] = copied(
        own, flex_attention_hop=attend, _validate_device=lambda *_: None, _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True
    )
    return found


def _instead(*_: Any, **__: Any) -> Any:
    """A placeholder for the function that `_elsewhere` calls; `redirected` replaces the name in its code."""


def _elsewhere(*args: Any, **kwargs: Any) -> Any:
    """Its code replaces that of a redirected function."""
    return _instead(*args, **kwargs)


@contextmanager
def redirected(function: Any, to: Callable[..., Any]) -> Iterator[None]:
    """A context in which calls of `function`, a function written in Python, go to `to`, under whatever name other
    modules have imported it. Only a change of its code object reaches all of these names."""
    code, defaults, named = function.__code__, function.__defaults__, function.__kwdefaults__
    place = f"_instead_of_{function.__name__}"
    function.__globals__[place] = to
    function.__code__, function.__defaults__, function.__kwdefaults__ = (
        _elsewhere.__code__.replace(co_names=(place,)),
        None,
        None,
    )
    try:
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, named
        del function.__globals__[place]


@contextmanager
def vmap_replaced(run: Callable[..., Any]) -> Iterator[None]:
    """A context in which every call of a function made by `torch.vmap` becomes `run(original, func, in_dims, out_dims,
    randomness, chunk_size, args=..., kwargs=...)`."""
    from torch._functorch import apis

    original = apis.vmap_impl
    with mock.patch.object(
        apis, "vmap_impl", lambda *given, **kwargs: run(original, *given[:5], args=given[5:], kwargs=kwargs)
    ):
        yield


@contextmanager
def functions_applied(run: Callable[..., Any]) -> Iterator[None]:
    """A context in which every `apply(*args)` of a torch.autograd.Function becomes `run(original, cls, *args)`.
    `apply` is a class method, and stubs do not say what of."""
    original: Callable[..., Any] = Function.apply.__func__  # type: ignore[attr-defined]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return run(original, cls, *args, **kwargs)

    with mock.patch.object(Function, "apply", classmethod(apply)):
        yield


@contextmanager
def sizes_fixed(note: Callable[[int], None]) -> Iterator[None]:
    """A context in which `note(number)` is called where a symbolic size becomes a number, in the code that does so."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    original = ShapeEnv._set_replacement

    def replaced(self: Any, symbol: Any, by: Any, *given: Any) -> None:
        if by.is_Integer:
            note(int(by))
        original(self, symbol, by, *given)

    with mock.patch.object(ShapeEnv, "_set_replacement", replaced):
        yield


def code_when_asked() -> AbstractContextManager[None]:
    """A context in which new graph modules compile their Python code when it is first needed, not after every change.
    torch.compile does so for its own graphs."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)
