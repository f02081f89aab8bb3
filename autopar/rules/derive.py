"""Rules for operators that have no row: guessed from equal sizes, tried by the oracle, else nothing.

A factor is guessed as one dim per tensor, at most, of the same size: `[b, d], [d] -> [b, d]` suggests b and d. Each
guess is tried on random tensors, whole against shards, values and gradients, on several numbers of ranks; only what
always comes out right is kept. Tensors are small, with positive, signed, large and small values, and of the call's own
sizes, or of the largest that are no work. Only for public functional ATen-style operators on floating-point tensors
that draw no random numbers: they are run here, on the CPU, with the arguments of the call.

Trials are no proof: what an operator does from some size or value on they may not meet. Torch's own operators are known
not to be like that; for others this is done where the user asks for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autopar._torch import OpOverload, pytree
from autopar.errors import RuleError
from autopar.rules.language import Call, Tensor
from autopar.rules.oracle import failures
from autopar.rules.rule import Rule

SMALL = (6, 5, 7, 9, 8, 10, 11, 13)  # stand-ins for the distinct sizes of a call
WAYS = (2, 3)
MOST_GUESSES = 64  # per size; a call with more is not worth the time
MOST_ELEMENTS = 1 << 14  # of one operand, where only the call's own sizes will do
LARGEST = 1 << 17  # elements of one operand, in trials at the call's own sizes
SCALES = (1.0, 100.0, 0.01)  # of signed values
# what an operator raises on arguments that it refuses
FAILS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)

Given = tuple[tuple[Any, ...], dict[str, Any]]
Guess = tuple[int | None, ...]  # the dim that has the factor, per operand and output
_KNOWN: dict[Any, Rule | None] = {}


def derive(call: Call) -> Rule | None:
    """A rule for a call, of what came out right in all trials; None where nothing did. The same for the same target,
    sizes and arguments."""
    key = repr((call.target, call.args, sorted(call.kwargs.items()), call.outs))
    if key not in _KNOWN:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _KNOWN[key] = _derive(call) if _eligible(call) else None
    return _KNOWN[key]


def _eligible(call: Call) -> bool:
    target = call.target
    if (
        not isinstance(target, OpOverload)
        or _internal(target)
        or not call.ins
        or not all(t.floating for t in (*call.ins, *call.outs))
    ):
        return False
    schema = target._schema
    pure = not schema.is_mutable and not any(r.alias_info for r in schema.returns)
    unfit = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    return pure and bool(call.outs) and not any(tag in target.tags for tag in unfit)


def _internal(target: OpOverload) -> bool:
    """Whether an operator is torch's own business: such kernels do not check what they are given, and write where they
    should not for shards that do not go together."""
    return target._schema.name.startswith("aten::_")


def _derive(call: Call) -> Rule | None:
    for sizes in _stand_ins(call):
        small = _positive(call, sizes)
        outs = _results(call, small)
        if outs is not None:
            shapes = [tuple(t.shape) for t in [*_operands(small), *outs]]
            return _fitting(call, _kept(call.target, [small, *_harder(call, sizes)], shapes, len(call.ins)))
    return None


def _results(call: Call, given: Given) -> list[torch.Tensor] | None:
    """What the operator makes of other tensors than the call's; None where it does not take them."""
    try:
        outs = _operands(call.target(*given[0], **given[1]))
    except FAILS:
        return None
    return (
        outs
        if len(outs) == len(call.outs) and all(t.ndim == len(o.shape) for t, o in zip(outs, call.outs, strict=True))
        else None
    )


def _stand_ins(call: Call) -> Iterator[dict[int, int]]:
    """Small sizes instead of the call's; its own where they are small enough, for operators whose arguments speak of
    sizes."""
    sizes = _sizes(call)
    if len(sizes) <= len(SMALL):
        yield dict(zip(sizes, SMALL, strict=False))
    if _largest(call, {}) <= MOST_ELEMENTS:
        yield {n: n for n in sizes}


def _sizes(call: Call) -> list[int]:
    return list(dict.fromkeys(n for t in call.ins for n in t.sizes if n > 1))


def _largest(call: Call, sizes: Mapping[int, int]) -> int:
    """Elements of the largest operand at these sizes."""
    return max(math.prod(sizes.get(n, n) for n in t.sizes) for t in call.ins)


def _harder(call: Call, small: Mapping[int, int]) -> list[Given]:
    """Signed, large and small values in small tensors and in large ones, those that the operator takes."""
    found = [_signed(call, sizes, scale) for sizes in (small, _own_sizes(call)) for scale in SCALES]
    return [given for given in found if _results(call, given) is not None]


def _own_sizes(call: Call) -> dict[int, int]:
    """The call's own sizes, the longest of them halved until no operand is too large to be tried."""
    sizes = {n: n for n in _sizes(call)}
    while _largest(call, sizes) > LARGEST:
        longest = max(sizes, key=sizes.__getitem__)
        sizes[longest] //= 2
    return sizes


def _positive(call: Call, sizes: Mapping[int, int]) -> Given:
    return _fill(call, sizes, lambda shape: torch.rand(shape, dtype=torch.float64).add(0.1))


def _signed(call: Call, sizes: Mapping[int, int], scale: float) -> Given:
    return _fill(call, sizes, lambda shape: torch.randn(shape, dtype=torch.float64).mul(scale))


def _fill(call: Call, sizes: Mapping[int, int], make: Callable[[list[int]], torch.Tensor]) -> Given:
    def tensor(item: Any) -> Any:
        return make([sizes.get(n, n) for n in item.sizes]).requires_grad_() if isinstance(item, Tensor) else item

    args, kwargs = pytree.tree_map(
        tensor, (tuple(call.args), dict(call.kwargs)), is_leaf=lambda item: isinstance(item, Tensor)
    )
    return args, kwargs


def _operands(given: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)]


def _kept(target: Any, trials: Sequence[Given], shapes: list[tuple[int, ...]], ins: int) -> Rule | None:
    """The rule of all guesses, for tensors of these `shapes`, that hold in all trials; the first is of tensors of these
    shapes."""
    kept: list[Guess] = []
    for size in dict.fromkeys(n for shape in shapes[:ins] for n in shape if n >= max(WAYS)):
        for guess in _guesses(shapes, ins, size):
            fresh = not any(d is not None and d == other[t] for other in kept for t, d in enumerate(guess))
            if fresh and _holds(Rule(_text(shapes, ins, [guess])), target, trials):
                kept.append(guess)
    if not kept:
        return None
    text = _text(shapes, ins, kept)
    return Rule(text, linear="all") if _holds(Rule(text, linear="all"), target, trials) else Rule(text)


def _guesses(shapes: list[tuple[int, ...]], ins: int, size: int) -> list[Guess]:
    """Every way to choose at most one dim of `size` per tensor; those that are in most tensors first."""
    places: list[list[int | None]] = [[*(d for d, n in enumerate(shape) if n == size), None] for shape in shapes]
    count = 1
    for options in places:
        count *= len(options)
    if count > MOST_GUESSES:
        return []
    found = [g for g in itertools.product(*places) if any(d is not None for d in g[:ins])]
    return sorted(found, key=lambda g: sum(d is None for d in g))


def _text(shapes: list[tuple[int, ...]], ins: int, guesses: list[Guess]) -> str:
    def word(tensor: int, dim: int) -> str:
        mine = [f"f{i}" for i, guess in enumerate(guesses) if guess[tensor] == dim]
        return mine[0] if mine else f"x{tensor}n{dim}!"

    parts = [" ".join(word(t, d) for d in range(len(shape))) for t, shape in enumerate(shapes)]
    return f"{', '.join(parts[:ins])} -> {', '.join(parts[ins:])}"


def _holds(rule: Rule, target: Any, trials: Sequence[Given]) -> bool:
    try:
        return not any(failures(rule, target, *given, ways) for given in trials for ways in WAYS)
    except (*FAILS, RuleError):
        return False


def _fitting(call: Call, rule: Rule | None) -> Rule | None:
    """The rule if it also fits the sizes of the call itself."""
    try:
        if rule is not None:
            rule.options(call, 2)
    except RuleError:
        return None
    return rule
