"""What `model.eval()` changes: does the graph of a training step say how the model evaluates, too?

    y = F.dropout(x, 0.1, self.training)      # one flag: the graph has the operator, and evaluation leaves it out
    if self.training: y = y * torch.rand(b)   # a random factor, which evaluation leaves out, too (stochastic depth)
    if self.training: y = y + z               # other operators: evaluation is another graph

The model runs once in each mode on tensors without values. Every value has a number by what it is computed of, flags aside, so that equal numbers are equal
expressions; where all results have those of training, evaluation is the graph with its flags off, and without changes of buffers that evaluation does not make.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar._torch import fake_mode, pytree, tracing
from autopar.capture.alike import INNER
from autopar.capture.devices import changes, on_meta
from autopar.capture.failures import caller
from autopar.capture.flags import FLAGS
from autopar.capture.outer import fake
from autopar.capture.shadow import shadow
from passes.noises import DRAWN, VALUE, kind_of

UNTOLD = (RuntimeError, NotImplementedError, LookupError, TypeError, ValueError, AttributeError)
"""What a model raises that cannot run without values, or not in the other mode."""


@dataclass(frozen=True)
class Evaluation:
    """How a captured model evaluates: with the flags of its functions off, if `why` is empty; else why not. `changing` are the buffers that evaluation
    changes, too, `noises` counts the products with random factors that it leaves out (`passes.noises`), and `differs` says whether it is another thing than training at all."""

    why: str = ""
    changing: tuple[str, ...] = ()
    noises: int = 0
    differs: bool = False


NAMED = (bool, int, float, str, bytes, complex, slice, range, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(...))
"""What arguments are compared by value; of others the type is."""


DRAWING = ("bernoulli", "bernoulli_", "normal", "normal_", "rand", "rand_like", "randn", "randn_like", "uniform_")
SHAPED = ("empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like", "randn_like", "zeros_like")
"""They read the sizes of their operand only."""
PRODUCTS = ("__imul__", "__mul__", "__rmul__", "mul", "mul_", "multiply", "multiply_")
QUOTIENTS = ("__itruediv__", "__truediv__", "div", "div_", "divide", "true_divide")


def evaluation(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Evaluation:
    """How `model`, a shadow that is in training, evaluates inputs on meta; it stays as it is."""
    inputs, numbers = (args, dict(kwargs)), dict[Hashable, int]()
    try:
        evaluated = _played(shadow(model).eval(), inputs, numbers)
        for leaving_out in (False, True):
            trained = _played(shadow(model), inputs, numbers, leaving_out=leaving_out)
            same = evaluated.result == trained.result and all(trained.states.get(name) == state for name, state in evaluated.states.items())
            if same and not evaluated.on:
                differs = bool(trained.on or trained.noises or trained.states.keys() - evaluated.states.keys())
                return Evaluation(changing=tuple(evaluated.states), noises=trained.noises, differs=differs)
        again = _played(shadow(model).eval(), inputs, numbers, known=dict.fromkeys(trained.made))
    except UNTOLD as error:
        return Evaluation(f"it does not run without values, to see what evaluation changes: {(str(error).strip() or type(error).__name__).splitlines()[0][:200]}", differs=True)
    return Evaluation(again.on or again.other or "evaluation leaves out parts of what training computes", differs=True)


def _played(model: nn.Module, inputs: Any, numbers: dict[Hashable, int], known: Mapping[int, None] | None = None, *, leaving_out: bool = False) -> _Tape:
    """The tape of one run of `model`."""
    tape = _Tape(numbers, known, leaving_out)
    named = dict((*model.named_parameters(), *model.named_buffers()))
    for name, tensor in named.items():
        tape.begin(tensor, ("weight", name))
    for name, module in model.named_modules():
        for i, leaf in enumerate(pytree.tree_leaves({key: value for key, value in vars(module).items() if key not in INNER})):
            if isinstance(leaf, torch.Tensor):
                tape.begin(leaf, ("attribute", name, i))
    with torch.no_grad(), fake_mode(), tracing(), on_meta():
        args, kwargs = fake(inputs)
        for i, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
            if isinstance(leaf, torch.Tensor):
                tape.begin(leaf, ("input", i))
        with tape:
            result = model(*args, **kwargs)
    tape.result = [tape.number(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    tape.states = {name: state for name, buffer in model.named_buffers() if name in named and (state := tape.state(named[name])) is not None}
    return tape


class _Tape(TorchFunctionMode):
    """Numbers what is computed: equal ones are equal expressions of weights and inputs, flags aside.

    result   the numbers of the tensors that the model gives
    states   the buffers that change, and a number for what they become
    made     the numbers of all that functions gave
    on       the first function with a flag on, in words
    other    the first function whose number is not among the `known` ones, in words
    noises   the products with random factors, which have the numbers of what is multiplied where they are left out
    """

    def __init__(self, numbers: dict[Hashable, int], known: Mapping[int, None] | None, leaving_out: bool) -> None:
        super().__init__()
        self.result: list[int] = []
        self.states: dict[str, int] = {}
        self.made: dict[int, None] = {}
        self.on = self.other = ""
        self.noises = 0
        self._numbers, self._known, self._leaving_out = numbers, known, leaving_out
        self._kinds: dict[int, int] = {}
        self._whole: dict[int, int] = {}  # quotients by plain numbers -> what they are of
        self._of: dict[int, int] = {}
        self._changed: dict[int, int] = {}  # by storage: what was done in place, through whichever view
        self._alive: list[torch.Tensor] = []  # the id of a freed tensor would be used again

    def begin(self, tensor: torch.Tensor, key: Hashable) -> None:
        """Number what is there before anything runs."""
        self._note(tensor, self._number(key))

    def number(self, tensor: torch.Tensor) -> int:
        """The number of what `tensor` holds."""
        found = self._of.get(id(tensor), self._number(("unknown", tuple(tensor.shape), tensor.dtype)))
        state = self.state(tensor)
        return found if state is None else self._made(("changed", found, state), (found, state))

    def state(self, tensor: torch.Tensor) -> int | None:
        """What was done in place to the memory of `tensor`; None for nothing."""
        return self._changed.get(tensor.untyped_storage()._cdata)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        flag = FLAGS.get(name)
        read = [self.number(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        key: Hashable = (name, *self._flat((args, kwargs) if flag is None else flag.without(args, kwargs)))
        before = read[0] if flag is not None and flag.drops else None
        result = func(*args, **kwargs)
        if before is None and self._leaving_out and name in PRODUCTS:
            before = self._multiplied(read, args, result)
        if flag is not None and not self.on and flag.is_on(args, kwargs):
            self.on = self._says(f"{name} does what it does in training when the model evaluates, too")
        made = self._made(key, () if name in SHAPED else read, drawn=name in DRAWING) if before is None else before
        in_place = changes(func) or kwargs.get("inplace") or kwargs.get("out") is not None
        if in_place and before is None:
            target = kwargs.get("out", args[0])
            self._changed[target.untyped_storage()._cdata] = self._made(("in place", self.state(target), made), (made,))
        if name in QUOTIENTS and len(args) == 2 and isinstance(args[1], (int, float)):
            self._whole[made] = read[0]
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for i, tensor in enumerate(tensors):
            if id(tensor) not in self._of:
                self._note(tensor, made if before is not None or tensor is result else self._made((made, i), (made,)))
        if (tensors or in_place) and before is None:
            self.made[made] = None
            if self._known is not None and made not in self._known and not self.other:
                self.other = self._says(f"{name} computes something that training does not")
        return result

    def _multiplied(self, read: Sequence[int], args: tuple[Any, ...], result: Any) -> int | None:
        """The number of the value of which `result` is the product with a random factor; None where it is no such product."""
        kinds = [self._kinds[number] for number in read]
        if sorted(kinds) != [VALUE, DRAWN]:
            return None
        number, x = read[kinds.index(VALUE)], args[kinds.index(VALUE)]
        if (x.shape, x.dtype) != (result.shape, result.dtype):
            return None
        self.noises += 1
        return self._whole.get(number, number)

    def _made(self, key: Hashable, read: Sequence[int], *, drawn: bool = False) -> int:
        """The number of what is made of what has the numbers `read`."""
        number = self._number(key)
        self._kinds[number] = kind_of((self._kinds[one] for one in read), drawn=drawn)
        return number

    def _says(self, what: str) -> str:
        return f"{what} ({caller()})" if self._known is not None else what

    def _note(self, tensor: torch.Tensor, number: int) -> None:
        self._of[id(tensor)] = number
        self._alive.append(tensor)

    def _number(self, key: Hashable) -> int:
        number = self._numbers.setdefault(key, len(self._numbers))
        self._kinds.setdefault(number, VALUE)
        return number

    def _flat(self, tree: Any) -> list[Hashable]:
        return [self.number(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf).__name__, repr(leaf) if isinstance(leaf, NAMED) else "")
                for leaf in pytree.tree_leaves(tree)]
