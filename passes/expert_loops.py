"""Recognises a layer of experts that is written as a loop, and replaces it by a call of `ops.experts`.

    for number, expert in enumerate(experts):
        token, rank = torch.where(chosen == number)
        out[token] += gates[token, rank, None] * expert(hidden[token])

The number of rows of each expert depends on data, so the operators inside can be neither priced nor split; the layer as
a whole can. The weights of the experts stay separate parameters, and are stacked where they are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes.chosen import distinct, in_range
from passes.expert_layer import Layer, called, flat, is_zeros, put, together, uncast
from passes.gated import Gates, choice, column, gates_of
from passes.one_expert import Expert, expert_of
from passes.picked import Mask, taken, tokens

aten = torch.ops.aten


@dataclass(frozen=True)
class _Write:
    """A node that writes `rows` into the rows of `into` that `indices` select. `how`: ADDED (as often as a row is
    named), ADDED_ONCE (once for each row), or PUT (in place of what was there)."""

    into: fx.Node
    indices: list[Any]
    rows: Any
    how: str


ADDED, ADDED_ONCE, PUT = "added", "added once", "put"


@dataclass(frozen=True)
class _Term:
    """What one expert writes: to which rows, by which layers, and what its gates may be."""

    mask: Mask
    expert: Expert
    gates: list[Gates]
    how: str

    @property
    def shared(self) -> tuple[object, ...]:
        """What is the same for all experts of a layer."""
        return self.mask.chosen, self.mask.ranked, self.how, self.expert.form


def expert_loops(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional operators, contractions without bias, flattening reshapes sunk, equal views one.
    does: finds sums that are written expert by expert, to the rows of tokens that chose it.
    gives: `ops.experts` on tokens that keep batch and sequence apart, and stacks of weights; loops of any other form
           stay as they are."""
    for node in reversed(list(edit.calls(gm, aten.index_add.default, aten.index_put.default))):
        terms, start = _terms(node) if node.users else ([], node)
        layers = _layers(terms, start)
        if not layers:
            continue
        with edit.before(node):
            parts = [part for terms, gates in layers for part in _parts(terms, gates, node)]
            if not is_zeros(start):
                parts.insert(0, start)
            new = parts[0]
            for part in parts[1:]:
                new = edit.call(node, aten.add.Tensor, new, part)
        put(node, new)
        edit.drop_dead(gm)
    return edit.finish(gm)


def _terms(last: fx.Node) -> tuple[list[_Term], fx.Node]:
    """The terms that were written one after the other, up to `last`, and the tensor that they were written to."""
    found: list[_Term] = []
    node, above = last, None
    while (
        (read := _written(node)) is not None
        and (above is None or {*node.users} <= above)
        and (term := _term(read)) is not None
    ):
        found.append(term)
        above = {node, *(user for user in read.into.users if taken(user) == (read.into, read.indices))}
        node = read.into
    return found, node


def _written(node: fx.Node) -> _Write | None:
    """What `node` writes; None where it does nothing of the kind."""
    if node.target is aten.index_add.default:
        given = edit.args_of(node)
        return (
            _Write(given["self"], [given["index"]], given["source"], ADDED)
            if given["dim"] == 0 and given["alpha"] == 1
            else None
        )
    if node.target is not aten.index_put.default:
        return None
    given = edit.args_of(node)
    into, indices, values = given["self"], given["indices"], given["values"]
    if len(indices) != 1:
        return None
    if given["accumulate"]:
        return _Write(into, indices, values, ADDED)
    total = edit.call_of(uncast(values), aten.add.Tensor)
    for one, other in () if total is None or total.kwargs else (total.args, total.args[::-1]):
        if taken(one) == (into, indices):
            return _Write(into, indices, other, ADDED_ONCE)
    return _Write(into, indices, values, PUT)


def _term(write: _Write) -> _Term | None:
    """The rows of one expert that are written; None where they are none."""
    found, rows = tokens(write.indices), uncast(write.rows)
    if found is None or facts.rank(write.into) != found[1] + 1:
        return None
    mask, product = found[0], edit.call_of(rows, aten.mul.Tensor)
    for one, other in () if product is None else (product.args, product.args[::-1]):
        gates, expert = gates_of(other, mask), expert_of(one, mask)
        if gates and expert is not None:
            return _Term(mask, expert, gates, write.how)
    expert = expert_of(rows, mask)
    return None if expert is None else _Term(mask, expert, [Gates(None)], write.how)


def _layers(terms: list[_Term], start: fx.Node) -> list[tuple[list[_Term], Gates]]:
    """The terms grouped by layer of experts, with the gates of each; empty where some term belongs to no layer."""
    found: list[list[_Term]] = []
    for term in terms:
        group = next((group for group in found if group[0].shared == term.shared), None)
        if group is None:
            found.append([term])
        else:
            group.append(term)
    layers = [
        (sorted(group, key=lambda term: term.mask.number or 0), gates)
        for group in found
        if (gates := _one_layer(group)) is not None
    ]
    overwritten = any(term.how == PUT for term in terms) and (len(found) > 1 or not is_zeros(start))
    return layers if len(layers) == len(found) and not overwritten else []


def _one_layer(terms: list[_Term]) -> Gates | None:
    """The gates of a group of terms that is a layer: each of the experts 0, 1, ... occurs once, and all share one
    choice of experts. None where the group is no layer."""
    mask, count = terms[0].mask, len(terms)
    gates = next((gates for gates in terms[0].gates if all(gates in term.gates for term in terms)), None)
    if count < 2 or gates is None or sorted(term.mask.number or 0 for term in terms) != [*range(count)]:
        return None
    if (terms[0].expert.second.bias is not None or gates.all) and not in_range(mask.chosen, count):
        return None
    once = terms[0].how != ADDED or gates.summed or any(term.mask.over for term in terms)
    return (
        None if (once and mask.ranked and not distinct(mask.chosen)) or (mask.ranked and terms[0].how == PUT) else gates
    )


def _parts(terms: list[_Term], gates: Gates, like: fx.Node) -> Iterator[fx.Node]:
    """The calls of `ops.experts` whose sum the terms (in order of experts) compute, at the insertion point: one, or
    where dropout follows each expert's layers, one for each of the k choices of a token."""
    dropped = terms[0].expert.dropped
    layer = _layer(terms, gates, like)
    choices = facts.shape(layer.chosen)[-1]
    if dropped is None:
        yield called(layer, like)
        return
    for rank in range(int(choices)):
        chosen, weights = (flat(column(node, rank, like)) for node in (layer.chosen, layer.gates))
        part = called(replace(layer, chosen=chosen, gates=weights), like)
        yield edit.call(dropped, dropped.target, part, *dropped.args[1:], **dropped.kwargs)


def _layer(terms: list[_Term], gates: Gates, like: fx.Node) -> Layer:
    """The Layer of these terms (in order of experts), with weights stacked at the insertion point."""
    some = terms[0]
    experts = [term.expert for term in terms]
    first = [linear for expert in experts for linear in expert.first]
    each = len(some.expert.first)
    up = _stacked([linear.weight for linear in first], each, turned=some.expert.first[0].turned, like=like)
    down = _stacked([expert.second.weight for expert in experts], 1, turned=some.expert.second.turned, like=like)
    biases = [linear.bias for linear in first if linear.bias is not None]
    outer = [expert.second.bias for expert in experts if expert.second.bias is not None]
    chosen, weights = choice(some.mask, gates, like)
    # no expert is called by a number below 0, and rows are sorted by number
    if not in_range(some.mask.chosen, len(terms)):
        none = edit.call(like, aten.lt.Scalar, chosen, 0)
        chosen = edit.call(like, aten.masked_fill.Scalar, chosen, none, len(terms))
    inner_bias = [together(biases, each, like)] if biases else []
    return Layer(
        flat(some.expert.hidden),
        chosen,
        weights,
        (up, down, some.expert.inner, *inner_bias),
        together(outer, 1, like) if outer else None,
    )


def _stacked(weights: list[fx.Node], each: int, *, turned: bool, like: fx.Node) -> fx.Node:
    """The weights `[experts, i, o]`, stacked from matrices `[o, i]`, or `[i, o]` where they are `turned`. Each expert
    has `each` of them, whose results are concatenated."""
    if not turned or each == 1:
        found = together(weights, each, like)
        return found if turned else edit.call(like, aten.transpose.int, found, 1, 2)
    return edit.call(like, aten.cat.default, [together(weights[place::each], 1, like) for place in range(each)], 2)
