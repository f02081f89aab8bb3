"""The options that a rule gives for a call: what its specification matches, on one mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import RuleError
from autopar.layout import NO_GRAD, Entry, shard
from autopar.rules.language import Call, Dim, Option, Shaped, Tensor, Together, Use, parse


def options(
    text: str,
    call: Call,
    ways: int,
    *,
    linear: str = "",
    reduce: str = "P",
    sections: Sequence[tuple[int, ...]] = (),
    together: Together = (),
) -> list[Option]:
    """Everything that `call` can do on an axis of `ways` ranks, by rule `text`; replicated first.

    `linear` is "", "all" (linear in all operands together: add, view), "each" (linear in each one alone: mul, matmul)
    or "first" (linear in the first: div). `reduce` names the partial result of summed-over factors. `sections` lists
    sections in absolute sizes that dims of other operators are known to have (fused projections): a plain factor whose
    size is their sum, and which no runtime algorithm cuts, may be cut section by section. `together` lists sets of
    factors that may be cut at once, with the runtime algorithm of each; a tensor may have one factor of a set.
    """
    spec = parse(text)
    if not call.ins and spec.ins == ((),):
        spec = replace(spec, ins=(), added=())  # nothing before the arrow: no operands
    shaped = Shaped(spec, call, text)
    out = [_uniform(call, "", "R", "R")]
    if any(t.grad for t in call.outs):
        out.append(_uniform(call, "grad", "R", "P"))
    for group in shaped.groups():
        if any(f in spec.whole or f == "1" for f in group):
            continue
        out += _split(shaped, group, ways, reduce, sections, dict(spec.runs).get(group[0], ""))
    for group, run in together:
        if missing := [f for f in group if f not in shaped.sizes]:
            raise RuleError(
                f"rule {text!r} for {call.target}: factors {', '.join(group)} are to be cut together, and the call has "
                f"no factor {missing[0]}"
            )
        out += _split(shaped, group, ways, reduce, (), run)
    return out + _linear(call, linear)


def _uniform(call: Call, name: str, value: Entry, grad: Entry) -> Option:
    return Option(
        name, _seen(call, [_use(t, value, grad) for t in call.ins]), tuple(_use(t, value, grad) for t in call.outs)
    )


def _seen(call: Call, uses: Sequence[Use]) -> tuple[Use, ...]:
    """Uses of operands: an operator whose outputs have no gradient sends none back."""
    return tuple(uses) if any(t.grad for t in call.outs) else tuple(Use(u.value, NO_GRAD) for u in uses)


def _use(tensor: Tensor, value: Entry, grad: Entry) -> Use:
    return Use(value, grad if tensor.grad else NO_GRAD)


def _split(
    shaped: Shaped, group: tuple[str, ...], ways: int, reduce: str, sections: Sequence[tuple[int, ...]], run: str
) -> list[Option]:
    call = shaped.call
    if not all(shaped.divides(f, ways) for f in group):
        return []
    variants: list[tuple[int, ...]] = [(1,)]
    # runtime algorithms count from the first element that a rank has
    if len(group) == 1 and shaped.plain(group[0]) and not run:
        variants += [s for s in sections if sum(s) == shaped.sizes[group[0]] and all(n % ways == 0 for n in s)]
    found = []
    for cut in variants:
        outs = tuple(
            _place_use(shaped, group, dims, t, cut, True, reduce)
            for dims, t in zip(shaped.outs, call.outs, strict=True)
        )
        parts = any(use.value == reduce for use in outs)
        ins = _seen(
            call,
            [
                _place_use(shaped, group, dims, t, cut, parts and added, reduce)
                for dims, t, added in zip(shaped.ins, call.ins, shaped.spec.added, strict=True)
            ],
        )
        if reduce != "P" and any(u.value == reduce and t.grad for u, t in zip(outs, call.outs, strict=True)):
            continue  # the gradient of a maximum goes to one rank only: no layout describes it
        name = ("+" if run else "|").join(group) + ("" if len(cut) == 1 else "/" + ":".join(map(str, cut)))
        found.append(Option(name, ins, outs, run, split=True))
    return found


def _place_use(
    shaped: Shaped,
    group: tuple[str, ...],
    dims: Sequence[Dim],
    tensor: Tensor,
    cut: tuple[int, ...],
    summed: bool,
    reduce: str,
) -> Use:
    """How a tensor lies; one without the factors is a part of what is `summed`, or the same on all ranks."""
    for index, dim in enumerate(dims):
        if dim.join == "|" and dim.factors == group:
            return _use(tensor, entry := shard(index, tuple(shaped.sizes[f] for f in group)), entry)
    for factor in group:
        if place := shaped.place(factor, dims):
            entry = shard(place[0], cut) if len(cut) > 1 else place[1]
            return _use(tensor, entry, entry)
    return _use(tensor, reduce, "R") if summed else _use(tensor, "R", "P")


def _linear(call: Call, linear: str) -> list[Option]:
    if not linear or not call.ins:
        return []
    if linear == "all":
        return [_uniform(call, "P", "P", "R")]
    out = []
    outs = tuple(_use(t, "P", "R") for t in call.outs)
    for group in _groups(call, linear):
        if any(call.ins[i].grad for i in group) or not any(t.grad for t in call.outs):
            ins = tuple(_use(t, "P", "R") if j in group else _use(t, "R", "P") for j, t in enumerate(call.ins))
            out.append(Option("P" + "+".join(map(str, group)), ins, outs))
    return out


def _groups(call: Call, linear: str) -> list[tuple[int, ...]]:
    if linear == "each":
        return [(i,) for i in range(len(call.ins))]
    if linear == "first":
        return [(0,)]
    return [tuple(int(i) for i in group.split("+")) for group in linear.split("|")]
