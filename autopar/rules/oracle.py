"""Check of one rule by brute force: an operator on whole tensors against the same operator on shards, values and
gradients.

For every option of a call on one axis: cut random operands as the layouts of the option say, run the operator on every
shard, reassemble the outputs and compare; then the same with gradients, from a random cotangent in the layout that the
option says. All ranks are simulated in this process, without a process group. `derive` checks the rules that it guesses
in this way, and the tests check every row of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autopar._torch import pytree
from autopar.layout import PARTIAL, Entry, is_shard, local_shape, pieces
from autopar.rules.language import Call, Option, Tensor
from autopar.rules.local import local_args
from autopar.rules.rule import Rule
from autopar.tensors import differentiable

Shapes = Sequence[tuple[int, ...]]
Execute = Callable[[Any, Sequence[Any], Mapping[str, Any], Shapes], Any]
"""Runs a target on one shard: (target, args, kwargs, local shapes of the outputs) -> its result."""
RunOnAllRanks = Callable[[Sequence[tuple[Sequence[Any], Mapping[str, Any]]]], list[Any]]
"""Runs an algorithm on all shards at once: [(args, kwargs) per rank] -> [result per rank]."""


def plainly(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Shapes) -> Any:
    """The operator itself on one shard, with its size arguments made local."""
    local, named = local_args(target, args, kwargs, outs)
    return target(*local, **named)


def call_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """The call as rules see it, made from real tensors. Runs the operator once for the shapes of its outputs."""
    outs = _tensors(target(*args, **kwargs))
    grad = any(t.requires_grad for t in _tensors((args, kwargs)))

    def seen(item: Any) -> Any:
        return (
            Tensor(tuple(item.shape), item.requires_grad, (), differentiable(item), item.dtype.itemsize)
            if isinstance(item, torch.Tensor)
            else item
        )

    given = pytree.tree_map(seen, (tuple(args), dict(kwargs)))
    results = tuple(
        Tensor(tuple(t.shape), grad and differentiable(t), (), differentiable(t), t.dtype.itemsize) for t in outs
    )
    return Call(target, given[0], given[1], results)


def failures(
    rule: Rule,
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ways: int,
    *,
    execute: Execute = plainly,
    together: Mapping[str, RunOnAllRanks] | None = None,
    mask: bool = False,
) -> list[str]:
    """What is wrong with the options of `rule` for one call on `ways` ranks: one line for each wrong option. Options
    that cut a dim in two equal sections are tried too.

    Operands in `args` that require gradients are checked forward and backward. `execute` runs the operator on one
    shard. `together` has, for each runtime algorithm, a function that simulates it on all ranks at once; an option
    whose algorithm has none counts as wrong. `mask` compares shapes only, for operators whose values are random or
    undefined. Raises RuleError where the rule does not fit the call."""
    call = call_of(target, args, kwargs)
    found = []
    for option in rule.options(call, ways, sections=_sections(call, ways)):
        problem = _Trial(call, option, (tuple(args), dict(kwargs)), ways, mask).problem(execute, together or {})
        if problem:
            found.append(f"{target} {rule.text(call)!r} option {option.factor!r} on {ways}: {problem}")
    return found


def _sections(call: Call, ways: int) -> list[tuple[int, ...]]:
    """Two equal sections for every size that both can be cut in `ways` parts, as dims of fused projections have."""
    sizes = dict.fromkeys(size for tensor in (*call.ins, *call.outs) for size in tensor.shape if isinstance(size, int))
    return [(size // 2, size // 2) for size in sizes if size > 0 and size % (2 * ways) == 0]


def shards_of(given: Any, option: Option, ways: int) -> list[Any]:
    """(args, kwargs) per rank: `given` cut as `option` says."""
    whole = _tensors(given)
    parts = [cut(t.detach(), use.value, ways) for t, use in zip(whole, option.ins, strict=True)]
    ranks = []
    for rank in range(ways):
        queue = iter([p[rank].clone().requires_grad_(t.requires_grad) for p, t in zip(parts, whole, strict=True)])
        ranks.append(_swap(given, queue))
    return ranks


def shapes_of(outs: Sequence[torch.Tensor], option: Option, ways: int) -> list[list[tuple[int, ...]]]:
    """The shapes of the outputs on each rank: [rank][output]."""
    return [
        [local_shape(t.shape, (use.value,), (ways,), (rank,)) for t, use in zip(outs, option.outs, strict=True)]
        for rank in range(ways)
    ]


class _Trial:
    """One option of one call, tried with random cotangents."""

    def __init__(self, call: Call, option: Option, given: Any, ways: int, mask: bool) -> None:
        self.call, self.option, self.given, self.ways, self.mask = call, option, given, ways, mask
        self.loose = False

    def problem(self, execute: Execute, together: Mapping[str, RunOnAllRanks]) -> str:
        """What differs from the whole, or an empty string."""
        whole_ins = _tensors(self.given)
        whole_outs = _tensors(self.call.target(*self.given[0], **self.given[1]))
        self.loose = any(t.dtype in (torch.float32, torch.bfloat16, torch.float16) for t in (*whole_ins, *whole_outs))
        shards, shapes = shards_of(self.given, self.option, self.ways), shapes_of(whole_outs, self.option, self.ways)
        try:
            outs = self._run(shards, shapes, execute, together)
        except (RuntimeError, IndexError, ValueError, TypeError, KeyError) as error:
            return f"fails on a shard: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        for index, (whole, use) in enumerate(zip(whole_outs, self.option.outs, strict=True)):
            parts = [out[index] for out in outs]
            wanted = [shape[index] for shape in shapes]
            if [tuple(p.shape) for p in parts] != wanted:
                return f"output {index} {use}: local shapes {[tuple(p.shape) for p in parts]}, wanted {wanted}"
            if self.mask:
                continue
            if text := compare(join(parts, use.value, whole.shape), whole, f"output {index} {use}", self.loose):
                return text
        return "" if self.mask else self._backward(whole_ins, whole_outs, shards, outs)

    def _run(
        self, shards: Sequence[Any], shapes: Sequence[Shapes], execute: Execute, together: Mapping[str, RunOnAllRanks]
    ) -> list[list[torch.Tensor]]:
        """The outputs on each rank: by the option's runtime algorithm on all ranks together, or by the operator on each
        shard."""
        if self.option.run:
            return [_tensors(out) for out in together[self.option.run](shards)]
        return [
            _tensors(execute(self.call.target, args, kwargs, outs))
            for (args, kwargs), outs in zip(shards, shapes, strict=True)
        ]

    def _backward(
        self,
        whole_ins: Sequence[torch.Tensor],
        whole_outs: Sequence[torch.Tensor],
        shards: Sequence[Any],
        outs: Sequence[Sequence[torch.Tensor]],
    ) -> str:
        """What differs in the gradients of operands, or an empty string."""
        live = [i for i, t in enumerate(whole_outs) if t.requires_grad]
        asked = [i for i, t in enumerate(whole_ins) if t.requires_grad]
        if not live or not asked:
            return ""
        cotangents = {i: torch.randn_like(whole_outs[i]) for i in live}
        wanted = gradients([whole_outs[i] for i in live], [whole_ins[i] for i in asked], [cotangents[i] for i in live])
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i in live:
            parts = cut(cotangents[i], self.option.outs[i].grad, self.ways)
            pairs += [(out[i], part) for out, part in zip(outs, parts, strict=True) if out[i].requires_grad]
        leaves = [_tensors(shard)[i] for i in asked for shard in shards]
        got = gradients([out for out, _ in pairs], leaves, [part for _, part in pairs])
        for place, index in enumerate(asked):
            parts = got[place * self.ways : (place + 1) * self.ways]
            use = self.option.ins[index]
            if text := compare(
                join(parts, use.grad, whole_ins[index].shape),
                wanted[place],
                f"gradient of operand {index} {use}",
                self.loose,
            ):
                return text
        return ""


def gradients(
    outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The gradients of `ins` for the given cotangents, zeros for inputs that no output depends on."""
    if not outs:
        return [torch.zeros_like(x) for x in ins]
    found = torch.autograd.grad(list(outs), list(ins), list(cotangents), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, ins, strict=True)]


def cut(whole: torch.Tensor, entry: Entry, ways: int) -> list[torch.Tensor]:
    """The parts of `whole` on each rank of one axis. Partial ones are random tensors whose sum is `whole`."""
    if is_shard(entry):
        return [_shard(whole, entry, ways, rank) for rank in range(ways)]
    if entry != "P":
        return [whole] * ways
    if differentiable(whole):
        parts = [torch.randn_like(whole) for _ in range(ways - 1)]
    elif whole.dtype is torch.bool:  # a sum of booleans is an or: each true value on one rank
        owner = torch.randint(ways, whole.shape)
        return [whole & (owner == rank) for rank in range(ways)]
    else:
        parts = [torch.randint_like(whole, -5, 5) for _ in range(ways - 1)]
    return [*parts, whole - sum(parts[1:], parts[0])] if parts else [whole]


def _shard(whole: torch.Tensor, entry: Entry, ways: int, rank: int) -> torch.Tensor:
    """The part of `whole` that `rank` has under the layout entry."""
    for dim, size in enumerate(whole.shape):
        ranges = pieces(size, (entry,), dim, (ways,), (rank,))
        if ranges != [(0, size)]:
            whole = torch.cat([whole.narrow(dim, lo, hi - lo) for lo, hi in ranges], dim)
    return whole


def join(parts: Sequence[torch.Tensor], entry: Entry, shape: Sequence[int]) -> torch.Tensor | str:
    """The whole value that `parts` make in the layout `entry`, or a text that says what is wrong: shards of another
    shape, replicas that differ."""
    if is_shard(entry):
        whole = torch.empty(tuple(shape), dtype=parts[0].dtype)
        index = torch.arange(whole.numel()).reshape(whole.shape)
        for rank, part in enumerate(parts):
            place = _shard(index, entry, len(parts), rank)
            if place.shape != part.shape:
                return f"rank {rank} holds {tuple(part.shape)}, wanted {tuple(place.shape)}"
            whole.view(-1)[place.reshape(-1)] = part.detach().reshape(-1)
        return whole
    if entry not in PARTIAL:
        for rank, part in enumerate(parts):
            if text := compare(
                part, parts[0], f"rank {rank} differs from rank 0", loose=part.dtype is not torch.float64
            ):
                return text
        return parts[0]
    stacked = torch.stack(list(parts))
    if entry == "P":
        return stacked.any(0) if stacked.dtype is torch.bool else stacked.sum(0).to(stacked.dtype)
    return stacked.amax(0) if entry == "Pmax" else stacked.amin(0)


def compare(got: torch.Tensor | str, wanted: torch.Tensor, what: str, loose: bool = False) -> str:
    """How `got` differs from `wanted`, or "" where they agree; `loose` where something was rounded to less than
    float64."""
    if isinstance(got, str):
        return f"{what}: {got}"
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{what}: got {tuple(got.shape)} {got.dtype}, wanted {tuple(wanted.shape)} {wanted.dtype}"
    close = 1e-4 if loose else 1e-9 if differentiable(wanted) else 0.0
    if torch.allclose(got, wanted, rtol=close, atol=close, equal_nan=True):
        return ""
    return f"{what}: differs by up to {_gap(got.detach(), wanted.detach()):.2g}"


def _gap(got: torch.Tensor, wanted: torch.Tensor) -> float:
    kind = torch.complex128 if wanted.is_complex() else torch.float64
    return float((got.to(kind) - wanted.to(kind)).abs().max())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _swap(tree: Any, queue: Iterator[torch.Tensor]) -> Any:
    return pytree.tree_map(lambda leaf: next(queue) if isinstance(leaf, torch.Tensor) else leaf, tree)
