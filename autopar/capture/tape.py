"""Value numbering of a model that runs without values: values with equal numbers are equal expressions of weights and
inputs. Used by evaluation, step_variation and empty_branches to compare runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar._torch import memory_of, pytree
from autopar.capture._torch import functions_applied, masks_unread, past_modes, tracing, vmap_replaced
from autopar.capture.assigned import assigned, buffers_of, why_unlike
from autopar.capture.block_runs import INNER
from autopar.capture.by_tensor import ByTensor
from autopar.capture.checkpoints import checkpoints_watched
from autopar.capture.devices import changed, on_meta
from autopar.capture.flags import FLAGS
from autopar.capture.known_masks import KnownMasks
from autopar.capture.leaves import by_field, leaves_of, tensors_of
from autopar.capture.lines import caller
from autopar.capture.mask_branches import Picking
from autopar.capture.noting_numbers import plain
from autopar.capture.outer_code import fake
from autopar.capture.valueless import valueless
from passes.noises import DRAWN, VALUE, kind_of

NAMED = (
    bool,
    int,
    float,
    str,
    bytes,
    complex,
    slice,
    range,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(None),
    type(...),
)
"""Arguments of these types are compared by value, all others by their type."""

DRAWING = ("bernoulli", "bernoulli_", "normal", "normal_", "rand", "rand_like", "randn", "randn_like", "uniform_")
"""Functions that draw factors of noise."""
OTHER_DRAWS = (
    "binomial",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "poisson",
    "randint",
    "randint_like",
    "random_",
    "randperm",
)
"""Further functions whose results are drawn at random."""
EVERY_STEP = "every step"
"""The source of values that are others in every step: inputs, random draws, and weights that train."""
SIZES_READ = (
    "empty_like",
    "full_like",
    "new_empty",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones_like",
    "rand_like",
    "randn_like",
    "zeros_like",
)
"""Functions that read only the sizes of their operand."""
FIRST_READ = ("expand_as", "reshape_as", "to", "type_as", "view_as")
"""Functions that read the values of their first operand alone; of another one its sizes or dtype."""
SAME_ELEMENTS = (
    "__getitem__",
    "clone",
    "contiguous",
    "expand",
    "expand_as",
    "narrow",
    "reshape",
    "reshape_as",
    "view",
    "view_as",
)
"""Functions whose result has all elements of the operand where it has the operand's sizes, and so the operand's number:
a mask cut from a longer one, which may be just as long; values that only training reorders."""
# products and quotients of two operands
PRODUCTS = ("__imul__", "__mul__", "__rmul__", "mul", "mul_", "multiply", "multiply_")
QUOTIENTS = ("__itruediv__", "__truediv__", "div", "div_", "divide", "true_divide")


def played(
    model: nn.Module,
    inputs: Any,
    numbers: dict[Hashable, int],
    known: Mapping[int, None] | None = None,
    *,
    leaving_out: bool = False,
    kept: Tape | None = None,
    picking: Picking | None = None,
) -> Tape:
    """The tape of one run of `model`, which keeps what the run changes in it.

    Expressions have the same numbers as on other tapes with the same table `numbers`. Tensors that an earlier run, on
    the tape `kept`, has made and left in the model keep their numbers where they are made of what is the same in every
    step, and else (of inputs, draws, weights that train, buffers that change) have numbers of their own. With `known`,
    the tape records the first function whose number is not among these. `leaving_out`: products with random factors
    have the number of the value that is multiplied. `picking` says which masks select something."""
    tape, picking, before = Tape(numbers, known, leaving_out, kept), picking or Picking(), buffers_of(model)
    picking.marks.number = tape.number
    named = dict((*model.named_parameters(), *model.named_buffers()))
    for name, tensor in named.items():
        trains = tensor.requires_grad and model.training
        tape.begin(tensor, ("weight", name), (EVERY_STEP if trains else name,))
    for name, module in model.named_modules():
        for i, leaf in enumerate(
            pytree.tree_leaves({key: value for key, value in vars(module).items() if key not in INNER})
        ):
            if isinstance(leaf, torch.Tensor):
                tape.begin(leaf, ("attribute", name, i))
    with torch.no_grad(), valueless(), tracing(), masks_unread(), on_meta():
        tape.held()
        args, kwargs = fake(inputs)
        for i, leaf in enumerate(tensors_of((args, kwargs))):
            tape.begin(leaf, ("input", i), (EVERY_STEP,))
        with (
            checkpoints_watched(lambda: _states(tape, model, named)) as tape.rerun,
            tape,
            picking,
            vmap_replaced(tape.mapped),
            functions_applied(tape.applied),
            KnownMasks(counting=True),
        ):
            result = model(*args, **kwargs)
    tape.result = [tape.number(leaf) for leaf in tensors_of(by_field(result))]
    tape.states = _states(tape, model, named)
    new = assigned(model, before)
    tape.assigned = {name: tape.number(buffer) for name, buffer in new.items()}
    tape.unlike = {name: why for name, buffer in new.items() if (why := why_unlike(buffer, before[name]))}
    return tape


def _states(tape: Tape, model: nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """`Tape.states`, of the tensors that had these names before the run."""
    held = (*model.named_parameters(), *model.named_buffers())
    untrained = dict.fromkeys(name for name, weight in held if name in named and not weight.requires_grad)
    return {name: state for name in untrained if (state := tape.state(named[name])) is not None}


@past_modes
def _is_all(name: str, args: tuple[Any, ...], result: Any) -> bool:
    """Whether a function of SAME_ELEMENTS gave all elements of its operand, in its sizes and dtype."""
    if name == "__getitem__" and not all(
        isinstance(part, slice | type(...)) for part in (args[1] if isinstance(args[1], tuple) else args[1:])
    ):
        return False
    return isinstance(result, torch.Tensor) and (result.shape, result.dtype) == (args[0].shape, args[0].dtype)


class Tape(TorchFunctionMode):
    """Numbers the values of one run. Equal numbers are equal expressions of weights and inputs, training flags ignored.

    numbers  expression -> number, shared with other tapes
    result   the numbers of the tensors that the model returns
    states   buffers, and weights that do not train, that change in place -> a number for their new value
    assigned buffers that are another tensor after the run -> its number
    unlike   those of them whose size or dtype changed, in words
    switched the calls with a training flag on, flags and rates included, in order
    made     the numbers of all results of functions
    on       the first function called with a training flag on, in words
    other    the first function whose number is not among the `known` ones; `where`: the line that calls it
    noises   the number of products with random factors whose factor was left out
    rerun    lines of the user that checkpoint parts which change buffers"""

    def __init__(
        self,
        numbers: dict[Hashable, int],
        known: Mapping[int, None] | None,
        leaving_out: bool,
        kept: Tape | None = None,
    ) -> None:
        super().__init__()
        self.result: list[int] = []
        self.states: dict[str, int] = {}
        self.assigned: dict[str, int] = {}
        self.unlike: dict[str, str] = {}
        self.switched: list[int] = []
        self.made: dict[int, None] = {}
        self.rerun: dict[str, None] = {}
        self.on = self.other = self.where = ""
        self.noises = 0
        self.numbers, self._known, self._leaving_out, self._kept = numbers, known, leaving_out, kept
        self._kinds: dict[int, int] = {}
        self._sources: dict[int, frozenset[str]] = {}  # number -> EVERY_STEP and names of the tensors it is computed of
        self._dividends: dict[int, int] = {}  # number of a quotient by a Python number -> number of its dividend
        self._number_of = ByTensor[int]()
        self._changed: dict[int, int] = {}  # memory -> number of its changes in place, through whichever view
        self._before: list[torch.Tensor] = []  # the tensors that exist before the run
        self._own: set[int] = set()  # memory of what the model had before the run
        self._storages: dict[int, int] = {}  # memory of views in `_views` -> memory of the tensors in `_before`
        self._depth = 0  # how many functions of single samples (torch.vmap) are running, one inside the other
        self._views: list[torch.Tensor] = []  # kept alive: `_storages` has the addresses of their memory

    @property
    def changed(self) -> dict[str, int]:
        """The buffers that have other values after the run, in place or by assignment, with the numbers of these
        values."""
        return self.states | {name: number for name, number in self.assigned.items() if name not in self.unlike}

    def begin(self, tensor: torch.Tensor, key: Hashable, sources: Iterable[str] = ()) -> None:
        """Number a tensor that exists before the run, unless it has a number under another name or from an earlier
        run; its values come from `sources`."""
        self._before.append(tensor)
        if self._had(tensor) is None:
            number = self._number(key)
            self._sources[number] = frozenset(sources)
            self._note(tensor, number)

    def held(self) -> None:
        """Let views of the tensors given to `begin` count as views of their memory, also inside a fake tensor mode, in
        which such views get storages of their own."""
        self._own.update(map(memory_of, self._before))
        for tensor in self._before:
            view = past_modes(tensor.detach)()
            self._views.append(view)
            self._storages[memory_of(view)] = memory_of(tensor)

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the present value of `tensor`."""
        found = self._had(tensor)
        if found is None:
            found = self._number(("unknown", tuple(tensor.shape), tensor.dtype))
        state = self.state(tensor)
        return found if state is None else self._made(("changed", found, state), (found, state))

    def mapped(
        self,
        original: Callable[..., Any],
        func: Callable[..., Any],
        *settings: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A call of a function that `torch.vmap` made. Functions inside see one sample; its values get numbers from
        those of the whole, and the results get numbers from those of the results of one sample."""
        outside = [self.number(leaf) for leaf in tensors_of((args, kwargs))]
        made: list[int] = []
        self._depth += 1

        def one(*args: Any, **kwargs: Any) -> Any:
            for i, (leaf, number) in enumerate(zip(tensors_of((args, kwargs)), outside, strict=True)):
                self.begin(leaf, ("sample", self._depth, i, number, repr(settings)), self._sources.get(number, ()))
            result = func(*args, **kwargs)
            made.extend(self.number(leaf) for leaf in tensors_of(result))
            return result

        try:
            result = original(one, *settings, *args, **kwargs)
        finally:
            self._depth -= 1
        for leaf, number in zip(tensors_of(result), made, strict=False):
            self._note(leaf, self._made(("samples", self._depth, number, repr(settings)), (number,)))
        return result

    def applied(self, original: Callable[..., Any], cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        """A call of a torch.autograd.Function, whose backward may read arguments that its forward does not."""
        given = self._flat((args, kwargs))
        result = original(cls, *args, **kwargs)
        for i, tensor in enumerate(tensors_of(result)):
            number = self.number(tensor)
            made = self._made(("function", cls.__qualname__, i, number, *given), (number,))
            self._note(tensor, made)
            self._add(made, cls.__qualname__)
        return result

    def _had(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor of this run or of the earlier one, without changes in place; None for any other
        tensor."""
        found = self._number_of.get(tensor)
        if found is None and self._kept is not None:
            found = self._kept.left(tensor)
            if found is not None:
                self._kinds.setdefault(found, self._kept._kinds[found])
                self._note(tensor, found)
        return found

    def left(self, tensor: torch.Tensor) -> int | None:
        """The number in a later run of a tensor of this run; None where it is none of this run. Views of what the model
        had before keep theirs: they see what becomes of that."""
        begun = self._number_of.get(tensor)
        if begun is None:
            return None if self._kept is None else self._kept.left(tensor)
        if self._memory(tensor) in self._own:
            return begun
        number = self.number(tensor)
        sources = self._sources.get(number, frozenset())
        return self._number(("left", number)) if sources & {EVERY_STEP, *self.changed} else number

    def state(self, tensor: torch.Tensor) -> int | None:
        """A number for what was done in place to the memory of `tensor`; None where nothing was."""
        return self._changed.get(self._memory(tensor))

    def _memory(self, tensor: torch.Tensor) -> int:
        """The memory of a tensor; for views that `held` made, that of the tensor that they are views of."""
        memory = memory_of(tensor)
        return self._storages.get(memory, memory)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "item" and args[0].is_floating_point():
            return self.number(args[0]) + 0.5  # a number of its own for each expression, and so is what comes of it
        flag = FLAGS.get(name)
        read = [self.number(leaf) for leaf in tensors_of((args, kwargs))]
        key: Hashable = (name, *self._flat((args, kwargs) if flag is None else flag.without(args, kwargs)))
        before = read[0] if flag is not None and flag.drops else None
        result = func(*args, **kwargs)
        if name in SAME_ELEMENTS and _is_all(name, args, result):
            before = read[0]
        if before is None and self._leaving_out and name in PRODUCTS:
            before = self._multiplied(read, args, result)
        if flag is not None and flag.is_on(args, kwargs):
            self.on = self.on or self._says(f"{name} does what it does in training when the model evaluates, too")
            self.switched.append(self._number(("switched", name, *self._flat((args, kwargs)))))
            self._add(self.switched[-1], name)
        sources = () if name in SIZES_READ else read[:1] if name in FIRST_READ else read
        made = self._made(key, sources, drawn=name in DRAWING) if before is None else before
        if before is None and (name in DRAWING or name in OTHER_DRAWS):
            self._sources[made] = self._sources[made] | {EVERY_STEP}
        in_place = changed(func, args, kwargs)
        for i, target in enumerate(in_place if before is None else ()):
            key = ("in place", self.state(target), made, *([i] if i else []))
            self._changed[self._memory(target)] = self._made(key, (made,))
        if name in QUOTIENTS and len(args) == 2 and isinstance(args[1], (int, float)):
            self._dividends[made] = read[0]
        tensors = tensors_of(result)
        for i, tensor in enumerate(tensors):
            if self._had(tensor) is None:
                self._note(tensor, made if before is not None or tensor is result else self._made((made, i), (made,)))
        if (tensors or in_place) and before is None:
            self._add(made, name)
        return result

    def _add(self, made: int, name: str) -> None:
        """Add the number of what the function `name` computes, and note the first one that is not known."""
        self.made[made] = None
        if self._known is not None and made not in self._known and not self.other:
            self.other, self.where = name, caller()

    def _multiplied(self, read: Sequence[int], args: tuple[Any, ...], result: Any) -> int | None:
        """The number of the value of which `result` is the product with a random factor; None where `result` is no such
        product."""
        kinds = [self._kinds[number] for number in read]
        if sorted(kinds) != [VALUE, DRAWN]:
            return None
        number, x = read[kinds.index(VALUE)], args[kinds.index(VALUE)]
        if (x.shape, x.dtype) != (result.shape, result.dtype):
            return None
        self.noises += 1
        return self._dividends.get(number, number)

    def _made(self, key: Hashable, read: Sequence[int], *, drawn: bool = False) -> int:
        """The number of the expression `key`, computed from values with the numbers `read`."""
        number = self._number(key)
        self._kinds[number] = kind_of((self._kinds[one] for one in read), drawn=drawn)
        self._sources[number] = frozenset[str]().union(*(self._sources.get(one, ()) for one in read))
        return number

    def _says(self, what: str) -> str:
        """`what`, with the user's line where this tape looks for one."""
        return f"{what} ({caller()})" if self._known is not None else what

    def _note(self, tensor: torch.Tensor, number: int) -> None:
        """Give a tensor a number."""
        self._number_of.keep(tensor, number)

    def _number(self, key: Hashable) -> int:
        """The number of an expression; a new one where it is met for the first time."""
        number = self.numbers.setdefault(key, len(self.numbers))
        self._kinds.setdefault(number, VALUE)
        return number

    def _flat(self, tree: Any) -> list[Hashable]:
        """The leaves of arguments in comparable form: tensors by number, others by type and, for NAMED, by value."""
        return [
            self.number(leaf)
            if isinstance(leaf, torch.Tensor)
            else (type(leaf).__name__, repr(leaf) if isinstance(leaf, NAMED) else "")
            for leaf in map(plain, leaves_of(tree))
        ]
