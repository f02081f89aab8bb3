"""Recognises a layer of experts that is written as a loop, and makes one call of `ops.experts` of it.

    for number, expert in enumerate(experts):
        token, rank = torch.where(chosen == number)
        out[token] += gates[token, rank, None] * expert(hidden[token])

How many rows each expert gets depends on data there, and nothing of it could be priced or cut; the layer as a whole can. The weights of the experts,
which stay parameters of their own, are stacked where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes import edit, facts
from passes.expert_layer import Layer, called, put, uncast
from passes.one_expert import Linear, expert_of, gates_of
from passes.picked import RANK, TOKEN, Mask, picked

aten = torch.ops.aten

ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
SPREAD = (aten.expand.default, aten.reshape.default, aten.to.dtype, aten.unsqueeze.default)
DISTINCT = (aten.topk.default, aten.sort.default)
"""Their second results name no place of a row twice."""


@dataclass(frozen=True)
class _Term:
    """What one expert adds: of which rows, by which layers, and how often."""

    mask: Mask
    hidden: fx.Node
    gates: fx.Node
    first: tuple[Linear, ...]
    second: Linear
    inner: str
    adds: bool
    """Whether rows that are named twice are added twice."""

    @property
    def shared(self) -> tuple[object, ...]:
        """What is the same for all experts of a layer."""
        linears = (*self.first, self.second)
        return self.mask.chosen, self.hidden, self.gates, self.inner, [(facts.shape(weight), bias is None) for weight, bias in linears]


def expert_loops(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional operators, contractions without bias, flattening reshapes sunk.
    does: finds sums that are written expert by expert, to the rows of tokens that chose it.
    gives: `ops.experts` on tokens that keep batch and sequence apart, and stacks of weights; loops of any other form stay as they are.
    """
    for node in reversed(list(edit.calls(gm, aten.index_add.default, aten.index_put.default))):
        terms, start = _terms(node) if node.users else ([], node)
        if not _one_layer(terms):
            continue
        with edit.before(node):
            new = called(_layer(terms, node), node)
            if not _zeros(start):
                new = edit.call(gm.graph, aten.add.Tensor, (start, new), like=node)
        put(node, new)
        edit.drop_dead(gm)
    return edit.finish(gm)


def _terms(last: fx.Node) -> tuple[list[_Term], fx.Node]:
    """What was added one after the other, up to `last`, and what it was added to."""
    found: list[_Term] = []
    node, above = last, None
    while (read := _written(node)) is not None and (above is None or {*node.users} <= above) and (term := _term(*read[1:])) is not None:
        found.append(term)
        above = {node, *(user for user in read[0].users if user.target is aten.index.Tensor and user.args[1] == [read[1]])}
        node = read[0]
    return found, node


def _written(node: fx.Node) -> tuple[fx.Node, Any, Any, bool] | None:
    """What `node` adds rows to, at which index, which rows, and whether rows named twice are added twice."""
    if node.target is aten.index_add.default:
        given = edit.args_of(node)
        return (given["self"], given["index"], given["source"], True) if given["dim"] == 0 and given["alpha"] == 1 else None
    if node.target is not aten.index_put.default:
        return None
    given = edit.args_of(node)
    if len(given["indices"]) != 1:
        return None
    (index,), total = given["indices"], edit.call_of(given["values"], aten.add.Tensor)
    if given["accumulate"]:
        return given["self"], index, given["values"], True
    for one, other in () if total is None or total.kwargs else (total.args, total.args[::-1]):
        before = edit.call_of(one, aten.index.Tensor)
        if before is not None and before.args == (given["self"], [index]):
            return given["self"], index, other, False
    return None


def _term(token: Any, rows: Any, adds: bool) -> _Term | None:
    found, product = picked(token), edit.call_of(uncast(rows), aten.mul.Tensor)
    if found is None or found[1] != TOKEN or product is None:
        return None
    for one, other in (product.args, product.args[::-1]):
        gates, layers = gates_of(other, token, found[0]), expert_of(one, token)
        if gates is not None and layers is not None:
            return _Term(found[0], layers[0], gates, *layers[1:], adds)
    return None


def _one_layer(terms: list[_Term]) -> bool:
    """Whether the terms are those of experts 0, 1, ..., each once, of one choice."""
    numbers = sorted(number for term in terms if (number := term.mask.number) is not None)
    if len(terms) < 2 or numbers != [*range(len(terms))]:
        return False
    mask, bias = terms[0].mask, terms[0].second[1]
    if not all(term.shared == terms[0].shared for term in terms) or not (bias is None or _in_range(mask, len(terms))):
        return False
    return all(term.adds for term in terms) or _distinct(mask)


def _distinct(mask: Mask) -> bool:
    """Whether no token chooses an expert twice."""
    return RANK not in mask.dims or edit.call_of(_ranked(mask), *DISTINCT) is not None


def _in_range(mask: Mask, count: int) -> bool:
    """Whether all that is chosen is known to be one of `count` numbers from 0 on."""
    ranked = _ranked(mask)
    numbers = None if ranked is None else facts.shape(ranked.args[0])[edit.args_of(ranked)["dim"]]  # type: ignore[arg-type]
    return isinstance(numbers, int) and numbers <= count


def _ranked(mask: Mask) -> fx.Node | None:
    """The operator that says for each token which numbers are its first, of all of which what is chosen is a part; None where something else says it."""
    part: Any = mask.chosen
    while (seen := edit.call_of(part, aten.reshape.default, aten.slice.Tensor, aten.select.int)) is not None and (seen.target is not aten.reshape.default or _last(seen) == _last(seen.args[0])):
        part = seen.args[0]
    if (best := edit.call_of(part, aten.argmax.default)) is not None:
        return best if edit.args_of(best)["dim"] is not None else None
    ranked = edit.call_of(edit.part_of(part, 1), *DISTINCT)
    return ranked if ranked is not None and edit.args_of(ranked)["dim"] in (-1, len(facts.shape(part)) - 1) else None


def _last(node: Any) -> facts.Size:
    return facts.shape(node)[-1]


def _zeros(node: fx.Node) -> bool:
    while (source := edit.call_of(node, *SPREAD)) is not None:
        node = source.args[0]  # type: ignore[assignment]
    return edit.call_of(node, *ZEROS) is not None


def _layer(terms: list[_Term], like: fx.Node) -> Layer:
    """Of these terms, with weights stacked at the insertion point."""
    terms = sorted(terms, key=lambda term: term.mask.number or 0)
    some, graph = terms[0], like.graph

    def stacked(tensors: list[fx.Node], each: int) -> fx.Node:
        together = edit.call(graph, aten.stack.default, (tensors,), like=like)
        sizes = [edit.size(together, dim) for dim in range(1, len(facts.shape(together)))]
        return together if each == 1 else edit.call(graph, aten.reshape.default, (together, [len(terms), each * sizes[0], *sizes[1:]]), like=like)  # type: ignore[operator]

    def turned(weights: list[fx.Node], each: int) -> fx.Node:
        return edit.call(graph, aten.transpose.int, (stacked(weights, each), 1, 2), like=like)

    each = len(some.first)
    up = turned([weight for term in terms for weight, _ in term.first], each)
    down = turned([term.second[0] for term in terms], 1)
    biases = [bias for term in terms for _, bias in term.first if bias is not None]
    outer = [bias for term in terms if (bias := term.second[1]) is not None]
    chosen, gates = (_by_token(node, RANK in some.mask.dims) for node in (some.mask.chosen, some.gates))
    if not _in_range(some.mask, len(terms)):  # no expert is called by a number below 0, and rows are sorted by number
        none = edit.call(graph, aten.lt.Scalar, (chosen, 0), like=like)
        chosen = edit.call(graph, aten.masked_fill.Scalar, (chosen, none, len(terms)), like=like)
    return Layer(some.hidden, chosen, gates, (up, down, some.inner, *([stacked(biases, each)] if biases else [])), stacked(outer, 1) if outer else None)


def _by_token(node: fx.Node, ranked: bool) -> fx.Node:
    """`[n, k]` of `[..., k]`, or of `[n]` where tokens choose one."""
    shape = facts.shape(node)
    if not ranked:
        return edit.call(node.graph, aten.unsqueeze.default, (node, -1), like=node)
    return node if len(shape) == 2 else edit.call(node.graph, aten.reshape.default, (node, [-1, shape[-1]]), like=node)
