"""The options on one mesh axis that a rule string gives for one call; called by `Rule.options`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import RuleError
from autopar.layout import NO_GRAD, Entry, shard
from autopar.rules.language import Call, Dim, FittedRule, Option, Tensor, Together, Use, parse


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
    """All options of `call` on an axis of `ways` ranks by the rule string `text`; the replicated one comes first.

    `linear` and `reduce` are as in `Rule`. `sections` lists the sizes of the sections that dims of other operators in
    the graph have (fused projections); a factor whose size is the sum of such sections may be cut section by section
    too, if it is a dim by itself and needs no runtime algorithm. `together` lists sets of factors that may be cut at
    the same time, each with its runtime algorithm; no tensor has more than one factor of a set.

    Raises RuleError where `text` does not fit the call."""
    spec = parse(text)
    if not call.ins and spec.ins == ((),):
        spec = replace(spec, ins=(), added=())  # nothing before the arrow: no operands
    fitted = FittedRule(spec, call, text)
    out = [_uniform(call, "", "R", "R")]
    if any(t.grad for t in call.outs):
        out.append(_uniform(call, "grad", "R", "P"))
    for group in fitted.groups():
        if any(f in spec.whole or f == "1" for f in group):
            continue
        out += _split(fitted, group, ways, reduce, sections, dict(spec.runs).get(group[0], ""))
    for group, run in together:
        if missing := [f for f in group if f not in fitted.sizes]:
            raise RuleError(
                f"rule {text!r} for {call.target}: factors {', '.join(group)} are to be cut together, and the call has "
                f"no factor {missing[0]}"
            )
        out += _split(fitted, group, ways, reduce, (), run)
    return out + _linear(call, linear)


def _uniform(call: Call, name: str, value: Entry, grad: Entry) -> Option:
    """The option in which all tensors have the layout `value`, and all gradients `grad`."""
    return Option(
        name,
        _operand_uses(call, [_use(t, value, grad) for t in call.ins]),
        tuple(_use(t, value, grad) for t in call.outs),
    )


def _operand_uses(call: Call, uses: Sequence[Use]) -> tuple[Use, ...]:
    """Uses of operands, with no gradient where no output has one: the backward of such an operator never runs."""
    return tuple(uses) if any(t.grad for t in call.outs) else tuple(Use(u.value, NO_GRAD) for u in uses)


def _use(tensor: Tensor, value: Entry, grad: Entry) -> Use:
    """The use of a tensor in the layout `value`, with the layout `grad` of its gradient if it has one."""
    return Use(value, grad if tensor.grad else NO_GRAD)


def _split(
    fitted: FittedRule, group: tuple[str, ...], ways: int, reduce: str, sections: Sequence[tuple[int, ...]], run: str
) -> list[Option]:
    """The options that split the factors of `group` over `ways` ranks: contiguously, and by each of `sections` that
    fits; none where a factor cannot be cut so."""
    call = fitted.call
    if not all(fitted.divides(f, ways) for f in group):
        return []
    variants: list[tuple[int, ...]] = [(1,)]
    # runtime algorithms count from the first element that a rank has
    if len(group) == 1 and fitted.plain(group[0]) and not run:
        variants += [s for s in sections if sum(s) == fitted.sizes[group[0]] and all(n % ways == 0 for n in s)]
    found = []
    for cut in variants:
        outs = tuple(
            _place_use(fitted, group, dims, t, cut, True, reduce)
            for dims, t in zip(fitted.outs, call.outs, strict=True)
        )
        parts = any(use.value == reduce for use in outs)
        ins = _operand_uses(
            call,
            [
                _place_use(fitted, group, dims, t, cut, parts and added, reduce)
                for dims, t, added in zip(fitted.ins, call.ins, fitted.spec.added, strict=True)
            ],
        )
        if reduce != "P" and any(u.value == reduce and t.grad for u, t in zip(outs, call.outs, strict=True)):
            continue  # the gradient of a maximum goes to one rank only: no layout describes it
        name = ("+" if run else "|").join(group) + ("" if len(cut) == 1 else "/" + ":".join(map(str, cut)))
        found.append(Option(name, ins, outs, run, split=True))
    return found


def _place_use(
    fitted: FittedRule,
    group: tuple[str, ...],
    dims: Sequence[Dim],
    tensor: Tensor,
    cut: tuple[int, ...],
    summed: bool,
    reduce: str,
) -> Use:
    """The use of one tensor where `group` is split in the sections `cut`. A tensor that has none of these factors is a
    partial result (`reduce`) where it is `summed`, else it is the same on all ranks."""
    for index, dim in enumerate(dims):
        if dim.join == "|" and dim.factors == group:
            return _use(tensor, entry := shard(index, tuple(fitted.sizes[f] for f in group)), entry)
    for factor in group:
        if place := fitted.place(factor, dims):
            entry = shard(place[0], cut) if len(cut) > 1 else place[1]
            return _use(tensor, entry, entry)
    return _use(tensor, reduce, "R") if summed else _use(tensor, "R", "P")


def _linear(call: Call, linear: str) -> list[Option]:
    """The options in which partial sums pass from operands to outputs, by the operator's linearity (`Rule.linear`)."""
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
    """The sets of operands in which the operator is linear, as `Rule.linear` says."""
    if linear == "each":
        return [(i,) for i in range(len(call.ins))]
    if linear == "first":
        return [(0,)]
    return [tuple(int(i) for i in group.split("+")) for group in linear.split("|")]
