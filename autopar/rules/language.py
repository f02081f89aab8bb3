"""The rule language: an operator's index structure as a string, and its options on one mesh axis.

    "... i, o i -> ... o"        operands -> outputs; each word is a tensor dim, named by its *factor*
    f!                           the factor must stay whole
    (h d)                        a dim that is the product of factors, major first: a cut of h is contiguous, one of d
                                 cuts each section
    {q|k|v}                      a dim that is a concatenation of factors: they are cut together, each in its section
    1                            a dim that is never split (size 1, broadcast)
    (nothing)                    a scalar; before the arrow also: no operands
    + (before an operand)        it is added to the outputs, as a bias is: where they are partial sums, so is it
    ...                          any number of leading dims; with broadcasting, missing or size-1 dims do not have the
                                 factor
    f@name                       splitting f needs the runtime algorithm `name`; it then counts as a reduction over f

A factor that an output lacks is summed over (or reduced by `Rule.reduce`): splitting it gives a partial result.
`matches.options` makes of a rule all options of a node on one axis. Written as layout of the value / layout of its
gradient (the table in docs/how-it-works.md):

    split f        operands that have f at dim d: S(d)/S(d); operands that lack it: R/P; outputs: S(d)/S(d) where they
                   have f, else P/R, and then added operands are P/R too
    replicate      R/R everywhere
    pass gradient  values replicated, gradients partial: R/P everywhere (any backward is linear in the gradient)
    pass partial   operators that are linear in their operands: P/R -> P/R"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias

import sympy

from autopar.errors import RuleError
from autopar.layout import Entry, shard
from autopar.rules.local import SIZED

Size: TypeAlias = int | sympy.Expr
Shape = tuple[Size, ...]
Together = Sequence[tuple[tuple[str, ...], str]]  # (factors that one axis cuts at the same time, the runtime algorithm)

_WORD = re.compile(r"\.\.\.|\([^)]*\)|\{[^}]*\}|[^\s]+")


@dataclass(frozen=True, slots=True)
class Use:
    """The layout of a value on one mesh axis, and that of its gradient (`"-"` where it has none)."""

    value: Entry
    grad: Entry

    def __str__(self) -> str:
        return f"{self.value}|{self.grad}"


@dataclass(frozen=True, slots=True)
class Option:
    """What a node does on one mesh axis.

    `factor` is its name: the factor that is split (`"b"`, `"o/3"` for three sections), `""` for replicated, `"grad"`
    for partial gradients, `"P"` and operand numbers for partial sums. `ins` has one use per tensor operand, in argument
    order, `outs` one per tensor output. `run` is the runtime algorithm that computes it, "" where the operator itself
    is called on shards. `cuts` is the share of the FLOPs that the split divides among the ranks; the rest is done by
    each of them."""

    factor: str
    ins: tuple[Use, ...]
    outs: tuple[Use, ...]
    run: str = ""
    split: bool = False  # whether the work divides by the size of the axis
    cuts: float = 1.0


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of one tensor: the product of its factors, major first (`join` "x"), or their concatenation (`join`
    "|")."""

    factors: tuple[str, ...]
    join: str = "x"


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed rule string, not yet fitted to shapes.

    `ins` and `outs` have the dims of each operand and output (None stands for "..."), `added` says which operands are
    added to the outputs, `whole` lists the factors marked `!`, and `runs` those marked `@` with their runtime
    algorithm."""

    ins: tuple[tuple[Dim | None, ...], ...]  # None stands for "..."
    outs: tuple[tuple[Dim | None, ...], ...]
    added: tuple[bool, ...]
    whole: tuple[str, ...]
    runs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Call:
    """One call of an operator as rules see it: `args` and `kwargs` have a `Tensor` for each tensor operand, and other
    arguments unchanged."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Tensor, ...]

    @cached_property
    def ins(self) -> tuple[Tensor, ...]:
        """The tensor operands in argument order (args, then kwargs; lists flattened)."""
        found: list[Tensor] = []
        _collect((self.args, tuple(self.kwargs.values())), found)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as rules see it: its shape (ints or sympy expressions), whether it has a gradient, its sizes at the
    planned batch (`hint`, empty where the shape is static), whether it holds floating-point numbers, and the bytes of
    one element."""

    shape: Shape
    grad: bool = True
    hint: tuple[int, ...] = ()
    floating: bool = True
    itemsize: int = 4

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes at the planned batch: the hint, or the shape where that is static."""
        return self.hint or tuple(int(n) for n in self.shape)


def _collect(tree: Any, found: list[Tensor]) -> None:
    """Append the Tensors of nested arguments to `found`, in order."""
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, found)


@cache
def parse(text: str) -> Spec:
    """Parse a rule string. Raises RuleError where it is malformed."""
    if text.count("->") != 1:
        raise RuleError(f"rule {text!r} must have exactly one '->'")
    marks: dict[str, str] = {}
    left, right = (side.strip() for side in text.split("->"))
    operands = [part.strip() for part in left.split(",")]  # an empty one is a scalar
    added = tuple(part.startswith("+") for part in operands)
    ins = tuple(_operand(part.removeprefix("+"), marks, text) for part in operands)
    outs = tuple(_operand(part, marks, text) for part in right.split(","))
    whole = tuple(f for f, mark in marks.items() if mark == "!")
    runs = tuple((f, mark[1:]) for f, mark in marks.items() if mark[:1] == "@")
    for dims in (*ins, *outs):
        names = [f for dim in dims if dim is not None for f in dim.factors if f not in (*whole, "1")]
        if twice := next((f for f in names if names.count(f) > 1), ""):
            raise RuleError(
                f"rule {text!r}: factor {twice} is twice in one tensor, and an axis cuts one dim of a tensor: give the "
                f"dims a name each, or mark it whole ({twice}!)"
            )
    return Spec(ins, outs, added, whole, runs)


def _operand(part: str, marks: dict[str, str], text: str) -> tuple[Dim | None, ...]:
    """The dims of one operand or output, written as `part` of the rule `text`; marks of factors are added to
    `marks`."""
    dims: list[Dim | None] = []
    for word in _WORD.findall(part):
        if word[0] in "({" and word[-1] != {"(": ")", "{": "}"}[word[0]]:
            raise RuleError(f"rule {text!r}: {word!r} is not closed")
        if word == "...":
            dims.append(None)
        elif word[0] == "(":
            dims.append(Dim(tuple(_factor(w, marks, text) for w in word[1:-1].split())))
        elif word[0] == "{":
            dims.append(Dim(tuple(_factor(w.strip(), marks, text) for w in word[1:-1].split("|")), "|"))
        else:
            dims.append(Dim((_factor(word, marks, text),)))
    if dims.count(None) > 1:
        raise RuleError(f"rule {text!r}: more than one '...' in {part.strip()!r}")
    return tuple(dims)


def _factor(word: str, marks: dict[str, str], text: str) -> str:
    """The factor of a word such as `f`, `f!` or `f@name`; its mark is added to `marks`."""
    match = re.fullmatch(r"([A-Za-z]\w*|1)(!|@\w+)?", word)
    if not match:
        raise RuleError(f"rule {text!r}: {word!r} is not a factor (a name, with ! or @algorithm, or 1)")
    name, mark = match.groups()
    if mark and marks.setdefault(name, mark) != mark:
        raise RuleError(f"rule {text!r}: factor {name} is marked {marks[name]!r} and {mark!r}; wanted one of them")
    return name


Place = tuple[int, Entry] | None  # (tensor dim, entry) where a factor sits in one tensor


class FittedRule:
    """A rule fitted to the shapes of one call: the size of each factor, and where it is in each tensor.

    Raises RuleError where the rule does not fit: another number of operands or dims, or sizes that contradict each
    other."""

    def __init__(self, spec: Spec, call: Call, text: str) -> None:
        self.spec, self.call = spec, call
        if len(spec.ins) != len(call.ins) or len(spec.outs) != len(call.outs):
            raise RuleError(
                f"rule {text!r} for {call.target}: it has {len(spec.ins)} operands and {len(spec.outs)} outputs, "
                f"the call {len(call.ins)} and {len(call.outs)}"
            )
        rank = max([len(t.shape) - len(d) + 1 for d, t in self._pairs() if None in d], default=0)
        self.ins = tuple(_spread(d, t, rank, text) for d, t in zip(spec.ins, call.ins, strict=True))
        self.outs = tuple(_spread(d, t, rank, text) for d, t in zip(spec.outs, call.outs, strict=True))
        self.sizes: dict[str, int] = {}
        self.symbolic: dict[str, bool] = {}
        for dims, tensor in zip((*self.ins, *self.outs), (*call.ins, *call.outs), strict=True):
            for dim, size, shape in zip(dims, tensor.sizes, tensor.shape, strict=True):
                if len(dim.factors) == 1:
                    self._see(dim.factors[0], size, not isinstance(shape, int), text)
        self._solve_compounds(text)
        self._check_outputs(text)

    def _pairs(self) -> list[tuple[tuple[Dim | None, ...], Tensor]]:
        return [*zip(self.spec.ins, self.call.ins, strict=True), *zip(self.spec.outs, self.call.outs, strict=True)]

    def _see(self, factor: str, size: int, symbolic: bool, text: str) -> None:
        """Note the size of a factor in one tensor. Raises RuleError where it has another size in another tensor."""
        if factor == "1":
            return
        if self.sizes.setdefault(factor, size) != size:
            raise RuleError(
                f"rule {text!r} for {self.call.target}: factor {factor} is {self.sizes[factor]} in one tensor "
                f"and {size} in another"
            )
        self.symbolic[factor] = self.symbolic.get(factor, False) or symbolic

    def _solve_compounds(self, text: str) -> None:
        """Find the sizes of factors that occur only in dims of several factors: a dim with one unknown factor gives its
        size, but not where the known ones make a product of 0. What no dim gives counts as 1: such a factor is in empty
        dims alone.

        Raises RuleError where the factors of a dim do not make up its size."""
        pending = [
            (dim, size, not isinstance(shape, int))
            for dims, t in zip((*self.ins, *self.outs), (*self.call.ins, *self.call.outs), strict=True)
            for dim, size, shape in zip(dims, t.sizes, t.shape, strict=True)
            if len(dim.factors) > 1
        ]
        for _ in range(len(pending) + 1):
            for dim, size, symbolic in pending:
                unknown = [f for f in dim.factors if f not in self.sizes and f != "1"]
                if len(unknown) == 1:
                    known = [self.sizes[f] for f in dim.factors if f in self.sizes]
                    if dim.join == "|":
                        self._see(unknown[0], size - sum(known), symbolic, text)
                    elif product := math.prod(known):
                        self._see(unknown[0], size // product, symbolic, text)
        for dim, size, _ in pending:
            if not size and dim.join == "x":
                for factor in dim.factors:
                    self.sizes.setdefault(factor, 1)
            known = [self.sizes.get(f, 1) for f in dim.factors]
            if (
                all(f in self.sizes or f == "1" for f in dim.factors)
                and (sum(known) if dim.join == "|" else math.prod(known)) != size
            ):
                raise RuleError(
                    f"rule {text!r} for {self.call.target}: factors {', '.join(dim.factors)} of sizes {known} do not "
                    f"make a dim of {size}"
                )

    def _check_outputs(self, text: str) -> None:
        """Raise RuleError where a factor that may be cut occurs in outputs alone: a rank cannot compute a shard of such
        an output from operands that all lack the factor."""
        given = {f for dims in self.ins for dim in dims for f in dim.factors}
        made = {f for dims in self.outs for dim in dims for f in dim.factors} - given - {*self.spec.whole, "1"}
        if made and self.call.target not in SIZED:
            raise RuleError(
                f"rule {text!r} for {self.call.target}: factor {min(made)} is in outputs and in no operand, so that a "
                f"rank would compute all of it: keep it whole ({min(made)}!), or name the dim of an operand that it "
                "comes from"
            )

    def place(self, factor: str, dims: Sequence[Dim]) -> Place:
        """The dim of a tensor in which `factor` is, with the layout entry that cuts it there; None where the tensor
        lacks it."""
        for index, dim in enumerate(dims):
            if factor in dim.factors and dim.join == "x":
                before = math.prod(self.sizes[f] for f in dim.factors[: dim.factors.index(factor)] if f != "1")
                return index, shard(index, (1,) * before)
        return None

    def divides(self, factor: str, ways: int) -> bool:
        """Whether `factor` may be cut over `ways` ranks: only evenly where its size is symbolic or it is in a dim of
        several factors; else so that no rank's shard is empty (convolutions, pools and norms refuse empty tensors)."""
        size = self.sizes[factor]
        if self.symbolic[factor] or not self.plain(factor):
            return size % ways == 0
        return size > -(-size // ways) * (ways - 1)

    def plain(self, factor: str) -> bool:
        """Whether every dim that has `factor` consists of it alone."""
        return all(len(d.factors) == 1 for dims in (*self.ins, *self.outs) for d in dims if factor in d.factors)

    def groups(self) -> list[tuple[str, ...]]:
        """Factors that are cut together: those of each concatenated dim; every other factor by itself."""
        joint: list[tuple[str, ...]] = []
        for dims in (*self.ins, *self.outs):
            joint += [d.factors for d in dims if d.join == "|" and d.factors not in joint]
        taken = {f for group in joint for f in group}
        return joint + [(f,) for f in self.sizes if f not in taken]


def _spread(dims: Sequence[Dim | None], tensor: Tensor, rank: int, text: str) -> tuple[Dim, ...]:
    """The dims of one tensor with `...` written out: named from the right, up to `rank` dims, and `1` where the
    tensor's size is 1 (broadcast)."""
    extra = len(tensor.shape) - (len(dims) - 1 if None in dims else len(dims))
    if extra < 0 or (None not in dims and extra):
        raise RuleError(f"rule {text!r}: operand written with {len(dims)} dims has shape {tensor.shape}")
    out: list[Dim] = []
    for dim in dims:
        if dim is not None:
            out.append(dim)
            continue
        names = [Dim((f"_{rank - extra + i}",)) for i in range(extra)]
        at = len(out)
        out += [Dim(("1",)) if tensor.shape[at + i] == 1 else d for i, d in enumerate(names)]
    return tuple(out)
