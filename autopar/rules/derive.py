"""Rules for operators without a row: guessed from equal sizes, and kept where all trials come out right.

A factor is guessed to be at most one dim of each tensor, all of the same size: `[b, d], [d] -> [b, d]` suggests b and
d. Each guess is tried (`oracle.failures`) on random tensors on several numbers of ranks (on one with a row for each
rank, too), values and gradients. Tensors have small sizes, and the call's own sizes up to a limit; values are positive,
signed, large and small. Only public functional operators on floating-point tensors that draw no random numbers are
tried, because they are run here, on the CPU, with the arguments of the call.

Trials are no proof: an operator may behave in another way from some size or value on that no trial has. Torch's own
operators are known not to do that; for others a rule is derived only where the user asks for it."""

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

STAND_IN_SIZES = (6, 5, 7, 9, 8, 10, 11, 13)  # small sizes in place of the distinct sizes of a call
TRIAL_RANKS = (2, 3)  # numbers of ranks in trials
MOST_TRIAL_RANKS = 64  # where each rank has one row: operators that drop dims of size 1 do something else then
MOST_GUESSES = 64  # guesses for one size; a call with more of them is not tried
MOST_OWN_SIZE_ELEMENTS = 1 << 14  # of the largest operand, where the operator takes the call's own sizes only
MOST_TRIAL_ELEMENTS = 1 << 17  # of the largest operand, in trials at (nearly) the call's own sizes
SCALES = (1.0, 100.0, 0.01)  # standard deviations of signed values
# what operators raise on arguments that they refuse
REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)

Given = tuple[tuple[Any, ...], dict[str, Any]]
Guess = tuple[int | None, ...]  # the dim that has the factor, per operand and output
_KNOWN: dict[Any, Rule | None] = {}


def derive(call: Call) -> Rule | None:
    """The rule of all guesses that hold for `call` in all trials; None where none holds. It depends on the target, the
    sizes and the arguments alone, and is computed once for each of these."""
    key = repr((call.target, call.args, sorted(call.kwargs.items()), call.outs))
    if key not in _KNOWN:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _KNOWN[key] = _derive(call) if _eligible(call) else None
    return _KNOWN[key]


def _eligible(call: Call) -> bool:
    """Whether the operator may be run here in trials: public, functional, deterministic, on floating-point tensors,
    with shapes of outputs that do not depend on data."""
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
    """Whether an operator is one of torch's private ones. Their kernels do not check their arguments, and may write out
    of bounds where shapes do not fit each other."""
    return target._schema.name.startswith("aten::_")


def _derive(call: Call) -> Rule | None:
    """The rule for the first stand-in sizes that the operator takes."""
    for sizes in _stand_ins(call):
        small = _positive(call, sizes)
        outs = _results(call, small)
        if outs is not None:
            shapes = [tuple(t.shape) for t in [*_operands(small), *outs]]
            return _fitting(
                call, _rule_that_holds(call.target, [small, *_further_trials(call, sizes)], shapes, len(call.ins))
            )
    return None


def _results(call: Call, given: Given) -> list[torch.Tensor] | None:
    """The outputs of the operator for the operands of a trial; None where it refuses them or gives other numbers of
    outputs or dims than in the call."""
    try:
        outs = _operands(call.target(*given[0], **given[1]))
    except REFUSALS:
        return None
    return (
        outs
        if len(outs) == len(call.outs) and all(t.ndim == len(o.shape) for t, o in zip(outs, call.outs, strict=True))
        else None
    )


def _stand_ins(call: Call) -> Iterator[dict[int, int]]:
    """Sizes for trials, by the call's sizes: small ones, one for each distinct size; and, where no operand is larger
    than MOST_OWN_SIZE_ELEMENTS, the call's own, for operators with sizes among their arguments."""
    sizes = _sizes(call)
    if len(sizes) <= len(STAND_IN_SIZES):
        yield dict(zip(sizes, STAND_IN_SIZES, strict=False))
    if _largest(call, {}) <= MOST_OWN_SIZE_ELEMENTS:
        yield {n: n for n in sizes}


def _sizes(call: Call) -> list[int]:
    """The distinct sizes above 1 of the call's operands."""
    return list(dict.fromkeys(n for t in call.ins for n in t.sizes if n > 1))


def _largest(call: Call, sizes: Mapping[int, int]) -> int:
    """Elements of the largest operand, with its sizes replaced as `sizes` says."""
    return max(math.prod(sizes.get(n, n) for n in t.sizes) for t in call.ins)


def _further_trials(call: Call, small: Mapping[int, int]) -> list[Given]:
    """Further trials: signed, large and small values, at small sizes and at the call's own, where the operator takes
    them."""
    found = [_signed(call, sizes, scale) for sizes in (small, _own_sizes(call)) for scale in SCALES]
    return [given for given in found if _results(call, given) is not None]


def _own_sizes(call: Call) -> dict[int, int]:
    """The call's own sizes; the longest is halved until no operand has more than MOST_TRIAL_ELEMENTS elements."""
    sizes = {n: n for n in _sizes(call)}
    while _largest(call, sizes) > MOST_TRIAL_ELEMENTS:
        longest = max(sizes, key=sizes.__getitem__)
        sizes[longest] //= 2
    return sizes


def _positive(call: Call, sizes: Mapping[int, int]) -> Given:
    """A trial with values from 0.1 to 1.1, which logarithms and roots take too."""
    return _fill(call, sizes, lambda shape: torch.rand(shape, dtype=torch.float64).add(0.1))


def _signed(call: Call, sizes: Mapping[int, int], scale: float) -> Given:
    """A trial with normal values of standard deviation `scale`."""
    return _fill(call, sizes, lambda shape: torch.randn(shape, dtype=torch.float64).mul(scale))


def _fill(call: Call, sizes: Mapping[int, int], make: Callable[[list[int]], torch.Tensor]) -> Given:
    """The arguments of the call, with tensors of the replaced sizes that `make` fills."""

    def tensor(item: Any) -> Any:
        return make([sizes.get(n, n) for n in item.sizes]).requires_grad_() if isinstance(item, Tensor) else item

    args, kwargs = pytree.tree_map(
        tensor, (tuple(call.args), dict(call.kwargs)), is_leaf=lambda item: isinstance(item, Tensor)
    )
    return args, kwargs


def _operands(given: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results, in order."""
    return [t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)]


def _rule_that_holds(target: Any, trials: Sequence[Given], shapes: list[tuple[int, ...]], ins: int) -> Rule | None:
    """The rule with all guessed factors that hold in all trials; None where none holds. `shapes` are those of the
    operands of the first trial, of which there are `ins`, then those of its outputs."""
    kept: list[Guess] = []
    for size in dict.fromkeys(n for shape in shapes[:ins] for n in shape if n >= max(TRIAL_RANKS)):
        for guess in _guesses(shapes, ins, size):
            fresh = not any(d is not None and d == other[t] for other in kept for t, d in enumerate(guess))
            rule, most = Rule(_text(shapes, ins, [guess])), min(size, MOST_TRIAL_RANKS)
            if fresh and _holds(rule, target, trials[:1], most) and _holds(rule, target, trials):
                kept.append(guess)
    if not kept:
        return None
    text = _text(shapes, ins, kept)
    return Rule(text, linear="all") if _holds(Rule(text, linear="all"), target, trials) else Rule(text)


def _guesses(shapes: list[tuple[int, ...]], ins: int, size: int) -> list[Guess]:
    """Every way to choose at most one dim of `size` in each tensor, in some operand at least; those with a dim in most
    tensors first. None where there are more than MOST_GUESSES."""
    places: list[list[int | None]] = [[*(d for d, n in enumerate(shape) if n == size), None] for shape in shapes]
    count = 1
    for options in places:
        count *= len(options)
    if count > MOST_GUESSES:
        return []
    found = [g for g in itertools.product(*places) if any(d is not None for d in g[:ins])]
    return sorted(found, key=lambda g: sum(d is None for d in g))


def _text(shapes: list[tuple[int, ...]], ins: int, guesses: list[Guess]) -> str:
    """The rule string that has one factor per guess, and all other dims whole."""

    def word(tensor: int, dim: int) -> str:
        mine = [f"f{i}" for i, guess in enumerate(guesses) if guess[tensor] == dim]
        return mine[0] if mine else f"x{tensor}n{dim}!"

    parts = [" ".join(word(t, d) for d in range(len(shape))) for t, shape in enumerate(shapes)]
    return f"{', '.join(parts[:ins])} -> {', '.join(parts[ins:])}"


def _holds(rule: Rule, target: Any, trials: Sequence[Given], *ranks: int) -> bool:
    """Whether the rule is right in all trials, on all numbers of ranks in `ranks`, or else in TRIAL_RANKS."""
    try:
        return not any(failures(rule, target, *given, ways) for given in trials for ways in ranks or TRIAL_RANKS)
    except (*REFUSALS, RuleError):
        return False


def _fitting(call: Call, rule: Rule | None) -> Rule | None:
    """The rule if it also fits the sizes of the call itself, else None."""
    try:
        if rule is not None:
            rule.options(call, 2)
    except RuleError:
        return None
    return rule
